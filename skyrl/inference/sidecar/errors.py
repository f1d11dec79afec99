"""Errors that a client of the sidecar gets, with their HTTP status. Knows nothing of routes."""

from __future__ import annotations

from typing import Any


class SidecarError(Exception):
    """`message` is for the client. The answer's body is `{"error": {"message", "code"}}`; `code` may be missing.
    `rank_results` is what each of vLLM's ranks has answered, where they were asked."""

    status = 500
    code: str | None = None
    retry_after_s: int | None = None
    rank_results: list[dict[str, Any]] | None = None

    @property
    def message(self) -> str:
        return str(self)


class BadRequest(SidecarError):
    """The client's mistake. The message names the field."""

    status = 400


class Refused(BadRequest):
    """vLLM refused a request. `param` is vLLM's name of the wrong field, if vLLM names one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unauthorized(SidecarError):
    status = 401
    code = "unauthorized"


class Forbidden(SidecarError):
    status = 403
    code = "forbidden"


class TooLarge(SidecarError):
    status = 413


class Busy(SidecarError):
    """More samples than the sidecar takes at a time."""

    status = 503
    retry_after_s = 1


class VllmAway(SidecarError):
    """vLLM cannot be reached, or says that it cannot serve now. The same request may succeed later."""

    status = 503
    retry_after_s = 1


class VllmGone(VllmAway):
    """Nothing listens at vLLM's address. So vLLM has no samples, and the next one will not be paused."""


class VllmBroke(SidecarError):
    """vLLM's answer ended early, or is not an answer from which numbers may be taken."""

    status = 502


class VllmInterrupted(VllmBroke):
    """vLLM died, or failed, under the request. The same request may succeed later. The router has the same code."""

    code = "worker_interrupted"


class NotOffered(SidecarError):
    """vLLM was started without the option or the variable that this needs."""

    status = 501
