"""New weights for one vLLM: from disk, a trainer's group, or its memory. One update at a time.

What arrives is staged inside vLLM while samples run; `apply_weights` then puts it into the model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from skyrl.inference.sidecar.apply_weights import ApplyWeights, WeightChecks, WeightTrouble
from skyrl.inference.sidecar.errors import BadRequest, Busy, NotOffered, SidecarError
from skyrl.inference.sidecar.facts import WeightVersion
from skyrl.inference.sidecar.in_flight import InFlight, Pause
from skyrl.inference.sidecar.settings import SidecarSettings
from skyrl.inference.sidecar.update_requests import Arguments, Change
from skyrl.inference.sidecar.vllm import Vllm
from skyrl.inference.sidecar.vllm_weights import Ranks, VllmWeights, longest, rank_results

LOOK_AGAIN_S = 0.5
FIRST_WEIGHTS = "vLLM was started again, and has its first weights; update them"


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
        self._pause = pause
        self._lock = asyncio.Lock()
        self.unfinished: str | None = None
        """What an update that has begun still lacks; None if there is none."""
        self._staged_from: Arguments | None = None
        """The request whose checkpoint vLLM has read and not applied."""
        self.weights_away = False
        """The memory of the weights is given away: nothing may read or write them."""
        self._is_outdated = False
        """There are newer weights than those that vLLM loads by itself."""
        self._has_looked = False
        """Whether vLLM's weights are whole is known."""
        self._trouble = WeightTrouble(weights, pause)
        self._applying = ApplyWeights(
            vllm, weights, version, in_flight, pause, self._trouble, settings.update_s, settings.known_file
        )
        self.checks = WeightChecks(self._present, weights, self._trouble, settings.update_s)

    @property
    def trouble(self) -> str | None:
        """Why nobody may sample from this vLLM; None if the weights are whole."""
        return self._trouble.reason

    @property
    def was_updated(self) -> bool:
        """Whether this sidecar has updated the weights of the vLLM that runs."""
        return self._applying.was_updated

    async def outdate(self) -> None:
        """Other vLLMs have newer weights than those that this one loads by itself: nobody may sample from it until an
        update. Does nothing after an update. Raises SidecarError."""
        async with self.locked():
            if not self.was_updated:
                self._is_outdated = True
                await self._trouble.take_over(self._trouble.reason or FIRST_WEIGHTS)

    async def run(self) -> None:
        """Look, once vLLM answers."""
        while True:
            try:
                await self.look()
                return
            except SidecarError:
                await asyncio.sleep(LOOK_AGAIN_S)  # vLLM is still starting

    async def look(self) -> None:
        """Ask vLLM whether its weights are whole, and the last ones, unless that is known: an earlier sidecar may have
        failed. Raises SidecarError."""
        if self._has_looked:
            return
        if self._applying.updated_start is not None:
            await self.see_start((await self._vllm.health()).start)
        async with self.locked():
            if self._has_looked:
                return
            with contextlib.suppress(NotOffered):  # then nobody can change them
                ranks = await self._weights.call("state")
                broken = next((rank["broken"] for rank in ranks if rank.get("broken")), None)
                old = FIRST_WEIGHTS if self._is_outdated and not self.was_updated else None
                await self._trouble.take_over(broken or old)
            self._has_looked = True

    async def see_start(self, start: str | None) -> None:
        """`start` names the start of vLLM that answers now. Another one than that of the last update has the weights
        that vLLM loads by itself."""
        before = self._applying.updated_start
        if start is None or before in (None, start):
            return
        async with self.locked():
            if self._applying.updated_start != before:
                return  # updated while this waited
            self._is_outdated = True
            await self._trouble.take_over(FIRST_WEIGHTS)  # the next look tries again if this fails
            self._applying.was_updated, self._applying.updated_start = False, None
            self._forget_staged()

    async def from_disk(self, arguments: Arguments, change: Change) -> dict[str, Any]:
        """The answer. Everything is read before it: the caller may delete the directory. Raises SidecarError."""
        async with self._present():
            if not change.stage_only:
                self._applying.check_in_flight(change)
            source = {name: value for name, value in arguments.items() if name != "keep"}
            read: Ranks = []
            if change.stage_only or self._staged_from != source:  # a trainer that starts again may write anew
                self._forget_staged()
                read = await self._weights.job("read", arguments, self._settings.update_s)
            if change.stage_only:
                self._staged_from = source
                done = "Read and checked; the same request without stage_only applies it."
                return await self._state(done, read, longest(read), applied=False)
            return await self._apply(change, longest(read))

    def _forget_staged(self) -> None:
        """Whatever begins now replaces what vLLM has staged."""
        self.unfinished, self._staged_from = None, None

    async def join(self, group: Arguments) -> Ranks:
        """Form a group with the trainer and the other workers. Raises SidecarError."""
        timeout_s = group["timeout_s"] or self._settings.group_s
        async with self.locked():
            self._forget_staged()
            arguments = group | {"timeout_s": timeout_s}
            return await self._weights.job("join_group", arguments, 2 * timeout_s + self._settings.control_s)

    async def leave(self, name: str) -> Ranks:
        """Raises SidecarError, BadRequest for a group that is not there."""
        async with self.locked():
            self._forget_staged()
            return await self._weights.call("leave_group", {"name": name})

    async def from_group(self, bucket: Arguments, change: Change) -> dict[str, Any]:
        """The answer for one bucket. The last one applies the update. Raises SidecarError; then the whole update must
        be sent again."""
        begun = False
        try:
            async with self._present():
                begun = True
                self._forget_staged()
                received = await self._weights.job("receive", bucket, self._settings.update_s)
                return await self._staged(change, received, len(bucket["names"]))
        except SidecarError as error:
            if not begun:
                await self.fail_group(bucket["group"], error.message)
            raise

    async def fail_group(self, name: object, why: str) -> None:
        """A bucket of this group was refused before it was received. What the trainer sends for it would be taken for
        tensors of the next bucket, so the group cannot be used again."""
        if isinstance(name, str):
            with contextlib.suppress(SidecarError):  # of a vLLM that is gone, or cannot be updated
                await self._weights.call("fail_group", {"name": name, "why": f"a bucket was refused: {why}"})

    async def from_memory(self, arguments: Arguments, change: Change) -> dict[str, Any]:
        """The answer for tensors in a trainer's memory, or, without tensors, for all that were staged. Raises
        SidecarError; then the whole update must be sent again."""
        async with self._present():
            self._forget_staged()
            if "memory" in arguments:
                staged = await self._weights.job("map", arguments, self._settings.update_s)
            else:
                staged = await self._weights.call("staged", arguments)
            return await self._staged(change, staged, len(arguments.get("names", ())))

    async def discard(self) -> Ranks:
        """Forget what is staged. Raises SidecarError."""
        async with self.locked():
            self._forget_staged()
            return await self._weights.call("discard")

    async def _staged(self, change: Change, received: Ranks, given: int) -> dict[str, Any]:
        """The answer after some tensors were staged: apply the update if it is whole, and not `stage_only`."""
        seconds = longest(received)
        lacks = max(rank["missing"] for rank in received)
        if not any(rank["new"] for rank in received):
            known = f"received {given} tensors, which the model has already"
            return await self._state(known, received, seconds, applied=False)
        more = f"received {given} tensors; {lacks} are still to come"
        if change.stage_only:
            return await self._state(more, received, seconds, applied=False)
        if lacks and not change.partial:
            self.unfinished = f"{lacks} tensors of the update are missing, such as {', '.join(received[0]['some'])}"
            return await self._state(more, received, seconds, applied=False)
        return await self._apply(change, seconds)

    async def _apply(self, change: Change, seconds: dict[str, float]) -> dict[str, Any]:
        """The answer after what is staged has become the model. `seconds`: of the stages until now. After a refusal
        nothing is staged any more."""
        self._staged_from = None
        try:
            applied = await self._applying.apply(change)
        except BadRequest:
            await self._weights.call("discard")
            raise
        message = f"Succeeded to update model weights. Weight version updated to {applied.version}."
        state = await self._state(message, applied.ranks, seconds | longest(applied.ranks), applied=True)
        return state | {"num_paused_requests": applied.frozen}

    async def set_version(self, version: str, *, abort_all: bool) -> None:
        """Name the weights that vLLM has. Raises SidecarError."""
        async with self.locked():
            if self._trouble.reason is not None:
                raise BadRequest(f"the weights have no version: {self._trouble.reason}")
            async with self._pause.held():
                if abort_all:
                    await self._pause.end_all()
                await self._applying.name(version)

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

    @contextlib.asynccontextmanager
    async def _present(self) -> AsyncIterator[None]:
        """As `locked`, for a body that needs the weights. Raises BadRequest if their memory is given away."""
        async with self.locked():
            if self.weights_away:
                raise BadRequest("the memory of the weights is released: call /resume_memory_occupation before")
            yield

    async def _state(self, message: str, ranks: Ranks, seconds: dict[str, float], *, applied: bool) -> dict[str, Any]:
        return {
            "success": True,
            "message": message,
            "applied": applied,
            "weight_version": await self._version.get(),
            "seconds": {stage: round(value, 4) for stage, value in seconds.items()},
            "rank_results": rank_results(ranks),
        }
