"""Requests that concern every worker: aborts, flushed caches, loaded and unloaded adapters.

They go to all workers at once, and the client gets one answer. This module does not know which worker has what: an
abort goes to each.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from skyrl.base.types.weights import STORE_SCHEME
from skyrl.http.admin_key import FORWARDING
from skyrl.router.messages import HeaderList, Reply, error_reply, json_reply
from skyrl.router.pool import WorkerPool
from skyrl.router.worker import Answer, Fetch, Unreachable, Worker, WorkerState

ABORT_S = 4.0
"""Agents wait 5 s for the answer to an abort."""
ABORT_QUARANTINED_S = 1.0
LOOK_S = 5.0
ADAPTER_S = 300.0
FLUSH_S = 120.0
RETRY_AFTER = [(b"retry-after", b"1")]
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_METHODS: dict[str, tuple[str, ...]] = {
    "/abort_request": ("POST",),
    "/flush_cache": ("GET", "POST"),
    _LOAD: ("POST",),
    _UNLOAD: ("POST",),
}
ADAPTERS = frozenset((_LOAD, _UNLOAD))
"""For holders of the admin key."""
BROADCAST = frozenset(_METHODS)
"""The paths of `Broadcasts.answer`."""
_NOT_SENT = frozenset(
    {
        *(b"host", b"content-length", b"accept-encoding", b"expect"),
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *FORWARDING,
    }
)
"""Headers of the client's connection, and headers that the router's own request has: the router has decided who may
ask."""

Body = Callable[[], Awaitable[bytes]]

log = logging.getLogger(__name__)


class _Outcome(NamedTuple):
    """What one worker made of the request. `done`: the worker is now in the state that the client wants."""

    worker: Worker
    answer: Answer | Unreachable
    done: bool


class Broadcasts:
    def __init__(self, pool: WorkerPool, fetch: Fetch) -> None:
        self._pool = pool
        self._fetch = fetch

    async def answer(self, method: str, path: str, query: bytes, headers: HeaderList, body: Body) -> Reply | None:
        """None: this is no broadcast."""
        methods = _METHODS.get(path)
        if methods is None:
            return None
        if method not in methods:
            allowed = ", ".join(methods)
            return error_reply(405, "MethodNotAllowed", f"this route takes {allowed}", [(b"allow", allowed.encode())])
        workers = self._pool.workers if path == "/abort_request" else self._pool.candidates
        if not workers:
            return error_reply(503, "Service Unavailable", "no worker is routable", RETRY_AFTER)
        call = _Call(self._fetch, method, path, query, headers, await body())
        if path == "/abort_request":
            return _aborted(await _to_all(workers, call.abort))
        if path == "/flush_cache":
            return _flushed(await _to_all(workers, call.flush))
        return _adapters_changed(await _to_all(workers, call.load if path == _LOAD else call.unload))


class _Call:
    """One request of a client, to be sent to several workers."""

    def __init__(self, fetch: Fetch, method: str, path: str, query: bytes, headers: HeaderList, body: bytes) -> None:
        self._fetch = fetch
        self._method = method
        self._target = f"{path}?{query.decode('latin-1')}" if query else path
        self._headers = without_connection(headers)
        self._body = body

    async def abort(self, worker: Worker) -> _Outcome:
        quarantined = worker.state is WorkerState.QUARANTINED
        answer = await self._send(worker.url, ABORT_QUARANTINED_S if quarantined else ABORT_S)
        return _Outcome(worker, answer, isinstance(answer, Answer) and 200 <= answer.status < 300)

    async def flush(self, worker: Worker) -> _Outcome:
        answer = await self._send(worker.url, FLUSH_S)
        return _Outcome(worker, answer, isinstance(answer, Answer) and answer.status == 200)

    async def load(self, worker: Worker) -> _Outcome:
        base = worker.completions_url or worker.url
        answer = await self._send(base, ADAPTER_S)
        done = isinstance(answer, Answer) and (
            answer.status == 200
            or (answer.status == 400 and b"already been loaded" in answer.body and await self._has_the_same(base))
        )
        return _Outcome(worker, answer, done)

    async def unload(self, worker: Worker) -> _Outcome:
        answer = await self._send(worker.completions_url or worker.url, ADAPTER_S)
        return _Outcome(worker, answer, isinstance(answer, Answer) and answer.status in (200, 404))

    async def _send(self, base: str, timeout_s: float) -> Answer | Unreachable:
        try:
            return await self._fetch(self._method, base + self._target, self._headers, self._body, timeout_s)
        except Unreachable as unreachable:
            return unreachable

    async def _has_the_same(self, base: str) -> bool:
        """Whether the adapter that the worker has under this name is from the same path. Another path may hold other
        weights: then two workers would sample from different weights under one name."""
        headers = [(name, value) for name, value in self._headers if name.lower() != b"content-type"]
        try:
            wanted = json.loads(self._body)
            if wanted["lora_path"].startswith(STORE_SCHEME):  # the worker shows its node's directory instead
                return True
            models = json.loads((await self._fetch("GET", f"{base}/v1/models", headers, b"", LOOK_S)).body)
            paths = [model["root"] for model in models["data"] if model["id"] == wanted["lora_name"]]
            return paths == [wanted["lora_path"]]
        except (Unreachable, ValueError, KeyError, TypeError, AttributeError) as unknown:
            log.warning("%s/v1/models does not show the path of an adapter: %r", base, unknown)
            return False


def without_connection(headers: HeaderList) -> HeaderList:
    """Without what belongs to the client's own connection."""
    return [(name, value) for name, value in headers if name.lower() not in _NOT_SENT]


async def _to_all(workers: Iterable[Worker], send: Callable[[Worker], Awaitable[_Outcome]]) -> list[_Outcome]:
    return await asyncio.gather(*(send(worker) for worker in workers))


def _aborted(outcomes: list[_Outcome]) -> Reply:
    """200 once one worker has aborted: the router does not know which worker has the request."""
    if any(outcome.done for outcome in outcomes):
        return Reply(200, [], b"")
    return _first_bad(outcomes)


def _flushed(outcomes: list[_Outcome]) -> Reply:
    if all(outcome.done for outcome in outcomes):
        count = len(outcomes)
        return json_reply(200, {"status": "success", "workers_flushed": count, "total_http_workers": count})
    return _first_bad(outcomes)


def _adapters_changed(outcomes: list[_Outcome]) -> Reply:
    """The first 200. If all workers were in the wanted state before, their own answer, as one server would give."""
    if not all(outcome.done for outcome in outcomes):
        return _first_bad(outcomes)
    answers = _answers(outcomes)
    return _passed_on(next((answer for answer in answers if answer.status == 200), answers[0]))


def _answers(outcomes: list[_Outcome]) -> list[Answer]:
    return [outcome.answer for outcome in outcomes if isinstance(outcome.answer, Answer)]


def _first_bad(outcomes: list[_Outcome]) -> Reply:
    """The first answer of a worker that failed. If none of those answered: 503 when no worker at all answered (the
    client may try again), else 502."""
    bad = [outcome for outcome in outcomes if not outcome.done]
    if answers := _answers(bad):
        return _passed_on(answers[0])
    workers: list[dict[str, Any]] = [{"url": outcome.worker.url, "error": str(outcome.answer)} for outcome in bad]
    message = f"{len(bad)} of {len(outcomes)} workers did not answer"
    status, headers = (503, RETRY_AFTER) if len(bad) == len(outcomes) else (502, [])
    return json_reply(status, {"error": {"code": status, "message": message, "workers": workers}}, headers)


def _passed_on(answer: Answer) -> Reply:
    return Reply(answer.status, [(b"content-type", answer.content_type.encode("latin-1"))], answer.body)
