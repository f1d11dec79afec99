"""Log lines: their formats (text for people, and JSON for programs, one object a line), and limits on the lines that
clients can cause, so that no client can flood the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from cachetools import LRUCache

from skyrl.runtime.tracing import current_trace

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
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


INTERVAL_S = 10.0
"""Seconds in which a cause gets at most one line. The cause's next line tells how many lines were left out."""
MAX_LINES = 100
"""The most lines of all causes together in INTERVAL_S."""
MAX_CAUSES = 2_000
"""The most causes that are remembered. Beyond that the cause with the oldest line is forgotten."""
MAX_TEXT = 300
"""The most characters that are logged of a text that may come from a client."""


def plain(text: str) -> str:
    """The text as one printable line of bounded length."""
    cut = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in cut)


class LimitedLog:
    """Writes limited lines to `logger`. `clock` returns seconds."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._causes: LRUCache[Hashable, tuple[float, int]] = LRUCache(MAX_CAUSES)
        """By cause: the time of its last line, and how many lines were left out since."""
        self._window = (clock(), 0)
        """When the current INTERVAL_S began, and how many lines were written in it."""
        self._left_out = 0

    def say(self, level: int, cause: Hashable, line: str, request_id: str | None = None) -> None:
        """Log `line`, unless its cause had a line within INTERVAL_S or all causes together had MAX_LINES. `request_id`
        is written after the line, and is no part of the cause."""
        now = self._clock()
        last_line_at, missed = self._causes.get(cause, (None, 0))
        if last_line_at is not None and now - last_line_at < INTERVAL_S:
            self._causes[cause] = (last_line_at, missed + 1)
            return
        self._causes[cause] = (now, 0)
        if now - self._window[0] >= INTERVAL_S:
            self._window = (now, 0)
            if self._left_out:
                self._logger.warning("%d lines about other requests were left out", self._left_out)
                self._left_out = 0
        window_began, lines = self._window
        if lines >= MAX_LINES:
            self._left_out += 1 + missed
            return
        self._window = (window_began, lines + 1)
        more = f" (and {missed} more like it since the last line)" if missed else ""
        self._logger.log(level, "%s%s", line, more, extra=about_request(request_id))
