"""Colocated sampling: the waiting samples run together after each turn of training.

Samples are commands only where trainer and sampler share a device (`Modes.forwards` is false). Knows neither the
scheduler nor the rows: `SampleTurns` in the loop does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from skyrl.base.pictures.vision import NoVision, VisionConfig
from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.types.requests import Command
from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.base.wire.sample_request import SampleRequest
from skyrl.engine.command_log import failed
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.vllm_client import VllmError
from skyrl.sampling.base_model import job_for
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.gate import SamplingGate
from skyrl.sampling.metrics import SampleMetrics
from skyrl.sampling.pictures import place_stored
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.run_steps import SampledSums, Tenanted
from skyrl.storage.db.samplers import find_sampler
from skyrl.storage.db.usage import RunSamples, UsageKey

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""The time between two tries to wake vLLM."""


@dataclass(frozen=True)
class Sampled:
    """Outcomes by request id, and the usage of these samples; `runs` are their sums by run. `postponed` are commands
    that could not run now: give them to the sampler again."""

    outcomes: list[tuple[str, Outcome]]
    used: Mapping[UsageKey, int]
    postponed: Sequence[Command] = ()
    runs: Mapping[Tenanted, SampledSums] = field(default_factory=dict[Tenanted, SampledSums])


class ColocatedSampler:
    """Runs batches of samples. With `sleeps`, vLLM holds the device's memory only while it samples.

    After vLLM has died, it is away until the launcher has started it again. Meanwhile samples wait and training goes
    on. After `give_up_after_s` the samples fail.
    """

    def __init__(
        self,
        database: Database,
        client: ForwardingClient,
        group: EngineGroup,
        limits: ContextLimits,
        base_name: str,
        *,
        sight: VisionConfig | NoVision,
        sleeps: bool,
        give_up_after_s: float,
    ) -> None:
        self._database = database
        self._client = client
        self._group = group
        self._limits = limits
        self._base_name = base_name
        self._sight = sight
        self._sleeps = sleeps
        self._give_up_after_s = give_up_after_s
        self._away_since: float | None = None
        self._retry_wake_at: float | None = None
        """When to wake vLLM again after a failed try, in monotonic seconds."""

    @property
    def may_run(self) -> bool:
        """Whether to call `run` now: vLLM is ready, or has been away for so long that the samples must fail."""
        now = time.monotonic()
        if not self._group.ready:
            self._retry_wake_at = None
            self._note_away(now)
        elif self._retry_wake_at is None:
            self._away_since = None
            return True
        elif now >= self._retry_wake_at:
            return True
        return self._has_given_up

    @property
    def _has_given_up(self) -> bool:
        return self._away_since is not None and time.monotonic() - self._away_since >= self._give_up_after_s

    def _note_away(self, now: float) -> None:
        if self._away_since is None:
            self._away_since = now

    async def run(self, commands: Sequence[Command], bodies: dict[str, bytes]) -> Sampled:
        """Wake vLLM, run the commands that have a body in `bodies`, put vLLM to sleep."""
        runnable = [command for command in commands if command.request_id in bodies]
        if not runnable:
            return Sampled([], {})
        if (trouble := await self._wake()) is not None:
            if not self._has_given_up:
                return Sampled([], {}, runnable)
            error = FailedRequest(f"gave up after {self._give_up_after_s:g} s: {trouble}", ErrorCategory.SERVER)
            return Sampled([(command.request_id, failed(error, command)) for command in runnable], {})
        used: Counter[UsageKey] = Counter()
        gate = SamplingGate(used.update, SampleMetrics(), runs=(runs := RunSamples()))
        try:
            outcomes = await asyncio.gather(*(self._sample(c, bodies[c.request_id], gate) for c in runnable))
        finally:
            await self._put_to_sleep()
        ended = [(c.request_id, outcome) for c, outcome in zip(runnable, outcomes, strict=True)]
        return Sampled(ended, used, runs=runs.take())

    async def _wake(self) -> str | None:
        """Wake vLLM. Returns why it cannot sample now, or None when it is awake."""
        if self._group.reason:
            return self._group.reason
        try:
            if self._sleeps:
                await self._group.wake()
        except (VllmError, httpx.TransportError) as error:
            trouble = f"vLLM does not wake up: {str(error) or type(error).__name__}"
            logger.warning("%s; samples wait", trouble)
            now = time.monotonic()
            self._retry_wake_at = now + RETRY_S
            self._note_away(now)
            return trouble
        self._away_since = self._retry_wake_at = None
        return None

    async def _put_to_sleep(self) -> None:
        """An error is only logged: a vLLM that has died holds no memory, and the launcher starts it again."""
        if not self._sleeps:
            return
        try:
            await self._group.sleep()
        except (VllmError, httpx.TransportError) as error:
            logger.error("vLLM could not be put to sleep: %s", str(error) or type(error).__name__)

    async def _sample(self, command: Command, body: bytes, gate: SamplingGate) -> Outcome:
        try:
            sampler = await self._database.read_async(lambda c: find_sampler(c, command.sampling_session_id or ""))
            if sampler is None:
                raise FailedRequest("sampling_session_id: the sampling session was closed")
            request = decode_json(SampleRequest, body)
            pictures = None
            if not request.prompt.is_text:
                pictures = await place_stored(request, self._database, self._sight, command.tenant)
            job = job_for(request, command.request_id, sampler, self._limits, self._base_name, pictures=pictures)
            async with gate.turn(None, job, sampler) as turn:
                turn.used = answer = await self._client.sample(job)
            return Outcome(answer.body, "proto:sample")
        except Exception as error:  # the client gets it, or the log
            return failed(error, command)

    async def close(self) -> None:
        await self._client.close()
