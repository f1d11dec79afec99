"""The format of log lines: time, level, logger, message, and the id of the request that the line is about."""

from __future__ import annotations

import logging

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_REQUEST_ID = "request_id"


def about_request(request_id: str | None) -> dict[str, str | None]:
    """The `extra` of a log call for a line about this request."""
    return {_REQUEST_ID: request_id}


class LineFormat(logging.Formatter):
    """Ends a line about a request with the request's id. A traceback follows after that."""

    def __init__(self) -> None:
        super().__init__(LINE)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request_id = getattr(record, _REQUEST_ID, None)
        return line if request_id is None else f"{line} [request {request_id}]"
