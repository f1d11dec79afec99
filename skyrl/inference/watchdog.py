"""Finds an inference server that hangs, and kills it, so that its supervisor starts it again.

Runs in the launcher, which supervises the server, and needs neither the engine nor the database. Publishes and
withdraws no URL: `engine_group` does, when the server refuses connections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from skyrl.inference.vllm_client import Probe, ProbeResult, VllmClient

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """A server that is started again when it ends. `ServerHandle` has the meaning of both."""

    @property
    def incarnation(self) -> str | None: ...

    def restart(self, incarnation: str) -> bool: ...


class Watchdog:
    """Sends one server probes, each with its own timeout: `timeouts` has the seconds by path.

    vLLM's API server answers `/health`; it never computes for long. The engine core answers `/is_sleeping` between two
    of its steps, however many requests wait: its timeout must be longer than the longest step, which computes a full
    batch of prompt tokens. The router answers `/statusz`, also without any worker.

    A server that used to answer and now refuses connections is shutting down. If it has not exited after the timeout,
    treat it as hung: vLLM waits for its requests in flight, and a request to an engine that has died may wait for ever.
    """

    def __init__(
        self,
        client: VllmClient,
        server: Watched,
        timeouts: Mapping[Probe, float],
        *,
        interval_s: float,
        name: str = "vLLM",
        on_answer: Callable[[], None] = lambda: None,
        on_kill: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._server = server
        self._interval_s = interval_s
        self._timeouts = dict(timeouts)
        self._name = name
        self._on_answer = on_answer
        self._on_kill = on_kill
        self._answered: str | None = None
        """The last incarnation that has answered."""

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for probe, within_s in self._timeouts.items():
                tasks.create_task(self._watch(probe, within_s))

    async def _watch(self, probe: Probe, within_s: float) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            started = self._server.incarnation
            if started is None or not await self._hangs(started, probe, within_s):
                continue
            if self._server.restart(started):
                self._on_kill()
                logger.error("%s hangs (no good answer to %s for %.0f s): killed", self._name, probe, within_s)

    async def _hangs(self, incarnation: str, probe: Probe, within_s: float) -> bool:
        """Whether the server gave no good answer within `within_s` seconds. It is probed at least twice: after the
        whole machine was frozen for a while, the probe of that time fails, and the next probe succeeds."""
        began, asked = time.monotonic(), 0
        while asked < 2 or time.monotonic() - began < within_s:
            result = await self._client.probe(probe, within_s / 2)
            if result is ProbeResult.ANSWERED:
                self._answered = incarnation
                self._on_answer()
            if result is ProbeResult.ANSWERED or (result is ProbeResult.REFUSED and self._answered != incarnation):
                return False
            asked += 1
            await asyncio.sleep(min(self._interval_s, within_s / 2))
        return True
