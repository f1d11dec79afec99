"""Finds an inference server that hangs, and ends it, so that its supervisor starts it again.

Runs in the launcher, which supervises the server, and needs neither the engine nor the database. Knows when a server
hangs. Does not publish or withdraw it (that is `engine_group`, which sees that it refuses connections), and starts
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time

from skyrl.inference.placement import ServerHandle
from skyrl.inference.vllm_client import Probe, Pulse, VllmClient

logger = logging.getLogger(__name__)


class Watchdog:
    """Asks one server two questions, each with its own bound in seconds.

    vLLM's API server answers `/health`; it never computes for long: `health_timeout_s`. The engine core answers
    `/is_sleeping` between two of its steps, however many requests wait: `step_timeout_s` must be longer than its
    longest step, which is that of a full batch of prompt tokens.

    A server that used to answer and now refuses connections is shutting down. If it has not exited after the timeout,
    treat it as hung: vLLM waits for its requests in flight, and a request to an engine that has died may wait for ever.
    """

    def __init__(
        self,
        client: VllmClient,
        server: ServerHandle,
        *,
        interval_s: float,
        health_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        self._client = client
        self._server = server
        self._interval_s = interval_s
        self._bounds: dict[Probe, float] = {"/health": health_timeout_s, "/is_sleeping": step_timeout_s}
        self._answered: str | None = None
        """The last incarnation that has answered well."""

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for probe, within_s in self._bounds.items():
                tasks.create_task(self._watch(probe, within_s))

    async def _watch(self, probe: Probe, within_s: float) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            started = self._server.incarnation
            if started is None or not await self._hangs(started, probe, within_s):
                continue
            if self._server.restart(started):
                logger.error("vLLM hangs (no good answer to %s for %.0f s): killed", probe, within_s)

    async def _hangs(self, incarnation: str, probe: Probe, within_s: float) -> bool:
        """Whether no good answer came within `within_s` seconds. The server is asked at least twice: when the whole
        machine was frozen for a while, the question of that time is answered too late, and the next one in time."""
        began, asked = time.monotonic(), 0
        while asked < 2 or time.monotonic() - began < within_s:
            pulse = await self._client.pulse(probe, within_s / 2)
            if pulse is Pulse.WELL:
                self._answered = incarnation
            if pulse is Pulse.WELL or (pulse is Pulse.DEAF and self._answered != incarnation):
                return False
            asked += 1
            await asyncio.sleep(min(self._interval_s, within_s / 2))
        return True
