"""Where inference servers run: a `Placement` finds a spot for a server, makes its command for that spot, and starts it.

Knows processes on this machine; `skyrl.cli.ray_placement` knows those of a Ray cluster. `engine_kinds` makes the
commands. `engine_group` knows whether a server is healthy: a started server may still be loading its model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from skyrl.runtime.processes.ports import LOOPBACK, HeldPort
from skyrl.runtime.processes.supervision import SupervisedProcess

DEVICES_ENV = "CUDA_VISIBLE_DEVICES"
OnExit = Callable[[int], None]


@dataclass(frozen=True)
class ServerSpec:
    """A server as a command. `env` is added to the environment; `log_name` is a bare file name. `sidecar` is a process
    that runs beside it on another machine; on this one the launcher starts sidecars."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int
    log_name: str
    sidecar: ServerSpec | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class Spot:
    """Where one start of a server runs: it listens at `host`, an address of its machine, and at `port`. `directory` is
    for its sockets and temporary files. `cuda`: it may use GPUs. `sidecar_port` is for a sidecar at the same address,
    if the server's kind has one; None: the caller starts none."""

    host: str
    port: int
    directory: Path | None
    cuda: bool
    sidecar_port: int | None = None


class Kind(Protocol):
    """The part of `skyrl.inference.engine_kinds.Vllm` by which a server is started."""

    def bundle(self, *, cuda: bool) -> dict[str, float]: ...

    def check(self, *, cuda: bool) -> None: ...

    def spec(self, name: str, spot: Spot) -> ServerSpec: ...


@dataclass(frozen=True)
class ServerPlan:
    """A server for which a spot is still to be found. `port` and `devices` (CUDA devices of this machine, by number or
    name) are given where the operator or the launcher has chosen them; None, or none, leave the choice to the
    placement."""

    name: str
    kind: Kind
    cuda: bool
    port: int | None = None
    devices: tuple[str, ...] = ()


class ServerHandle(Protocol):
    """A started server, which is started again whenever it ends."""

    @property
    def url(self) -> str | None:
        """None while it is not known where the server will run. Another start may have another URL."""
        ...

    async def until_moved(self, url: str | None) -> None:
        """Wait until the server's URL is not `url`."""
        ...

    @property
    def incarnation(self) -> str | None:
        """The name of the start that runs now; None while the server does not run. Each start has another name."""
        ...

    @property
    def running_s(self) -> float | None:
        """Seconds since the running server was started; None while the server does not run."""
        ...

    def log_tail(self, lines: int = 20) -> str:
        """The last log lines of the newest start."""
        ...

    def restart(self, incarnation: str) -> bool:
        """Kill the server if `incarnation` still runs, so that the server is started again. Returns whether it was
        killed."""
        ...

    def give_up(self) -> None:
        """Do not start the server again when it ends."""
        ...

    async def supervised(self) -> None:
        """Return, or raise, when the server would not be started again any more."""
        ...

    async def stop(self, grace_s: float = 10.0) -> None:
        """End the server; kill it after `grace_s` seconds. Returns when none of its processes runs any more."""
        ...


class Placement(Protocol):
    """Starts servers, on this machine or elsewhere."""

    async def start(self, plan: ServerPlan, on_exit: OnExit | None = None) -> ServerHandle:
        """Start a server, at once or as soon as there is a spot for it. `on_exit(returncode)` is called after each end
        of the server that was not requested. Raises ConfigError when the server can never be started."""
        ...


class LocalServer(SupervisedProcess):
    """A server that runs as a supervised child process. `held` is its port, if nobody else holds it."""

    def __init__(
        self, spec: ServerSpec, env: Mapping[str, str], log: Path, on_exit: OnExit | None, held: HeldPort | None
    ) -> None:
        super().__init__(log.stem, spec.argv, env, log, on_exit=on_exit)
        self.url = spec.url
        self._held = held
        self._supervision = asyncio.create_task(self.run(), name=f"supervise {self.name}")

    async def until_moved(self, url: str | None) -> None:
        if self.url == url:
            await asyncio.Event().wait()

    async def supervised(self) -> None:
        await asyncio.shield(self._supervision)

    async def stop(self, grace_s: float = 10.0) -> None:
        await super().stop(grace_s)
        await self._supervision
        if self._held is not None:
            self._held.close()


class LocalPlacement:
    """Starts child processes; their output is appended to `log_dir / spec.log_name`. `directory` is for the sockets and
    temporary files of all servers."""

    def __init__(self, log_dir: Path, directory: Path | None = None) -> None:
        self._log_dir = log_dir
        self._directory = directory

    async def start(self, plan: ServerPlan, on_exit: OnExit | None = None) -> LocalServer:
        """As `Placement.start`. Without `devices` the server may use all devices. A port that the plan gives is held
        by whoever has chosen it."""
        held = HeldPort.any() if plan.port is None else None
        port = plan.port if held is None else held.number
        assert port is not None
        spot = Spot(LOOPBACK, port, self._directory, plan.cuda)
        try:
            spec = await asyncio.to_thread(plan.kind.spec, plan.name, spot)
        except BaseException:
            if held is not None:
                held.close()
            raise
        return self.run(spec, plan.devices, on_exit, held)

    def run(
        self,
        spec: ServerSpec,
        devices: Sequence[str] = (),
        on_exit: OnExit | None = None,
        held: HeldPort | None = None,
    ) -> LocalServer:
        """Start a server whose command is known. The server's end gives `held` back."""
        env = {**spec.env, DEVICES_ENV: ",".join(devices)} if devices else spec.env
        return LocalServer(spec, env, self._log_dir / spec.log_name, on_exit, held)
