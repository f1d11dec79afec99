"""Finds an inference server that hangs, and kills it, so that its supervisor starts it again.

Runs in the launcher, where the process is, and needs neither the engine nor the database. Knows when a server hangs;
does not publish or withdraw it (that is `engine_group`, which sees it refuse connections) and starts nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time

from skyrl.inference.placement import ServerHandle
from skyrl.inference.vllm_client import Probe, Pulse, VllmClient

logger = logging.getLogger(__name__)


class Watchdog:
    """Two questions to one server, each with its own bound in seconds.

    `/health` is answered by vLLM's API server, which never computes for long: `health_timeout_s`. `/is_sleeping` is
    answered by the engine core, between two of its steps, however many requests wait: `step_timeout_s` must be longer
    than its longest step, which is that of a full batch of prompt tokens.

    A server that used to answer and now refuses connections is shutting down. If it has not exited after the timeout,
    it hangs: vLLM waits for its requests in flight, and a request to an engine that has died may wait for ever.
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
        self._answered: int | None = None
        """The last process that has."""

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for probe, within_s in self._bounds.items():
                tasks.create_task(self._watch(probe, within_s))

    async def _watch(self, probe: Probe, within_s: float) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            pid = self._server.pid
            if pid is not None and await self._hangs(pid, probe, within_s) and self._server.kill(pid):
                logger.error("vLLM hangs (no good answer to %s for %.0f s): killed", probe, within_s)

    async def _hangs(self, pid: int, probe: Probe, within_s: float) -> bool:
        """Whether no good answer came for so long. Asked at least twice: when the whole machine was frozen for a while,
        the question of that time is not answered in time, and the next one is."""
        began, asked = time.monotonic(), 0
        while asked < 2 or time.monotonic() - began < within_s:
            pulse = await self._client.pulse(probe, within_s / 2)
            if pulse is Pulse.WELL:
                self._answered = pid
            if pulse is Pulse.WELL or (pulse is Pulse.DEAF and self._answered != pid):
                return False
            asked += 1
            await asyncio.sleep(min(self._interval_s, within_s / 2))
        return True
