"""How a process writes log lines: when, level, logger, message, and the request that the line is about."""

from __future__ import annotations

import logging

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_REQUEST_ID = "request_id"


def about_request(request_id: str | None) -> dict[str, str | None]:
    """`extra` for a log call: the line is about the request of that id."""
    return {_REQUEST_ID: request_id}


class LineFormat(logging.Formatter):
    """Puts the id of its request, if it has one, at the end of a line, before a traceback."""

    def __init__(self) -> None:
        super().__init__(LINE)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request_id = getattr(record, _REQUEST_ID, None)
        return line if request_id is None else f"{line} [request {request_id}]"
