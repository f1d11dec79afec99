"""Changes of weights and pauses on all workers at once, with one answer for all.

Each request goes to every worker that is not dead, also to those out of routing. While weights change the workers are
out of routing, and one change runs at a time. Reads of the routes' bodies only what several workers make necessary. If
some workers fail, the answer begins with their own reason, where they agree."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl.http.connection import HeaderList
from skyrl.http.messages import Body, Reply, fields_of, json_reply
from skyrl.router.broadcast import Outcome, SharedRequest
from skyrl.router.messages import RETRY_AFTER, error_reply, not_allowed
from skyrl.router.pool import WorkerPool
from skyrl.router.worker import Fetch, Worker, WorkerState

SHOWN_CHARACTERS = 2_000
"""The most characters of a reason. `results` of the answer has the whole."""
_NUMBER = re.compile(r"\d+")

log = logging.getLogger(__name__)

LOOK_S = 10.0
"""How long a worker may take to say which version it has."""
RANKS_S = 30.0
"""How long it may take to say how many ranks it has: for its first answer vLLM looks at its whole machine."""
_BOTH = ("GET", "POST")
_PAUSE = "/pause_generation"
_DISK, _GROUP = "/update_weights_from_disk", "/update_weights_from_distributed"
_INIT, _DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"
_TENSOR = "/update_weights_from_tensor"
_ONLY_STAGED = ("stage_only", "base")
"""Fields of an update from disk that a server ignores if it loads at once, as SGLang's do."""
_LOCKED = frozenset((_PAUSE, _DISK, _GROUP, _INIT, _DESTROY))
ADMIN_METHODS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_LOCKED, _TENSOR, "/continue_generation", "/update_weight_version"), ("POST",)),
    **dict.fromkeys(("/load_lora_adapter", "/unload_lora_adapter"), ("POST",)),
    **dict.fromkeys(("/get_weights_by_name", "/weights_checker"), _BOTH),
    **dict.fromkeys(("/release_memory_occupation", "/resume_memory_occupation"), _BOTH),
}
"""Routes for holders of the admin key."""
VERSION_PATHS = frozenset(("/model_info", "/get_model_info", "/weight_version", "/get_weight_version"))
"""Routes for everybody that are answered for all workers together."""


class _Silent(Exception):
    """A worker that is alive did not say how many ranks it has. `looks` are what each worker answered."""

    def __init__(self, looks: list[Outcome]) -> None:
        super().__init__("a worker does not answer")
        self.looks = looks


@dataclass(eq=False)
class AdminRoutes:
    """`lock_s`: how long a change waits for another one. `update_s`: how long a worker may take for one."""

    pool: WorkerPool
    fetch: Fetch
    lock_s: float
    update_s: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, method: str, path: str, query: bytes, headers: HeaderList, body: Body) -> Reply:
        """`path` is one of `ADMIN_METHODS` or `VERSION_PATHS`."""
        if (refused := not_allowed(method, ADMIN_METHODS.get(path, _BOTH))) is not None:
            return refused
        if path == _TENSOR:
            hint = f"tensors cannot be handed over between processes: use {_GROUP} or {_DISK}"
            return json_reply(501, {"error": {"message": hint, "code": "not_implemented"}})
        timeout_s = LOOK_S if path in VERSION_PATHS else self.update_s
        request = SharedRequest(self.fetch, method, path, query, headers, await body.collect(), timeout_s)
        if path in VERSION_PATHS:
            return await self._versions(path, request)
        if path not in _LOCKED:
            return _aggregated(path, await self._to_all(request))
        try:
            async with asyncio.timeout(self.lock_s):
                await self.lock.acquire()
        except TimeoutError:
            message = (
                f"admin update lock not acquired within {self.lock_s:g}s; another update operation may be in progress"
            )
            return _refused(503, message, code=503)
        try:
            return await self._change(path, request)
        finally:
            self.lock.release()

    def _targets(self) -> list[Worker]:
        """Dead workers, too: the answer lists them, although nothing is sent to one that is dead by hand."""
        return [one for one in self.pool.workers if one.state is not WorkerState.DRAINING]

    async def _to_all(self, request: SharedRequest, workers: Sequence[Worker] | None = None) -> list[Outcome]:
        async def to(worker: Worker) -> Outcome:
            if worker.is_dead:
                return Outcome(worker, None, "it is dead, says an operator", dead=True)
            return await request.to(worker)

        return list(await asyncio.gather(*map(to, self._targets() if workers is None else workers)))

    async def _look(self, path: str, workers: Sequence[Worker], request: SharedRequest, s: float) -> list[Outcome]:
        return await self._to_all(SharedRequest(self.fetch, "GET", path, b"", request.headers, b"", s), workers)

    async def _change(self, path: str, request: SharedRequest) -> Reply:
        workers = self._targets()
        absent: list[Outcome] = []
        if path == _INIT and len(workers) > 1:
            try:
                request.bodies, absent = await self._own_ranks(workers, request)
            except ValueError as wrong:
                return _refused(422, str(wrong))
            except _Silent as silent:
                return _aggregated(path, silent.looks)
            workers = [*request.bodies]
        if path == _DISK and (wrong := await self._not_staged(workers, request)) is not None:
            return _refused(400, wrong)
        with self.pool.weights_change([worker for worker in workers if not worker.is_dead]):
            outcomes = await self._to_all(request, workers)
            # A worker that did not join its group may hang in it: an operator decides when it serves again
            for outcome in outcomes if path == _INIT else ():
                if not _is_done(outcome) and not outcome.dead:
                    reason = f"its group of weight updates was not formed: {outcome.error or outcome.body}"
                    log.warning("worker %s is disabled: %s", outcome.worker.url, reason)
                    self.pool.set_service(outcome.worker, disabled=reason, is_dead=outcome.worker.is_dead)
            if path in (_DISK, _GROUP):
                self._note_who_missed(outcomes, request)
        return _aggregated(path, [*outcomes, *absent])

    async def _not_staged(self, workers: Sequence[Worker], request: SharedRequest) -> str | None:
        """Why an update that is to be staged must not go to these workers: one of them would load it at once, while it
        samples. None if it may."""
        fields = fields_of(request.body)
        given = {name for name in _ONLY_STAGED if fields.get(name) or f"{name}=" in request.query}
        if not given:
            return None
        for look in await self._look("/v1/loads", workers, request, LOOK_S):
            stages = isinstance(look.body, dict) and look.body.get("stages_updates") is True
            if not look.dead and not stages:
                url = look.worker.url
                return f"{min(given)}: {url} does not say that it stages updates, and may load the weights at once"
        return None

    async def _own_ranks(
        self, workers: Sequence[Worker], request: SharedRequest
    ) -> tuple[dict[Worker, bytes], list[Outcome]]:
        """The body for each worker that is alive, whose ranks come after those of the workers before it; and the dead
        ones, which are no members of the group. Raises ValueError, and _Silent when one does not answer."""
        fields = fields_of(request.body)
        first, world = fields.get("rank_offset"), fields.get("world_size")
        if type(first) is not int or type(world) is not int:
            raise ValueError("rank_offset, world_size: must be integers")
        looks = await self._look("/server_info", workers, request, RANKS_S)
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

    def _note_who_missed(self, outcomes: Sequence[Outcome], request: SharedRequest) -> None:
        """A dead worker that comes back has older weights than the others, and must not be sampled from. Nor must one
        that was registered while the update ran."""
        updated = [one for one in outcomes if _is_done(one) and _applied(one.body)]
        if not updated:
            return
        named = fields_of(request.body).get("weight_version")
        missed = f"the update of the weights to version {_version(updated[0]) if named is None else named}"
        for outcome in outcomes:
            if outcome in updated:
                self.pool.set_missed(outcome.worker, None)
            elif outcome.dead:
                self.pool.set_missed(outcome.worker, missed)
        asked = [outcome.worker for outcome in outcomes]
        for worker in self._targets():
            if worker not in asked:
                self.pool.set_missed(worker, missed)

    async def _versions(self, path: str, request: SharedRequest) -> Reply:
        """One worker's fields, if all that are alive have the same version. 409 if not; 502 if one does not tell."""
        outcomes = [one for one in await self._to_all(request) if not one.dead]
        versions = {one.worker.url: _version(one) for one in outcomes if _is_done(one)}
        listed = [*map(_listed, outcomes)]
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


def _refused(status: int, message: str, **more: Any) -> Reply:
    return json_reply(status, {"success": False, "message": message, "error": {"message": message, **more}})


def _is_done(one: Outcome) -> bool:
    said_no = isinstance(one.body, dict) and one.body.get("success") is False
    return one.status is not None and 200 <= one.status < 300 and not said_no


def _listed(one: Outcome) -> dict[str, Any]:
    if one.status is None:
        unreached = {"worker": one.worker.url, "success": False, "error": one.error}
        return unreached | ({"dead": True} if one.dead else {})
    return {"worker": one.worker.url, "success": _is_done(one), "status_code": one.status, "body": one.body}


def _reason(one: Outcome) -> str:
    """In the worker's words: SGLang's `message`, vLLM's `error.message`, FastAPI's `detail`, or a text."""
    if one.status is None:
        return one.error or "no answer"
    body = one.body if isinstance(one.body, dict) else {"message": one.body}
    error = body.get("error")
    more = error.get("message") if isinstance(error, dict) else error
    texts = (text for text in (body.get("message"), more, body.get("detail")) if isinstance(text, str) and text)
    return next(texts, f"status {one.status} without a reason")[:SHOWN_CHARACTERS]


def _first_sentence(failed: Sequence[Outcome], workers: int) -> str:
    """`failed` has at least one of the `workers` that were asked. Reasons agree if they differ in numbers alone: each
    worker has another count of requests in flight."""
    reasons = [*map(_reason, failed)]
    if len({_NUMBER.sub("0", reason) for reason in reasons}) > 1:
        return f"workers failed for different reasons, the first, {failed[0].worker.url}: {reasons[0]}"
    return reasons[0] if len(failed) == workers else f"{reasons[0]} (so say {len(failed)} of {workers} workers)"


def _aggregated(path: str, outcomes: Sequence[Outcome]) -> Reply:
    """What all workers answered alike is at the top, so that a client of one server finds it where it looks. The
    message is the reason of those that failed. 502 if one failed; the workers' own status if all refused the request
    alike."""
    living = [one for one in outcomes if not one.dead]
    if not living:
        return error_reply(503, "Service Unavailable", "no worker is alive", RETRY_AFTER)
    failed = [one for one in living if not _is_done(one)]
    bodies = [one.body for one in living]
    if not failed and path == "/get_weights_by_name" and all(body == bodies[0] for body in bodies):
        return json_reply(200, bodies[0])
    alike: dict[str, Any] = {}
    if all(isinstance(body, dict) for body in bodies):
        for name, value in bodies[0].items():
            if all(name in body and body[name] == value for body in bodies):
                alike[name] = value
    summary = {
        "success": not failed,
        "message": _first_sentence(failed, len(living)) if failed else "ok",
        "path": path,
        "worker_count": len(living),
        "results": [*map(_listed, outcomes)],
    }
    if not failed:
        return json_reply(200, alike | summary)
    of_workers = alike["error"] if isinstance(alike.get("error"), dict) else {}
    summary["error"] = of_workers | {"message": summary["message"]}
    statuses = {one.status for one in living}
    status = next(iter(statuses)) or 502
    if len(statuses) > 1 or not (400 <= status < 500 or status in (501, 503)):  # they do not refuse alike
        status = 502
    return json_reply(status, alike | summary, RETRY_AFTER if status == 503 else ())


def _applied(body: Any) -> bool:
    """A bucket of an update that is not the last one changes nothing yet."""
    return not isinstance(body, dict) or body.get("applied", True) is not False


def _ranks(server_info: Any) -> int:
    """How many members of a group a worker is; 1 if it does not tell."""
    sizes = [server_info.get(name) for name in ("tp_size", "pp_size")] if isinstance(server_info, dict) else []
    return math.prod(size for size in sizes if type(size) is int and size > 0)


def _version(outcome: Outcome) -> Any:
    return outcome.body.get("weight_version") if isinstance(outcome.body, dict) else None
