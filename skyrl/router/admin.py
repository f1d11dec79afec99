"""Changes of weights and pauses on all workers at once, with one answer for all.

Each request goes to every worker that is not dead, also to those out of routing. While weights change the workers are
out of routing, and one change runs at a time. Reads of the routes' bodies only what several workers make necessary. If
some workers fail, the answer begins with their own reason, where they agree."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from skyrl.router.broadcast import RETRY_AFTER, without_connection
from skyrl.router.messages import HeaderList, Reply, error_reply, json_reply
from skyrl.router.pool import WorkerPool
from skyrl.router.worker import Answer, Fetch, Refused, Unreachable, Worker, WorkerState

SHOWN_CHARACTERS = 2_000
"""The most characters of a reason. `results` of the answer has the whole."""
_NUMBER = re.compile(r"\d+")


class Failure(NamedTuple):
    """What one worker answered. `body`: its JSON, its text, or None. `error`: why there is no answer."""

    worker: str
    status: int | None
    body: Any
    error: str | None

    def reason(self) -> str:
        """In the worker's words: SGLang's `message`, vLLM's `error.message`, FastAPI's `detail`, or a text."""
        if self.status is None:
            return self.error or "no answer"
        body = self.body if isinstance(self.body, dict) else {"message": self.body}
        error = body.get("error")
        more = error.get("message") if isinstance(error, dict) else error
        texts = (one for one in (body.get("message"), more, body.get("detail")) if isinstance(one, str) and one)
        return next(texts, f"status {self.status} without a reason")[:SHOWN_CHARACTERS]


def first_sentence(failed: Sequence[Failure], workers: int) -> str:
    """`failed` has at least one of the `workers` that were asked. Reasons agree if they differ in numbers alone: each
    worker has another count of requests in flight."""
    reasons = [one.reason() for one in failed]
    if len({_NUMBER.sub("0", reason) for reason in reasons}) > 1:
        return f"workers failed for different reasons, the first, {failed[0].worker}: {reasons[0]}"
    return reasons[0] if len(failed) == workers else f"{reasons[0]} (so say {len(failed)} of {workers} workers)"


log = logging.getLogger(__name__)

LOOK_S = 10.0
"""How long a worker may take to say which version it has."""
RANKS_S = 30.0
"""How long it may take to say how many ranks it has: for its first answer vLLM looks at its whole machine."""
_BOTH = ("GET", "POST")
_PAUSE, _CONTINUE = "/pause_generation", "/continue_generation"
_DISK, _GROUP = "/update_weights_from_disk", "/update_weights_from_distributed"
_INIT, _DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"
_TENSOR = "/update_weights_from_tensor"
_ONLY_STAGED = ("stage_only", "base")
"""Fields of an update from disk that a server ignores if it loads at once, as SGLang's do."""
_LOCKED = frozenset((_PAUSE, _DISK, _GROUP, _INIT, _DESTROY))
_UPDATES = frozenset((_DISK, _GROUP))
ADMIN_METHODS: dict[str, tuple[str, ...]] = {
    _PAUSE: ("POST",),
    _CONTINUE: ("POST",),
    _DISK: ("POST",),
    _GROUP: ("POST",),
    _TENSOR: ("POST",),
    _INIT: ("POST",),
    _DESTROY: ("POST",),
    "/update_weight_version": ("POST",),
    "/get_weights_by_name": _BOTH,
    "/weights_checker": _BOTH,
    "/release_memory_occupation": _BOTH,
    "/resume_memory_occupation": _BOTH,
    "/load_lora_adapter": ("POST",),
    "/unload_lora_adapter": ("POST",),
}
"""Routes for holders of the admin key."""
VERSION_PATHS = frozenset(("/model_info", "/get_model_info", "/weight_version", "/get_weight_version"))
"""Routes for everybody that are answered for all workers together."""
_METHODS = ADMIN_METHODS | dict.fromkeys(VERSION_PATHS, _BOTH)
Body = Callable[[], Awaitable[bytes]]


class _Outcome(NamedTuple):
    """`body` is the worker's JSON, or the text of its answer. `dead`: an operator says so, or it does not even accept
    connections."""

    worker: Worker
    done: bool
    status: int | None
    body: Any
    error: str | None = None
    dead: bool = False

    def listed(self) -> dict[str, Any]:
        if self.status is None:
            unreached = {"worker": self.worker.url, "success": False, "error": self.error}
            return unreached | ({"dead": True} if self.dead else {})
        return {"worker": self.worker.url, "success": self.done, "status_code": self.status, "body": self.body}

    def failure(self) -> Failure:
        return Failure(self.worker.url, self.status, self.body, self.error)


class _Silent(Exception):
    """A worker that is alive did not say how many ranks it has. `looks` are what each worker answered."""

    def __init__(self, looks: list[_Outcome]) -> None:
        super().__init__("a worker does not answer")
        self.looks = looks


class AdminRoutes:
    """`lock_s`: how long a change waits for another one. `update_s`: how long a worker may take for one."""

    def __init__(self, pool: WorkerPool, fetch: Fetch, *, lock_s: float, update_s: float) -> None:
        self._pool = pool
        self._fetch = fetch
        self._lock_s = lock_s
        self._update_s = update_s
        self._lock = asyncio.Lock()

    async def answer(self, method: str, path: str, query: bytes, headers: HeaderList, body: Body) -> Reply:
        """`path` is one of `ADMIN_METHODS` or `VERSION_PATHS`."""
        methods = _METHODS[path]
        if method not in methods:
            allowed = ", ".join(methods)
            return error_reply(405, "MethodNotAllowed", f"this route takes {allowed}", [(b"allow", allowed.encode())])
        if path == _TENSOR:
            hint = f"tensors cannot be handed over between processes: use {_GROUP} or {_DISK}"
            return json_reply(501, {"error": {"message": hint, "code": "not_implemented"}})
        content = await body()
        target = f"{path}?{query.decode('latin-1')}" if query else path
        timeout_s = LOOK_S if path in VERSION_PATHS else self._update_s
        request = _Request(self._fetch, method, target, without_connection(headers), content, timeout_s)
        if path in VERSION_PATHS:
            return await self._versions(path, request)
        if path not in _LOCKED:
            return _aggregated(path, await self._to_all(request))
        try:
            async with asyncio.timeout(self._lock_s):
                await self._lock.acquire()
        except TimeoutError:
            message = (
                f"admin update lock not acquired within {self._lock_s:g}s; another update operation may be in progress"
            )
            return json_reply(503, {"success": False, "message": message, "error": {"message": message, "code": 503}})
        try:
            return await self._change(path, request)
        finally:
            self._lock.release()

    def _targets(self) -> list[Worker]:
        """Dead workers, too: the answer lists them, although nothing is sent to one that is dead by hand."""
        return [one for one in self._pool.workers if one.state is not WorkerState.DRAINING]

    async def _to_all(self, request: _Request, workers: Sequence[Worker] | None = None) -> list[_Outcome]:
        targets = self._targets() if workers is None else workers
        return list(await asyncio.gather(*map(request.to, targets)))

    async def _change(self, path: str, request: _Request) -> Reply:
        workers = self._targets()
        absent: list[_Outcome] = []
        if path == _INIT and len(workers) > 1:
            try:
                request.bodies, absent = await self._own_ranks(workers, request)
            except ValueError as wrong:
                return json_reply(422, {"success": False, "message": str(wrong), "error": {"message": str(wrong)}})
            except _Silent as silent:
                return _aggregated(path, silent.looks)
            workers = [*request.bodies]
        if path == _DISK and (wrong := await self._not_staged(workers, request)) is not None:
            return json_reply(400, {"success": False, "message": wrong, "error": {"message": wrong}})
        with self._pool.weights_change([worker for worker in workers if not worker.is_dead]):
            outcomes = await self._to_all(request, workers)
            if path == _INIT:
                self._disable_who_failed(outcomes)
            elif path in _UPDATES:
                self._note_who_missed(outcomes, request)
        return _aggregated(path, [*outcomes, *absent])

    async def _not_staged(self, workers: Sequence[Worker], request: _Request) -> str | None:
        """Why an update that is to be staged must not go to these workers: one of them would load it at once, while it
        samples. None if it may."""
        fields = _decoded(request.body)
        given = {name for name in _ONLY_STAGED if isinstance(fields, dict) and fields.get(name)}
        given |= {name for name in _ONLY_STAGED if f"{name}=" in request.query}
        if not given:
            return None
        looks = await self._to_all(_Request(self._fetch, "GET", "/v1/loads", request.headers, b"", LOOK_S), workers)
        for look in looks:
            stages = isinstance(look.body, dict) and look.body.get("stages_updates") is True
            if not look.dead and not stages:
                url = look.worker.url
                return f"{min(given)}: {url} does not say that it stages updates, and may load the weights at once"
        return None

    def _disable_who_failed(self, outcomes: Sequence[_Outcome]) -> None:
        """A worker that did not join its group may hang in it: an operator decides when it serves again."""
        for outcome in outcomes:
            if not outcome.done and not outcome.dead:
                reason = f"its group of weight updates was not formed: {outcome.error or outcome.body}"
                log.warning("worker %s is disabled: %s", outcome.worker.url, reason)
                self._pool.set_service(outcome.worker, disabled=reason, is_dead=outcome.worker.is_dead)

    async def _own_ranks(
        self, workers: Sequence[Worker], request: _Request
    ) -> tuple[dict[Worker, bytes], list[_Outcome]]:
        """The body for each worker that is alive, whose ranks come after those of the workers before it; and the dead
        ones, which are no members of the group. Raises ValueError, and _Silent when one does not answer."""
        fields = _decoded(request.body)
        first, world = (
            fields.get(name) if isinstance(fields, dict) else None for name in ("rank_offset", "world_size")
        )
        if type(first) is not int or type(world) is not int:
            raise ValueError("rank_offset, world_size: must be integers")
        looks = await self._to_all(_Request(self._fetch, "GET", "/server_info", request.headers, b"", RANKS_S), workers)
        if any(not look.dead and (look.status is None or look.status >= 500) for look in looks):
            raise _Silent(looks)
        bodies: dict[Worker, bytes] = {}
        offset = first
        for look in looks:
            if not look.dead:
                bodies[look.worker] = json.dumps(fields | {"rank_offset": offset}).encode()
                offset += _ranks(look.body)
        if bodies and offset != world:
            raise ValueError(
                f"world_size: must be {offset}, not {world}: {first} before rank_offset, and {offset - first} ranks of "
                f"all workers that are alive ({len(bodies)})"
            )
        return bodies, [look for look in looks if look.dead]

    def _note_who_missed(self, outcomes: Sequence[_Outcome], request: _Request) -> None:
        """A dead worker that comes back has older weights than the others, and must not be sampled from. Nor must one
        that was registered while the update ran."""
        updated = [one for one in outcomes if one.done and _applied(one.body)]
        if not updated:
            return
        fields = _decoded(request.body)
        named = fields.get("weight_version") if isinstance(fields, dict) else None
        missed = f"the update of the weights to version {_version(updated[0]) if named is None else named}"
        for outcome in outcomes:
            if outcome in updated:
                self._pool.set_missed(outcome.worker, None)
            elif outcome.dead:
                self._pool.set_missed(outcome.worker, missed)
        asked = [outcome.worker for outcome in outcomes]
        for worker in self._targets():
            if worker not in asked:
                self._pool.set_missed(worker, missed)

    async def _versions(self, path: str, request: _Request) -> Reply:
        """One worker's fields, if all that are alive have the same version. 409 if not; 502 if one does not tell."""
        outcomes = [one for one in await self._to_all(request) if not one.dead]
        versions = {one.worker.url: _version(one) for one in outcomes if one.done}
        listed = [one.listed() for one in outcomes]
        if len(set(versions.values())) > 1:
            mixed = {"weight_version": versions}
            message = "mixed worker weight_version"
            detail = {"success": False, "message": message, "mixed_state": mixed, "results": listed}
            return json_reply(409, {"detail": detail, "error": {"message": message}})
        if len(versions) < len(outcomes) or not outcomes:
            return _aggregated(path, outcomes)
        first = outcomes[0].body
        more = {"workers": [*versions], "results": listed} if path.endswith("model_info") else {}
        return json_reply(200, (first if isinstance(first, dict) else {}) | more)


class _Request:
    """One request of a client, for several workers."""

    def __init__(
        self, fetch: Fetch, method: str, target: str, headers: HeaderList, body: bytes, timeout_s: float
    ) -> None:
        self._fetch = fetch
        self._method = method
        self._target = target
        self.query = target.partition("?")[2]
        self._timeout_s = timeout_s
        self.headers = headers
        self.body = body
        self.bodies: dict[Worker, bytes] = {}
        """For workers that get another body."""

    async def to(self, worker: Worker) -> _Outcome:
        if worker.is_dead:
            return _Outcome(worker, False, None, None, "it is dead, says an operator", dead=True)
        content = self.bodies.get(worker, self.body)
        try:
            url = worker.url + self._target
            answer: Answer = await self._fetch(self._method, url, self.headers, content, self._timeout_s)
        except Refused as refused:
            dead = worker.state is WorkerState.QUARANTINED
            return _Outcome(worker, False, None, None, str(refused), dead=dead)
        except Unreachable as unreachable:
            return _Outcome(worker, False, None, None, str(unreachable))
        value = _decoded(answer.body)
        done = 200 <= answer.status < 300 and not (isinstance(value, dict) and value.get("success") is False)
        return _Outcome(worker, done, answer.status, value)


def _aggregated(path: str, outcomes: Sequence[_Outcome]) -> Reply:
    """What all workers answered alike is at the top, so that a client of one server finds it where it looks. The
    message is the reason of those that failed. 502 if one failed; the workers' own status if all refused the request
    alike."""
    living = [one for one in outcomes if not one.dead]
    if not living:
        return error_reply(503, "Service Unavailable", "no worker is alive", RETRY_AFTER)
    failed = [one.failure() for one in living if not one.done]
    bodies = [one.body for one in living]
    if not failed and path == "/get_weights_by_name" and all(body == bodies[0] for body in bodies):
        return json_reply(200, bodies[0])
    alike: dict[str, Any] = {}
    if all(isinstance(body, dict) for body in bodies):
        alike = {name: value for name, value in bodies[0].items() if all(_has(body, name, value) for body in bodies)}
    summary = {
        "success": not failed,
        "message": first_sentence(failed, len(living)) if failed else "ok",
        "path": path,
        "worker_count": len(living),
        "results": [one.listed() for one in outcomes],
    }
    if not failed:
        return json_reply(200, alike | summary)
    of_workers = alike["error"] if isinstance(alike.get("error"), dict) else {}
    summary["error"] = of_workers | {"message": summary["message"]}
    status = _common_status(living)
    return json_reply(status, alike | summary, RETRY_AFTER if status == 503 else None)


def _common_status(outcomes: Sequence[_Outcome]) -> int:
    """That of a refusal in which all agree; else 502."""
    status = outcomes[0].status
    if status is None or any(one.status != status for one in outcomes):
        return 502
    return status if 400 <= status < 500 or status in (501, 503) else 502


def _has(body: dict[str, Any], name: str, value: Any) -> bool:
    return name in body and body[name] == value


def _applied(body: Any) -> bool:
    """A bucket of an update that is not the last one changes nothing yet."""
    return not isinstance(body, dict) or body.get("applied", True) is not False


def _ranks(server_info: Any) -> int:
    """How many members of a group a worker is; 1 if it does not tell."""
    product = 1
    for name in ("tp_size", "pp_size"):
        size = server_info.get(name) if isinstance(server_info, dict) else None
        product *= size if type(size) is int and size > 0 else 1
    return product


def _version(outcome: _Outcome) -> Any:
    return outcome.body.get("weight_version") if isinstance(outcome.body, dict) else None


def _decoded(body: bytes) -> Any:
    """The JSON; the text if it is none; None for no body."""
    if not body.strip():
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body[:10_000].decode("utf-8", "replace")
