"""The error of a call about weights."""

from __future__ import annotations


class WeightsError(Exception):
    """A call failed, and the model is as it was before. The message is for the client.

    `status` is the HTTP status: 400 for a mistake of the client's, 409 while another call runs, 501 for what this
    server cannot do.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
