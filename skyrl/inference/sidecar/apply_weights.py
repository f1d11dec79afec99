"""Puts weights that vLLM has staged into its model, in one step in which generation is held.

If that step fails, the model is neither old nor new: generation stays held until a full update succeeds
(`WeightTrouble`). `WeightChecks` proves which weights one vLLM has: checksums, single rows, and random numbers that an
update must replace."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from skyrl.base.types.weights import FIRST_VERSION, next_version
from skyrl.inference.sidecar.errors import BadRequest, Busy, NotOffered, SidecarError, VllmAway, VllmBroke
from skyrl.inference.sidecar.facts import WeightVersion
from skyrl.inference.sidecar.in_flight import Hold, InFlight, Pause, PauseMode
from skyrl.inference.sidecar.update_requests import Change
from skyrl.inference.sidecar.vllm import Vllm
from skyrl.inference.sidecar.vllm_weights import Ranks, VllmWeights, rank_results, refusal

logger = logging.getLogger(__name__)


class WeightTrouble:
    """All calls but reading `reason` are made by whoever changes the weights, one at a time."""

    def __init__(self, weights: VllmWeights, pause: Pause) -> None:
        self._weights = weights
        self._pause = pause
        self.reason: str | None = None
        """Why nobody may sample from this vLLM; None if the weights are whole."""
        self._kept_hold: Hold | None = None
        """Holds generation while there is a reason."""

    async def enter_hold(self) -> Hold:
        """A hold; that of an update that failed before goes on."""
        if self._kept_hold is not None:
            kept, self._kept_hold = self._kept_hold, None
            return kept
        return await self._pause.hold()

    async def leave_hold(self, hold: Hold) -> None:
        """Continue generation, unless there is a reason not to."""
        if self.reason is None:
            await self._pause.let_go(hold)
        else:
            self._kept_hold = hold
            logger.error("generation is held: %s", self.reason)

    async def take_over(self, reason: str | None) -> None:
        """The reason that an earlier sidecar or a start of vLLM has left; None: the weights are whole. Raises
        SidecarError."""
        if reason == self.reason:
            return
        hold = await self.enter_hold()
        if reason is not None:  # an earlier sidecar may have paused vLLM for it; the next update continues
            self._pause.forget_found()
            await self.remember(reason)
        self.reason = reason
        await self.leave_hold(hold)

    async def remember(self, reason: str) -> None:
        """Nobody may sample. vLLM remembers it too: for the next sidecar, and to refuse a part of an update."""
        self.reason = reason
        with contextlib.suppress(SidecarError):
            await self._weights.call("mark_broken", {"reason": reason})


FLUSH_TRIES, FLUSH_PAUSE_S = 20, 0.05
"""vLLM frees the cache of ended requests a moment after it has answered them."""


class Applied(NamedTuple):
    """`frozen`: how many requests were in flight. `version`: of the new weights. `ranks`: their answers to the
    step that changed the model."""

    frozen: int
    version: str
    ranks: Ranks


@dataclass(eq=False)
class ApplyWeights:
    """`update_s` bounds the step in vLLM. `known_file` has the last two fields, for the next sidecar."""

    vllm: Vllm
    weights: VllmWeights
    version: WeightVersion
    in_flight: InFlight
    pause: Pause
    trouble: WeightTrouble
    update_s: float
    known_file: Path | None
    was_updated: bool = False
    """Whether this sidecar has updated the weights of the vLLM that runs."""
    updated_start: str | None = None
    """The start of vLLM that got the last update, None if vLLM did not tell."""
    last_named: str | None = None
    """The version that was named last, perhaps in a vLLM that has ended since."""

    def __post_init__(self) -> None:
        if self.known_file is not None and self.known_file.exists():
            self.updated_start, self.last_named = json.loads(self.known_file.read_text())

    async def apply(self, change: Change) -> Applied:
        """Put what is staged into the model, flush, name the version. Raises SidecarError; the trouble's reason says
        whether the model was touched."""
        hold = await self.trouble.enter_hold()
        try:
            if change.abort_all:
                await self.pause.end_all()
            self.check_in_flight(change)
            applied = await self._change_model(change, self.in_flight.running)
            self.trouble.reason = None
            hold.stays_paused = change.keep_pause
        finally:
            await self.trouble.leave_hold(hold)
        return applied

    def check_in_flight(self, change: Change) -> None:
        """Raises BadRequest for requests in flight that would go on with a cache of the old weights."""
        if change.abort_all or self.in_flight.quiet.is_set() or self.pause.mode is PauseMode.RETRACT:
            return
        if self.trouble.reason is not None:  # they were frozen by an update that failed, and compute their cache again
            return
        if self.pause.mode is PauseMode.IN_PLACE and not change.flush_cache:
            return
        raise BadRequest(
            f"{self.in_flight.running} requests are in flight: set abort_all_requests, or pause generation before, "
            "with the mode retract, or with the mode in_place and flush_cache false"
        )

    async def _change_model(self, change: Change, frozen: int) -> Applied:
        version = change.version or await self._next_version()
        if version is None:
            raise VllmAway("vLLM did not answer the version of its weights")
        before, self.trouble.reason = self.trouble.reason, "an update has not ended"
        try:
            ranks = await self.weights.outcomes("apply", {"partial": change.partial}, self.update_s)
        except NotOffered:
            self.trouble.reason = before
            raise
        except SidecarError as error:
            self.trouble.reason = f"an update failed in vLLM: {error.message}"
            raise
        refused = refusal(ranks)
        if refused is not None and not any(rank.get("ok") is True for rank in ranks):
            self.trouble.reason = before  # no rank has begun
            raise refused
        broken = next((rank["broken"] for rank in ranks if rank.get("broken")), None)
        if broken is None and refused is not None:
            broken = f"not all ranks have the new weights: {refused.message}"
        if broken is not None:
            await self.trouble.remember(broken)
            error = VllmBroke(f"{broken}; generation stays paused until a full update succeeds")
            error.rank_results = rank_results(ranks)
            raise error
        # Frozen by an update that failed, not by the trainer: it has not decided what becomes of their cache
        abandoned = frozen > 0 and before is not None and self.pause.mode is not PauseMode.IN_PLACE
        try:
            if change.flush_cache or abandoned:
                await self._flush(recompute=frozen > 0)
            self.updated_start = None
            with contextlib.suppress(SidecarError):
                self.updated_start = (await self.vllm.health()).start
            await self.name(version)
            await self.weights.call("mark_broken", {"reason": None})
        except SidecarError as error:
            await self.trouble.remember(f"the new weights are loaded, and were not put into service: {error.message}")
            raise VllmBroke(self.trouble.reason) from error
        self.was_updated = True
        return Applied(frozen, version, ranks)

    async def _next_version(self) -> str | None:
        """Of an update that names none. A vLLM that was started again has forgotten its version: versions go on from
        the last one, so that two weights never get the same name. None if vLLM does not tell its version."""
        version = await self.version.get()
        if version == FIRST_VERSION and self.last_named is not None:
            version = self.last_named
        return None if version is None else next_version(version)

    async def _flush(self, *, recompute: bool) -> None:
        for attempt in range(FLUSH_TRIES):
            # Also a request that nobody counts may be frozen, such as a health probe's token
            recompute = recompute or attempt >= FLUSH_TRIES // 2
            query = "?reset_running_requests=true" if recompute else ""
            answer = await self.vllm.call("POST", f"/reset_prefix_cache{query}")
            if isinstance(answer, dict) and answer.get("success") is True:
                return
            await asyncio.sleep(FLUSH_PAUSE_S)
        raise VllmBroke("vLLM did not flush its cache")

    async def name(self, version: str) -> None:
        """Name the weights that vLLM has. Raises SidecarError."""
        await self.vllm.call("POST", "/update_weight_version", {"new_version": version})
        self.last_named = version
        if self.known_file is not None:
            await asyncio.to_thread(_write, self.known_file, [self.updated_start, self.last_named])


def _write(file: Path, value: Any) -> None:
    scratch = file.with_suffix(".new")
    try:
        scratch.write_text(json.dumps(value))
        scratch.replace(file)
    except OSError as error:
        logger.warning("%s cannot be written; the next sidecar needs it: %s", file, error)


@dataclass(eq=False)
class WeightChecks:
    """In the body of `present()` the weights are there, and nobody else changes them. `update_s` bounds each check."""

    present: Callable[[], AbstractAsyncContextManager[None]]
    weights: VllmWeights
    trouble: WeightTrouble
    update_s: float

    async def reset(self) -> Ranks:
        """Overwrite the weights with random numbers. Nobody can sample until a full update. Raises SidecarError."""
        async with self.present():
            hold = await self.trouble.enter_hold()
            try:
                ranks = await self.weights.call("reset_tensors")
            except BaseException as error:
                if not isinstance(error, (BadRequest, Busy, NotOffered)):  # it may have begun
                    self.trouble.reason = "its tensors were perhaps reset by /weights_checker"
                await self.trouble.leave_hold(hold)
                raise
            self.trouble.reason = "its tensors were reset by /weights_checker"
            await self.trouble.leave_hold(hold)
            return ranks

    async def check(self, action: str) -> Ranks:
        """`checksum`, `snapshot` or `compare`, on each rank. Raises SidecarError."""
        async with self.present():
            return await self.weights.job(action, None, self.update_s)

    async def rows(self, name: str, most: int) -> Any:
        """The first `most` rows of a tensor, as lists of numbers. Raises SidecarError."""
        async with self.present():
            return (await self.weights.call("weight", {"name": name, "most": most}))[0]["rows"]
