"""New weights for one vLLM: from disk, or from a trainer's group. One update at a time.

What arrives is staged inside vLLM while samples run. Then generation is held, and the staged tensors are applied in one
step. If that step fails, the model is neither old nor new: generation stays held until a full update succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from skyrl.inference.sidecar.errors import BadRequest, Busy, NotOffered, SidecarError, VllmAway, VllmBroke
from skyrl.inference.sidecar.facts import WeightVersion
from skyrl.inference.sidecar.in_flight import InFlight
from skyrl.inference.sidecar.pause import Hold, Pause, PauseMode
from skyrl.inference.sidecar.settings import SidecarSettings
from skyrl.inference.sidecar.update_requests import Change, FromDisk, FromGroup, FromMemory, NewGroup
from skyrl.inference.sidecar.vllm import Vllm
from skyrl.inference.sidecar.vllm_weights import Ranks, VllmWeights, longest, refusal

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
FIRST_WEIGHTS = "vLLM was started again, and has its first weights; update them"
FLUSH_TRIES, FLUSH_PAUSE_S = 20, 0.05
"""vLLM frees the cache of ended requests a moment after it has answered them."""


class Updates:
    """`vllm_weights` answers for all ranks of this vLLM."""

    def __init__(
        self,
        settings: SidecarSettings,
        vllm: Vllm,
        weights: VllmWeights,
        version: WeightVersion,
        in_flight: InFlight,
        pause: Pause,
    ) -> None:
        self._settings = settings
        self._vllm = vllm
        self._weights = weights
        self._version = version
        self._in_flight = in_flight
        self._pause = pause
        self._lock = asyncio.Lock()
        self._unfinished: str | None = None
        """What an update by buckets still lacks."""
        self._staged_from: tuple[Any, ...] | None = None
        """The request whose checkpoint vLLM has read and not applied."""
        self._trouble: str | None = None
        self._kept_hold: Hold | None = None
        """Holds generation while the weights are in trouble."""
        self.weights_away = False
        """The memory of the weights is given away: nothing may read or write them."""
        self._is_outdated = False
        """Somebody has said that others have newer weights."""
        self._was_updated = False
        self._updated_start: str | None = None
        """The start of vLLM that got this sidecar's last update, None if vLLM did not tell."""

    @property
    def trouble(self) -> str | None:
        """Why nobody may sample from this vLLM; None if the weights are whole."""
        return self._trouble

    @property
    def unfinished(self) -> str | None:
        """What an update that has begun still lacks; None if there is none."""
        return self._unfinished

    @property
    def was_updated(self) -> bool:
        """Whether this sidecar has updated the weights of the vLLM that runs."""
        return self._was_updated

    async def outdate(self) -> None:
        """Other vLLMs have newer weights than those that this one loads by itself: nobody may sample from it until an
        update. Does nothing after an update. Raises SidecarError."""
        async with self.locked():
            if not self.was_updated:
                self._is_outdated = True
                await self._take_over(self._trouble or FIRST_WEIGHTS)

    async def run(self) -> None:
        """Ask vLLM whether its weights are whole, once it answers: an earlier sidecar may have failed."""
        while True:
            try:
                async with self.locked():
                    ranks = await self._weights.call("state")
                    broken = next((rank["broken"] for rank in ranks if rank.get("broken")), None)
                    old = FIRST_WEIGHTS if self._is_outdated and not self.was_updated else None
                    await self._take_over(broken or old)
                return
            except NotOffered:
                return  # then nobody can change them
            except SidecarError:
                await asyncio.sleep(LOOK_AGAIN_S)  # vLLM is still starting

    async def see_start(self, start: str | None) -> None:
        """`start` names the start of vLLM that answers now. Another one than that of the last update has the weights
        that vLLM loads by itself."""
        if start is None or self._updated_start in (None, start):
            return
        async with self.locked():
            self._was_updated, self._updated_start = False, None
            self._forget_staged()
            await self._take_over(FIRST_WEIGHTS)

    async def from_disk(self, request: FromDisk) -> dict[str, Any]:
        """The answer. Everything is read before it: the caller may delete the directory. Raises SidecarError."""
        change = request.change
        async with self.locked():
            self._check_present()
            if not request.stage_only:
                self._check_in_flight(change)
            source = (request.model_path, request.base, change.version, change.partial, change.checksums)
            seconds: dict[str, float] = {}
            if request.stage_only or self._staged_from != source:  # a trainer that starts again may write anew
                seconds = await self._stage(request)
            if request.stage_only:
                self._staged_from = source
                done = "Read and checked; the same request without stage_only applies it."
                return await self._state(done, seconds, applied=False)
            self._staged_from = None
            try:
                applied = await self._apply(change, from_disk=True)
            except BadRequest:
                await self._weights.call("discard")
                raise
            return await self._answer(change, applied, seconds)

    async def _stage(self, request: FromDisk) -> dict[str, float]:
        """The seconds of its stages."""
        self._forget_staged()
        arguments = {
            "directory": request.model_path,
            "version": request.change.version,
            "checksums": request.change.checksums,
            "partial": request.change.partial,
            "keep": request.keep,
            "base": request.base,
        }
        return longest(await self._weights.job("read", arguments, self._settings.update_s))

    def _forget_staged(self) -> None:
        """Whatever begins now replaces what vLLM has staged."""
        self._unfinished, self._staged_from = None, None

    async def join(self, group: NewGroup) -> None:
        """Form a group with the trainer and the other workers. Raises SidecarError."""
        timeout_s = self._settings.group_s if group.timeout_s is None else group.timeout_s
        async with self.locked():
            self._forget_staged()
            await self._weights.job(
                "join_group",
                {
                    "address": group.address,
                    "port": group.port,
                    "rank_offset": group.rank_offset,
                    "world_size": group.world_size,
                    "name": group.name,
                    "backend": group.backend,
                    "timeout_s": timeout_s,
                },
                2 * timeout_s + self._settings.control_s,
            )

    async def leave(self, name: str) -> None:
        """Raises SidecarError, BadRequest for a group that is not there."""
        async with self.locked():
            self._forget_staged()
            await self._weights.call("leave_group", {"name": name})

    async def from_group(self, bucket: FromGroup) -> dict[str, Any]:
        """The answer for one bucket. The last one applies the update. Raises SidecarError; then the whole update must
        be sent again."""
        change = bucket.change
        async with self.locked():
            self._check_present()
            self._forget_staged()
            received = await self._weights.job(
                "receive",
                {
                    "group": bucket.group,
                    "names": bucket.names,
                    "dtypes": bucket.dtypes,
                    "shapes": bucket.shapes,
                    "version": change.version,
                    "checksums": change.checksums,
                },
                self._settings.update_s,
            )
            return await self._staged(change, received, len(bucket.names))

    async def from_memory(self, request: FromMemory) -> dict[str, Any]:
        """The answer for tensors in a trainer's memory, or, without tensors, for all that were staged. Raises
        SidecarError; then the whole update must be sent again."""
        async with self.locked():
            self._check_present()
            self._forget_staged()
            if request.found is None:
                staged = await self._weights.call("staged", {"version": request.change.version})
            else:
                staged = await self._weights.job("map", request.found, self._settings.update_s)
            given = len(request.found["names"]) if request.found else 0
            return await self._staged(request.change, staged, given, stage_only=request.stage_only)

    async def discard(self) -> None:
        """Forget what is staged. Raises SidecarError."""
        async with self.locked():
            self._forget_staged()
            await self._weights.call("discard")

    async def _staged(self, change: Change, received: Ranks, given: int, *, stage_only: bool = False) -> dict[str, Any]:
        """The answer after some tensors were staged: apply the update if it is whole, unless it is `stage_only`."""
        seconds = longest(received)
        lacks = max(rank["missing"] for rank in received)
        if not any(rank["new"] for rank in received):
            known = f"received {given} tensors, which the model has already"
            return await self._state(known, seconds, applied=False)
        more = f"received {given} tensors; {lacks} are still to come"
        if stage_only:
            return await self._state(more, seconds, applied=False)
        if lacks and not change.partial:
            self._unfinished = f"{lacks} tensors of the update are missing, such as {', '.join(received[0]['some'])}"
            return await self._state(more, seconds, applied=False)
        applied = await self._apply(change, from_disk=False)
        return await self._answer(change, applied, seconds)

    async def set_version(self, version: str, *, abort_all: bool) -> None:
        """Name the weights that vLLM has. Raises SidecarError."""
        async with self.locked():
            if self._trouble is not None:
                raise BadRequest(f"the weights have no version: {self._trouble}")
            async with self._pause.held():
                if abort_all:
                    await self._pause.end_all()
                await self._name(version)

    async def reset(self) -> None:
        """Overwrite the weights with random numbers. Nobody can sample until a full update. Raises SidecarError."""
        async with self.locked():
            self._check_present()
            hold = await self._enter_hold()
            try:
                await self._weights.call("reset_tensors")
            except BaseException as error:
                if not isinstance(error, (BadRequest, Busy, NotOffered)):  # it may have begun
                    self._trouble = "its tensors were perhaps reset by /weights_checker"
                await self._leave_hold(hold)
                raise
            self._trouble = "its tensors were reset by /weights_checker"
            await self._leave_hold(hold)

    async def check(self, action: str) -> Ranks:
        """`checksum`, `snapshot` or `compare`, on each rank. Raises SidecarError."""
        async with self.locked():
            self._check_present()
            return await self._weights.job(action, None, self._settings.update_s)

    async def rows(self, name: str, most: int) -> Any:
        """The first `most` rows of a tensor, as lists of numbers. Raises SidecarError."""
        async with self.locked():
            self._check_present()
            return (await self._weights.call("weight", {"name": name, "most": most}))[0]["rows"]

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """No weights change during the body. Raises Busy."""
        try:
            async with asyncio.timeout(self._settings.lock_s):
                await self._lock.acquire()
        except TimeoutError:
            raise Busy(f"another change of the weights has run for {self._settings.lock_s:g} s") from None
        try:
            yield
        finally:
            self._lock.release()

    def _check_present(self) -> None:
        if self.weights_away:
            raise BadRequest("the memory of the weights is released: call /resume_memory_occupation before")

    def _check_in_flight(self, change: Change) -> None:
        """Raises BadRequest for requests in flight that would go on with a cache of the old weights."""
        if change.abort_all or self._in_flight.quiet.is_set() or self._pause.mode is PauseMode.RETRACT:
            return
        if self._trouble is not None:  # they were frozen by an update that failed, and compute their cache again
            return
        if self._pause.mode is PauseMode.IN_PLACE and not change.flush_cache:
            return
        raise BadRequest(
            f"{self._in_flight.running} requests are in flight: set abort_all_requests, or pause generation before, "
            "with the mode retract, or with the mode in_place and flush_cache false"
        )

    async def _apply(self, change: Change, *, from_disk: bool) -> _Applied:
        """Put what is staged into the model, flush, name the version. Raises SidecarError; `trouble` says whether the
        model was touched."""
        hold = await self._enter_hold()
        try:
            if change.abort_all:
                await self._pause.end_all()
            if from_disk:
                self._check_in_flight(change)
            frozen = self._in_flight.running
            seconds = await self._change_model(change, frozen)
            self._trouble = None
            hold.stays_paused = change.keep_pause
        finally:
            await self._leave_hold(hold)
        return _Applied(frozen, seconds)

    async def _change_model(self, change: Change, frozen: int) -> dict[str, float]:
        """The seconds of its stages."""
        version = change.version or await self._version.get()
        before, self._trouble = self._trouble, "an update has not ended"
        try:
            ranks = await self._weights.outcomes("apply", {"partial": change.partial}, self._settings.update_s)
        except NotOffered:
            self._trouble = before
            raise
        except SidecarError as error:
            self._trouble = f"an update failed in vLLM: {error.message}"
            raise
        refused = refusal(ranks)
        if refused is not None and not any(rank.get("ok") is True for rank in ranks):
            self._trouble = before  # no rank has begun
            raise refused
        broken = next((rank["broken"] for rank in ranks if rank.get("broken")), None)
        if broken is None and refused is not None:
            broken = f"not all ranks have the new weights: {refused.message}"
        if broken is not None:
            await self._break(broken)
            raise VllmBroke(f"{broken}; generation stays paused until a full update succeeds")
        try:
            if change.flush_cache:
                await self._flush(recompute=frozen > 0)
            if version is None:
                raise VllmAway("vLLM did not answer the version of its weights")
            await self._name(version)
        except SidecarError as error:
            await self._break(f"the new weights are loaded, and were not put into service: {error.message}")
            raise VllmBroke(self._trouble) from error
        self._was_updated = True
        with contextlib.suppress(SidecarError):
            self._updated_start = (await self._vllm.health()).start
        return longest(ranks)

    async def _break(self, reason: str) -> None:
        """Remember it in vLLM too, for the next sidecar."""
        self._trouble = reason
        with contextlib.suppress(SidecarError):
            await self._weights.call("mark_broken", {"reason": reason})

    async def _flush(self, *, recompute: bool) -> None:
        for attempt in range(FLUSH_TRIES):
            # Also a request that nobody counts may be frozen, such as a health probe's token
            recompute = recompute or attempt >= FLUSH_TRIES // 2
            query = "?reset_running_requests=true" if recompute else ""
            answer = await self._vllm.call("POST", f"/reset_prefix_cache{query}")
            if isinstance(answer, dict) and answer.get("success") is True:
                return
            await asyncio.sleep(FLUSH_PAUSE_S)
        raise VllmBroke("vLLM did not flush its cache")

    async def _name(self, version: str) -> None:
        await self._vllm.call("POST", "/update_weight_version", {"new_version": version})

    async def _enter_hold(self) -> Hold:
        """A hold; that of an update that failed before goes on."""
        if self._kept_hold is not None:
            kept, self._kept_hold = self._kept_hold, None
            return kept
        return await self._pause.hold()

    async def _leave_hold(self, hold: Hold) -> None:
        """Continue generation, unless the weights are in trouble."""
        if self._trouble is None:
            await self._pause.let_go(hold)
        else:
            self._kept_hold = hold
            logger.error("generation is held: %s", self._trouble)

    async def _take_over(self, trouble: str | None) -> None:
        if trouble == self._trouble:
            return
        hold = await self._enter_hold()
        if trouble is not None:  # an earlier sidecar may have paused vLLM for it; the next update continues
            self._pause.forget_found()
        self._trouble = trouble
        await self._leave_hold(hold)

    async def _answer(self, change: Change, applied: _Applied, seconds: dict[str, float]) -> dict[str, Any]:
        moved = "" if change.version is None else f" Weight version updated to {change.version}."
        message, seconds = f"Succeeded to update model weights.{moved}", seconds | applied.seconds
        return await self._state(message, seconds, applied=True) | {"num_paused_requests": applied.frozen}

    async def _state(self, message: str, seconds: dict[str, float], *, applied: bool) -> dict[str, Any]:
        version = await self._version.get()
        rounded = {stage: round(value, 4) for stage, value in seconds.items()}
        return {
            "success": True, "message": message, "applied": applied, "weight_version": version, "seconds": rounded
        }  # fmt: skip


class _Applied(NamedTuple):
    """`frozen`: how many requests were in flight. `seconds`: of the stages of the step that changed the model."""

    frozen: int
    seconds: dict[str, float]
