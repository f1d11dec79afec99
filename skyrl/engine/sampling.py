"""Colocated sampling: SAMPLE commands in the engine's own loop, all that wait at once, between turns of training."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyrl.backends.base import ModelLimits
from skyrl.db.database import Database
from skyrl.db.futures import Outcome
from skyrl.db.samplers import find_sampler
from skyrl.db.usage import UsageKey
from skyrl.engine.commands import Command
from skyrl.engine.passes import failed
from skyrl.inference.engine_group import EngineGroup
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.job import Limits
from skyrl.sampling.service import job_for, usage_of
from skyrl.wire.errors import FailedRequest
from skyrl.wire.requests import SampleRequest, decode_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampled:
    """Outcomes by request id, and what these samples count as in their tenants' usage."""

    outcomes: list[tuple[str, Outcome]]
    used: Mapping[UsageKey, int]


class ColocatedSampler:
    """Runs batches of samples. With `sleeps`, vLLM holds the device's memory only while it samples."""

    def __init__(
        self,
        database: Database,
        client: ForwardingClient,
        group: EngineGroup,
        limits: ModelLimits,
        base_name: str,
        *,
        sleeps: bool,
    ) -> None:
        self._database = database
        self._client = client
        self._group = group
        self._limits = Limits(limits.vocab_size, limits.max_context)
        self._base_name = base_name
        self._sleeps = sleeps

    async def run(self, commands: Sequence[Command], bodies: dict[str, bytes]) -> Sampled:
        """Runs the commands whose bodies are there. Wakes vLLM, samples, puts it to sleep."""
        here = [command for command in commands if command.request_id in bodies]
        if not here:
            return Sampled([], {})
        if self._sleeps:
            await self._group.wake()
        try:
            ended = await asyncio.gather(*(self._sample(c, bodies[c.request_id]) for c in here))
        finally:
            if self._sleeps:
                await self._group.sleep()
        used: Counter[UsageKey] = Counter()
        for _, amounts in ended:
            used.update(amounts)
        outcomes = [(command.request_id, outcome) for command, (outcome, _) in zip(here, ended, strict=True)]
        return Sampled(outcomes, used)

    async def _sample(self, command: Command, body: bytes) -> tuple[Outcome, Mapping[UsageKey, int]]:
        try:
            sampler = await self._database.read_async(lambda c: find_sampler(c, command.sampling_session_id or ""))
            if sampler is None:
                raise FailedRequest("sampling_session_id: the sampling session was closed")
            request = decode_json(SampleRequest, body)
            job = job_for(request, command.request_id, sampler, self._limits, self._base_name)
            answer = await self._client.sample(job)
            return Outcome(answer.body, "proto:sample"), usage_of(answer, sampler)
        except Exception as error:
            return failed(error, command), {}

    async def close(self) -> None:
        await self._client.close()
