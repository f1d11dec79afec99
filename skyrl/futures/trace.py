"""A session's requests as a timeline, in the Trace Event Format that Perfetto and chrome://tracing open.

Each model and each sampling session has a track of its own. A request is one slice on it: from the time when the
request was recorded to the time when its outcome was. Slices overlap, so they are asynchronous events. Does not know
HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from skyrl.db.database import Database
from skyrl.db.session_requests import RecordedRequest, requests_of_session
from skyrl.wire.results import encode_json

_OTHER = "other requests"
MAX_REQUESTS = 50_000
"""The most requests in one trace. A trace is made in memory, and viewers cannot show more in a useful way."""


def trace_of(requests: Iterable[RecordedRequest]) -> dict[str, Any]:
    """The trace of these requests. Its times are in microseconds since the epoch."""
    tracks: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for request in requests:
        track = request.model_id or request.sampling_session_id or _OTHER
        if track not in tracks:
            tracks[track] = len(tracks) + 1
            events += _named(tracks[track], track)
        begin = {
            "name": request.kind.lower(),
            "cat": "sample" if request.sampling_session_id is not None else "command",
            "id": request.id,
            "pid": tracks[track],
            "tid": 0,
        }
        about = {
            "request_id": request.id,
            "seq_id": request.seq_id if request.seq_id is not None else request.sample_seq_id,
            "status": request.status,
            "error": request.error,
        }
        known = {key: value for key, value in about.items() if value is not None}
        events.append(begin | {"ph": "b", "ts": round(request.created_at * 1e6), "args": known})
        if request.completed_at is not None:
            events.append(begin | {"ph": "e", "ts": round(request.completed_at * 1e6)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(track: int, name: str) -> list[dict[str, Any]]:
    """Events that name a track, and keep the tracks in the order of their first requests."""
    about = {"ph": "M", "pid": track, "tid": 0}
    return [
        about | {"name": "process_name", "args": {"name": name}},
        about | {"name": "process_sort_index", "args": {"sort_index": track}},
    ]


class Traces:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def of_session(self, session_id: str) -> bytes:
        """The trace of the newest MAX_REQUESTS requests of a session that are still stored, as JSON."""
        return await self._database.read_async(
            lambda c: encode_json(trace_of(requests_of_session(c, session_id, MAX_REQUESTS)))
        )
