"""A session's requests as a timeline, in the Trace Event Format that Perfetto and chrome://tracing open.

Each model and each sampling session has a track. A request is one slice on its track, from the time when the request
was recorded to the time when its outcome was stored. Slices of one track overlap, so they are asynchronous events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from skyrl.base.wire.results import encode_json
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import RecordedRequest, requests_of_session

_OTHER = "other requests"
MAX_REQUESTS = 50_000
"""The most requests in one trace. The trace is made in memory, and viewers cannot usefully show more requests."""


def trace_of(requests: Iterable[RecordedRequest]) -> dict[str, Any]:
    """The trace of these requests, with times in microseconds since the epoch."""
    tracks: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for request in requests:
        track = request.model_id or request.sampling_session_id or _OTHER
        if track not in tracks:
            tracks[track] = len(tracks) + 1
            events += _track_names(tracks[track], track)
        slice_event = {
            "name": request.kind.lower(),
            "cat": "sample" if request.sampling_session_id is not None else "command",
            "id": request.id,
            "pid": tracks[track],
            "tid": 0,
        }
        details = {
            "request_id": request.id,
            "seq_id": request.seq_id if request.seq_id is not None else request.sample_seq_id,
            "status": request.status,
            "error": request.error,
        }
        known_details = {key: value for key, value in details.items() if value is not None}
        events.append(slice_event | {"ph": "b", "ts": round(request.created_at * 1e6), "args": known_details})
        if request.completed_at is not None:
            events.append(slice_event | {"ph": "e", "ts": round(request.completed_at * 1e6)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _track_names(track: int, name: str) -> list[dict[str, Any]]:
    """The events that name a track, and that keep the tracks in the order of their first requests."""
    metadata = {"ph": "M", "pid": track, "tid": 0}
    return [
        metadata | {"name": "process_name", "args": {"name": name}},
        metadata | {"name": "process_sort_index", "args": {"sort_index": track}},
    ]


class Traces:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def of_session(self, session_id: str) -> bytes:
        """The trace of a session's newest MAX_REQUESTS stored requests, as JSON."""
        return await self._database.read_async(
            lambda c: encode_json(trace_of(requests_of_session(c, session_id, MAX_REQUESTS)))
        )
