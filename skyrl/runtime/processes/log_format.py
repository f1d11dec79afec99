"""The formats of log lines: text for people, and JSON for programs, one object a line.

A line may be about a request, a tenant or a model: `about_request` puts that beside the message. The trace of a traced
request is added by itself. The launcher gives vLLM the JSON format, too, see `vllm_logging`.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from skyrl.runtime.tracing.current import current_trace

LogFormat = Literal["text", "json"]
LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FIELDS = ("request_id", "session_id", "model_id", "tenant", "duration_ms", "route", "status", "recorded")
"""What a line may be about: attributes of the record, and keys of a line of JSON."""

_encode = msgspec.json.Encoder().encode


def about_request(request_id: str | None, **fields: str | float | None) -> dict[str, Any]:
    """The `extra` of a log call for a line about this request. `fields` are some of FIELDS."""
    return {"request_id": request_id, **fields}


class LineFormat(logging.Formatter):
    """Ends a line about a request with the request's id. A traceback follows after that."""

    def __init__(self) -> None:
        super().__init__(LINE)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request_id = getattr(record, "request_id", None)
        return line if request_id is None else f"{line} [request {request_id}]"


class JsonFormat(logging.Formatter):
    """One object a line: `ts` (RFC 3339, UTC), `level`, `logger`, `process`, `msg`, those of FIELDS that are set,
    `trace_id` and `span_id` of a traced request, and `error` (a stack trace)."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "msg": record.getMessage(),
        }
        line |= {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        if (trace := current_trace.get()) is not None:
            line["trace_id"] = f"{trace.context.trace_id:032x}"
            line["span_id"] = f"{trace.context.span_id:016x}"
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _text(line)


def _text(line: dict[str, Any]) -> str:
    try:
        return _encode(line).decode()
    except (msgspec.MsgspecError, UnicodeEncodeError):  # a lone surrogate: some text was decoded with it
        safe = {name: str(value).encode(errors="backslashreplace").decode() for name, value in line.items()}
        return _encode(safe).decode()


def formatter(log_format: LogFormat, process: str) -> logging.Formatter:
    """The formatter of a process. `process` is its name in lines of JSON."""
    return JsonFormat(process) if log_format == "json" else LineFormat()


def vllm_logging(process: str) -> dict[str, Any]:
    """The configuration (`logging.config.dictConfig`) by which vLLM writes lines of JSON."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": f"{JsonFormat.__module__}.{JsonFormat.__qualname__}", "process": process}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "loggers": {"vllm": {"handlers": ["stderr"], "level": "INFO", "propagate": False}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
    }
