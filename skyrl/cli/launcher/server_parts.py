"""The parts of one inference server: the server itself, and a watchdog that kills it when it hangs.

Asks the server's kind how it is probed and why it has ended. Does not know where the server runs: a `Placement` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from skyrl.cli.launcher.first_ready import StartObserver
from skyrl.cli.launcher.metrics import RestartMetrics
from skyrl.cli.launcher.parts import Part
from skyrl.inference.engine_kinds import EngineKind
from skyrl.inference.placement import Placement, ServerHandle, ServerPlan
from skyrl.inference.vllm_client import VllmClient
from skyrl.inference.watchdog import Watchdog
from skyrl.runtime.processes.startup import TAIL_LINES

logger = logging.getLogger(__name__)

INFERENCE_GRACE_S = 5.0


async def wherever(server: ServerHandle, work: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    """Run `work` with the server's URL until cancelled, and anew with each URL that the server moves to. Raises what
    `work` raises."""
    while True:
        url = server.url
        tasks = [asyncio.create_task(server.until_moved(url))]
        if url is not None:
            tasks.append(asyncio.create_task(work(url)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class ServerParts:
    """`shown` is the server's name in log lines; by default that of the plan."""

    def __init__(
        self,
        plan: ServerPlan,
        kind: EngineKind,
        placement: Placement,
        observer: StartObserver,
        restarts: RestartMetrics,
        *,
        probe_interval_s: float,
        shown: str = "",
    ) -> None:
        self.name = plan.name
        self.watch_name = f"{plan.name} watch"
        self.has_answered = False
        """Whether the server has answered a probe since this process began."""
        self._plan = plan
        self._kind = kind
        self._placement = placement
        self._observer = observer
        self._restarts = restarts
        self._probe_interval_s = probe_interval_s
        self._shown = shown or plan.name
        self._killed = False
        """The watchdog has killed the running server."""
        self._server: ServerHandle | None = None

    def parts(self, needs: tuple[str, ...]) -> list[Part]:
        return [
            Part(
                self.name,
                needs,
                start=self._start,
                supervise=lambda: self.server.supervised(),
                duty=f"supervising {self.name}",
                stop=lambda: self.server.stop(INFERENCE_GRACE_S),
                grace_s=INFERENCE_GRACE_S,
            ),
            Part(self.watch_name, (self.name,), supervise=self._watch, duty=f"watching whether {self.name} hangs"),
        ]

    @property
    def server(self) -> ServerHandle:
        """The server, once its part was started."""
        assert self._server is not None
        return self._server

    async def _start(self) -> None:
        self._server = await self._placement.start(self._plan, self._ended)
        self._observer.watch(self.name, self._server)

    def _ended(self, code: int) -> None:
        cause = self._kind.cause(code, self.server.log_tail(TAIL_LINES))
        if cause is not None:
            logger.warning("%s (%s): %s", self.name, self.server.url, cause.sentence)
        self._restarts.ended(
            "vllm", "hung" if self._killed else "config" if cause is not None and cause.final else "died"
        )
        self._killed = False
        self._observer.ended(self.name, code, cause)

    async def _watch(self) -> None:
        await wherever(self.server, self._watch_at)

    async def _watch_at(self, url: str) -> None:
        client = VllmClient(url, self._kind.key)
        watchdog = Watchdog(
            client,
            self.server,
            self._kind.probes,
            interval_s=self._probe_interval_s,
            name=self._shown,
            on_answer=self._note_answer,
            on_kill=self._note_kill,
        )
        try:
            await watchdog.run()
        finally:
            await client.close()

    def _note_answer(self) -> None:
        self.has_answered = True

    def _note_kill(self) -> None:
        self._killed = True
