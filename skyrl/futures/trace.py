"""A session's requests as a timeline, in the Trace Event Format that Perfetto and chrome://tracing open.

One process track per model and per sampling session; on it one slice per request, from when it was recorded to when its
outcome was. Slices overlap, so they are asynchronous events. Knows the futures table; does not know HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from skyrl.db import futures as rows
from skyrl.db.database import Database
from skyrl.wire.results import encode_json

_OTHER = "other requests"
MAX_REQUESTS = 50_000
"""What one trace holds: all of it is in memory, and viewers show no more in any useful way."""


def trace_of(requests: Iterable[Any]) -> dict[str, Any]:
    """The trace of rows as `skyrl.db.futures.of_session` yields them. Times are microseconds since the epoch."""
    tracks: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for row in requests:
        track = row.model_id or row.sampling_session_id or _OTHER
        if track not in tracks:
            tracks[track] = len(tracks) + 1
            events += _named(tracks[track], track)
        begin = {
            "name": row.kind.lower(),
            "cat": "sample" if row.sampling_session_id is not None else "command",
            "id": row.id,
            "pid": tracks[track],
            "tid": 0,
        }
        about = {
            "request_id": row.id,
            "seq_id": row.seq_id if row.seq_id is not None else row.sample_seq_id,
            "status": row.status,
            "error": row.error,
        }
        known = {key: value for key, value in about.items() if value is not None}
        events.append(begin | {"ph": "b", "ts": round(row.created_at * 1e6), "args": known})
        if row.completed_at is not None:
            events.append(begin | {"ph": "e", "ts": round(row.completed_at * 1e6)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(track: int, name: str) -> list[dict[str, Any]]:
    """Names a track, and keeps tracks in the order in which they came."""
    about = {"ph": "M", "pid": track, "tid": 0}
    return [
        about | {"name": "process_name", "args": {"name": name}},
        about | {"name": "process_sort_index", "args": {"sort_index": track}},
    ]


class Traces:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def of_session(self, session_id: str) -> bytes:
        """The trace of the newest of a session's requests that are still recorded, as JSON."""
        newest = MAX_REQUESTS
        return await self._database.read_async(lambda c: encode_json(trace_of(rows.of_session(c, session_id, newest))))
