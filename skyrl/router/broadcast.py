"""Requests that concern every worker: aborts, flushed caches, loaded and unloaded adapters.

They go to all workers at once, and the client gets one answer. This module does not know which worker has what: an
abort goes to each."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from skyrl.base.types.weights import STORE_SCHEME
from skyrl.http.admin_key import FORWARDING
from skyrl.http.answers import Answer, header_of
from skyrl.http.connection import HeaderList
from skyrl.http.forward import OWN_HEADERS
from skyrl.http.messages import Reply, json_reply
from skyrl.router.messages import RETRY_AFTER, error_reply, not_allowed
from skyrl.router.pool import WorkerPool
from skyrl.router.worker import Fetch, Refused, Unreachable, Worker, WorkerState

ABORT_S = 4.0
"""Agents wait 5 s for the answer to an abort."""
ABORT_QUARANTINED_S = 1.0
LOOK_S = 5.0
ADAPTER_S = 300.0
FLUSH_S = 120.0
_ABORT, _FLUSH = "/abort_request", "/flush_cache"
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BROADCAST: dict[str, tuple[str, ...]] = {
    _ABORT: ("POST",),
    _FLUSH: ("GET", "POST"),
    _LOAD: ("POST",),
    _UNLOAD: ("POST",),
}
"""The paths of `Broadcasts.answer`, and their methods."""
ADAPTERS = frozenset((_LOAD, _UNLOAD))
"""For holders of the admin key."""
_NOT_SENT = OWN_HEADERS | FORWARDING | {b"accept-encoding"}
"""Headers of the client's connection, and headers that the router's own request has: the router has decided who may
ask."""

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """What one worker made of a request for all. Without `answer`, `error` says why. `dead`: an operator says so, or it
    does not even accept connections."""

    worker: Worker
    answer: Answer | None
    error: str | None = None
    dead: bool = False

    @property
    def status(self) -> int | None:
        return None if self.answer is None else self.answer.status

    @cached_property
    def body(self) -> Any:
        """The JSON; the text if it is none; None for no body."""
        if self.answer is None or not self.answer.body.strip():
            return None
        try:
            return json.loads(self.answer.body)
        except (ValueError, RecursionError):
            return self.answer.body[:10_000].decode("utf-8", "replace")


class SharedRequest:
    """One request of a client, for several workers."""

    def __init__(
        self, fetch: Fetch, method: str, path: str, query: bytes, headers: HeaderList, body: bytes, timeout_s: float
    ) -> None:
        self._fetch, self._method, self._timeout_s = fetch, method, timeout_s
        self.query = query.decode("latin-1")
        self._target = f"{path}?{self.query}" if query else path
        self.headers = [(name, value) for name, value in headers if name.lower() not in _NOT_SENT]
        self.body = body
        self.bodies: dict[Worker, bytes] = {}
        """For workers that get another body."""

    async def to(self, worker: Worker, base: str = "", timeout_s: float | None = None) -> Outcome:
        """`base`: another address of the worker."""
        url, body = (base or worker.url) + self._target, self.bodies.get(worker, self.body)
        try:
            return Outcome(
                worker, await self._fetch(self._method, url, self.headers, body, timeout_s or self._timeout_s)
            )
        except Refused as refused:
            return Outcome(worker, None, str(refused), dead=worker.state is WorkerState.QUARANTINED)
        except Unreachable as unreachable:
            return Outcome(worker, None, str(unreachable))


@dataclass(eq=False)
class Broadcasts:
    pool: WorkerPool
    fetch: Fetch

    async def answer(self, method: str, path: str, query: bytes, headers: HeaderList, body: bytes) -> Reply:
        """`path` is one of `BROADCAST`."""
        if (refused := not_allowed(method, BROADCAST[path])) is not None:
            return refused
        alive = [worker for worker in self.pool.workers if not worker.is_dead]
        workers = alive if path == _ABORT else self.pool.candidates
        if not workers:
            return error_reply(503, "Service Unavailable", "no worker is routable", RETRY_AFTER)
        timeout_s = {_ABORT: ABORT_S, _FLUSH: FLUSH_S}.get(path, ADAPTER_S)
        request = SharedRequest(self.fetch, method, path, query, headers, body, timeout_s)
        outcomes = await asyncio.gather(*(self._one(path, request, worker) for worker in workers))
        bad = [outcome for outcome, done in outcomes if not done]
        answers = [outcome.answer for outcome, _ in outcomes if outcome.answer is not None]
        if path == _ABORT and len(bad) < len(outcomes):  # the router does not know which worker has the request
            return Reply(200, [], b"")
        if bad:
            return _first_bad(bad, len(outcomes))
        if path == _FLUSH:
            counts = {"workers_flushed": len(outcomes), "total_http_workers": len(outcomes)}
            return json_reply(200, {"status": "success", **counts})
        # If all workers were in the wanted state before, their own answer, as one server would give
        return _passed_on(next((answer for answer in answers if answer.status == 200), answers[0]))

    async def _one(self, path: str, request: SharedRequest, worker: Worker) -> tuple[Outcome, bool]:
        """What a worker made of the request, and whether it is now in the state that the client wants."""
        base = (path in ADAPTERS and worker.completions_url) or worker.url
        hurried = path == _ABORT and worker.state is WorkerState.QUARANTINED
        outcome = await request.to(worker, base, ABORT_QUARANTINED_S if hurried else None)
        answer = outcome.answer
        if answer is None:
            return outcome, False
        if path == _ABORT:
            return outcome, 200 <= answer.status < 300
        if path == _LOAD and answer.status == 400 and b"already been loaded" in answer.body:
            return outcome, await self._has_the_same(base, request)
        return outcome, answer.status == 200 or (path == _UNLOAD and answer.status == 404)

    async def _has_the_same(self, base: str, request: SharedRequest) -> bool:
        """Whether the adapter that the worker has under this name is from the same path. Another path may hold other
        weights: then two workers would sample from different weights under one name."""
        headers = [(name, value) for name, value in request.headers if name.lower() != b"content-type"]
        try:
            wanted = json.loads(request.body)
            if wanted["lora_path"].startswith(STORE_SCHEME):  # the worker shows its node's directory instead
                return True
            models = json.loads((await self.fetch("GET", f"{base}/v1/models", headers, b"", LOOK_S)).body)
            paths = [model["root"] for model in models["data"] if model["id"] == wanted["lora_name"]]
            return paths == [wanted["lora_path"]]
        except (Unreachable, ValueError, KeyError, TypeError, AttributeError) as unknown:
            log.warning("%s/v1/models does not show the path of an adapter: %r", base, unknown)
            return False


def _first_bad(bad: Sequence[Outcome], asked: int) -> Reply:
    """The first answer of a worker that failed. If none of those answered: 503 when no worker at all answered (the
    client may try again), else 502."""
    if (answer := next((outcome.answer for outcome in bad if outcome.answer is not None), None)) is not None:
        return _passed_on(answer)
    workers: list[dict[str, Any]] = [{"url": outcome.worker.url, "error": outcome.error} for outcome in bad]
    message = f"{len(bad)} of {asked} workers did not answer"
    status, headers = (503, RETRY_AFTER) if len(bad) == asked else (502, [])
    return json_reply(status, {"error": {"code": status, "message": message, "workers": workers}}, headers)


def _passed_on(answer: Answer) -> Reply:
    content_type = header_of(answer.headers, b"content-type") or ""
    return Reply(answer.status, [(b"content-type", content_type.encode("latin-1"))], answer.body)
