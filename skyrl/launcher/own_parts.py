"""The parts that are skyrl's own: the API processes, the engine, the port, the claim to the database, the disk's watch.

Knows how each is started, and which part it needs. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyrl.db.database import Database
from skyrl.inference.vllm_command import NO_PROGRESS_BARS, OFFLINE
from skyrl.launcher.first_ready import FirstReady
from skyrl.launcher.parts import Part
from skyrl.launcher.training_claim import TrainingClaim
from skyrl.processes.runtime import RUNTIME_ENV, SLOT_ENV, SOCKETS_ENV, Runtime
from skyrl.processes.startup import TAIL_LINES, cause_of_own
from skyrl.processes.supervision import SupervisedProcess
from skyrl.storage.space import watch_disk

logger = logging.getLogger(__name__)

API_GRACE_S = 15.0
ENGINE_GRACE_S = 20.0
CLAIM, CLAIM_WATCH, ENGINE, PORT, DISK = "claim", "claim watch", "engine", "port", "disk"
"""Names of parts."""


def claim_parts(database: Database, server: str) -> list[Part]:
    """The claim to train on the database, and what renews it."""
    claim = TrainingClaim(database, server)

    async def release() -> None:
        await asyncio.to_thread(claim.release)

    return [
        Part(CLAIM, start=claim.take, stop=release),
        Part(CLAIM_WATCH, (CLAIM,), supervise=claim.hold, duty="renewing the claim to the database"),
    ]


def disk_part(state_dir: Path) -> Part:
    return Part(DISK, supervise=lambda: watch_disk(state_dir), duty="watching the free space on the disk")


def port_part(sockets: Sequence[socket.socket], needs: tuple[str, ...]) -> Part:
    """The sockets that the API processes accept from. They are closed as soon as no API process is left, so that nobody
    waits for an API that will not come."""

    async def close() -> None:
        for opened in sockets:
            opened.close()

    return Part(PORT, needs, stop=close)


class OwnProcesses:
    """Makes the parts that are processes of skyrl's own."""

    def __init__(self, runtime: Runtime, logs: Path, first_ready: FirstReady, *, offline: bool) -> None:
        self._runtime = runtime
        self._logs = logs
        self._first_ready = first_ready
        self._environment = {
            RUNTIME_ENV: str(runtime.write()),
            "OMP_NUM_THREADS": str(runtime.config.threads),
            "PYTHONDONTWRITEBYTECODE": "",  # torch and transformers take twice as long to import without byte code
            **NO_PROGRESS_BARS,
            **(OFFLINE if offline else {}),
        }

    def engine(self, needs: tuple[str, ...]) -> Part:
        return self._part(ENGINE, "skyrl.engine.main", needs, ENGINE_GRACE_S)

    def api(self, slot: int, sockets: Sequence[socket.socket], needs: tuple[str, ...]) -> Part:
        """The API process of this slot. It inherits the sockets that it accepts from."""
        numbers = [opened.fileno() for opened in sockets]
        own = {SLOT_ENV: str(slot), SOCKETS_ENV: ",".join(map(str, numbers))}
        return self._part(api_name(slot), "skyrl.api.server", needs, API_GRACE_S, own, numbers)

    def _part(
        self,
        name: str,
        module: str,
        needs: tuple[str, ...],
        grace_s: float,
        own: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Part:
        def ended(code: int) -> None:
            self._restore()
            self._first_ready.ended(name, code, cause_of_own(code, process.log_tail(TAIL_LINES)))

        environment = self._environment | dict(own or {})
        log = self._logs / f"{name}.log"
        process = SupervisedProcess(name, _python(module), environment, log, on_exit=ended, pass_fds=pass_fds)
        self._first_ready.watch(name, process)
        return Part(
            name,
            needs,
            supervise=process.run,
            duty=f"supervising {name}",
            stop=lambda: process.stop(grace_s),
            grace_s=grace_s,
        )

    def _restore(self) -> None:
        """Write again what the next start of a process reads, if it is gone."""
        try:
            self._runtime.restore()
        except OSError as error:
            logger.error("what a process needs to start again cannot be written: %s", error)


def api_name(slot: int) -> str:
    return "api" if slot == 0 else f"api-{slot}"


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]
