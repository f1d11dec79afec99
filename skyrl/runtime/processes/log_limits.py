"""Limits the log lines that clients can cause, so that no client can flood the log.

A cause is any hashable value; lines with the same cause count together.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from skyrl.runtime.processes.log_format import about_request

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
        self._causes: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()
        """By cause: the time of its last line, and how many lines were left out since."""
        self._window = (clock(), 0)
        """When the current INTERVAL_S began, and how many lines were written in it."""
        self._left_out = 0

    def say(self, level: int, cause: Hashable, line: str, request_id: str | None = None) -> None:
        """Log `line`, unless its cause had a line within INTERVAL_S or all causes together had MAX_LINES. `request_id`
        is written after the line, and is no part of the cause."""
        now = self._clock()
        last_line_at, missed = self._causes.pop(cause, (None, 0))
        if last_line_at is not None and now - last_line_at < INTERVAL_S:
            self._causes[cause] = (last_line_at, missed + 1)
            return
        self._causes[cause] = (now, 0)
        while len(self._causes) > MAX_CAUSES:
            self._causes.popitem(last=False)
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
