"""Decides which sessions have fallen silent, from the few rows whose last heartbeat is old.

Clients may send heartbeats to any API process, and the clocks of these processes differ. So an old heartbeat alone says
little: a session is silent when its row has also stayed the same while this process watched it, by this process's own
clock. Times in which this process did not look do not count. Knows no SQL.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

LONG_LOOK_S = 20.0
"""If the time between two looks is longer, looks have failed or the process was stopped. Heartbeats may be missing from
that time, so no session is silent for a whole timeout after it."""

WATCHED = 0.5
"""The part of the timeout for which a row is watched. Before that, its heartbeat must be older than the rest of the
timeout by this process's clock. So a wrong clock ends no session before it was watched for this part."""


class SilenceWatch:
    """The watched sessions of one API process."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[float, float]] = {}
        """By session: its last heartbeat, and the monotonic time since which it has been the same."""
        self._looked_at = self._trusted_since = time.monotonic()

    @staticmethod
    def oldest_fresh(timeout_s: float) -> float:
        """Rows whose last heartbeat is not later (seconds since the epoch) are to be watched."""
        return time.time() - timeout_s * (1 - WATCHED)

    def look(self, old: Mapping[str, float], timeout_s: float) -> tuple[list[str], list[str]]:
        """`old` has the last heartbeats of all active sessions that are to be watched. Returns the ids of those that
        are silent, and of those that were watched until now and are not in `old` any more: they have sent a heartbeat,
        or have ended."""
        now = time.monotonic()
        if now - self._looked_at > LONG_LOOK_S:
            self._trusted_since = now
        self._looked_at = now
        before, self._watched = self._watched, {}
        silent: list[str] = []
        for session_id, heartbeat_at in old.items():
            last, since = before.pop(session_id, (None, now))
            since = since if last == heartbeat_at else now
            self._watched[session_id] = (heartbeat_at, since)
            if now - since >= timeout_s * WATCHED and now - self._trusted_since >= timeout_s:
                silent.append(session_id)
        return silent, list(before)
