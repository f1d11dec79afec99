"""Colocated sampling: SAMPLE commands in the engine's own loop, all that wait at once, between turns of training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from skyrl.backends.base import ModelLimits
from skyrl.db.database import Database
from skyrl.db.futures import Outcome
from skyrl.db.samplers import find_sampler
from skyrl.engine.commands import Command
from skyrl.engine.passes import failed
from skyrl.inference.engine_group import EngineGroup
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.job import Limits
from skyrl.sampling.service import job_for
from skyrl.wire.errors import FailedRequest
from skyrl.wire.requests import SampleRequest, decode_json

logger = logging.getLogger(__name__)


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

    async def run(self, commands: Sequence[Command], bodies: dict[str, bytes]) -> list[tuple[str, Outcome]]:
        """One outcome per command whose body is there. Wakes vLLM, samples, puts it to sleep."""
        here = [command for command in commands if command.request_id in bodies]
        if self._sleeps:
            await self._group.wake()
        try:
            outcomes = await asyncio.gather(*(self._sample(c, bodies[c.request_id]) for c in here))
        finally:
            if self._sleeps:
                await self._group.sleep()
        return [(command.request_id, outcome) for command, outcome in zip(here, outcomes, strict=True)]

    async def _sample(self, command: Command, body: bytes) -> Outcome:
        try:
            sampler = await self._database.read_async(lambda c: find_sampler(c, command.sampling_session_id or ""))
            if sampler is None:
                raise FailedRequest("sampling_session_id: the sampling session was closed")
            request = decode_json(SampleRequest, body)
            job = job_for(request, command.request_id, sampler, self._limits, self._base_name)
            return Outcome(await self._client.sample(job), "proto:sample")
        except Exception as error:
            return failed(error, command)

    async def close(self) -> None:
        await self._client.close()
