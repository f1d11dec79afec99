"""Log lines that clients cause: a few for each cause, however often the cause comes.

Knows causes and lines. Does not know their meaning.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from skyrl.processes.log_format import about_request

INTERVAL_S = 10.0
"""Seconds for which a cause gets one line. Lines that were left out are counted in the cause's next line."""
MAX_LINES = 100
"""Lines of all causes in INTERVAL_S."""
MAX_CAUSES = 2_000
"""Causes that are remembered. Beyond that the cause with the oldest line is forgotten."""
MAX_TEXT = 300
"""Characters that are logged of a text that a client may have written parts of."""


def plain(text: str) -> str:
    """One printable line of bounded length, whatever a client has sent."""
    cut = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in cut)


class LimitedLog:
    """Writes to `logger`. `clock` tells seconds."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._causes: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()
        """By cause: when it had its last line, and how often it came without a line since then."""
        self._window = (clock(), 0)
        """When the current INTERVAL_S began, and how many lines it has had."""
        self._left_out = 0

    def say(self, level: int, cause: Hashable, line: str, request_id: str | None = None) -> None:
        """Log `line`, unless its cause had a line a moment ago or there were too many lines of all causes. The request
        id does not tell causes apart."""
        now = self._clock()
        last, missed = self._causes.pop(cause, (None, 0))
        if last is not None and now - last < INTERVAL_S:
            self._causes[cause] = (last, missed + 1)
            return
        self._causes[cause] = (now, 0)
        while len(self._causes) > MAX_CAUSES:
            self._causes.popitem(last=False)
        if now - self._window[0] >= INTERVAL_S:
            self._window = (now, 0)
            if self._left_out:
                self._logger.warning("%d lines about other requests were left out", self._left_out)
                self._left_out = 0
        began, lines = self._window
        if lines >= MAX_LINES:
            self._left_out += 1 + missed
            return
        self._window = (began, lines + 1)
        more = f" (and {missed} more like it since the last line)" if missed else ""
        self._logger.log(level, "%s%s", line, more, extra=about_request(request_id))
