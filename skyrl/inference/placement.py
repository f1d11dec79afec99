"""Where inference servers run: what a server is (`ServerSpec`), and a `Placement` that starts and stops servers.

Knows processes on this machine. Deliberately knows nothing of vLLM's options (that is `vllm_command`) nor whether
a server is healthy (that is `engine_group`): a started server may still be loading its model.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from skyrl.processes.supervision import SupervisedProcess

FIRST_PORT, PORTS = 12_000, 20_000
DEVICES_ENV = "CUDA_VISIBLE_DEVICES"
OnExit = Callable[[int], None]


@dataclass(frozen=True)
class ServerSpec:
    """A server as a command. `env` is added to the environment; `log_name` is a bare file name."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int
    log_name: str

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class ServerHandle(Protocol):
    """A server that has been started, and is started again whenever it ends."""

    @property
    def url(self) -> str: ...

    @property
    def incarnation(self) -> str | None:
        """Which start of the server runs now; None while none does. Names are never used again."""
        ...

    @property
    def running_s(self) -> float | None:
        """Seconds since the running server was started; None while none runs."""
        ...

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that the newest start has written."""
        ...

    def restart(self, incarnation: str) -> bool:
        """End the server at once if it still is that start, so that it is started again; says whether it was."""
        ...

    def give_up(self) -> None:
        """Do not start the server again when it ends."""
        ...

    async def supervised(self) -> None:
        """Return, or raise, when nobody would start the server again any more."""
        ...

    async def stop(self, grace_s: float = 10.0) -> None:
        """End the server, at once after `grace_s` seconds. Returns when nothing of it is left running."""
        ...


class Placement(Protocol):
    """Starts servers somewhere."""

    async def start(self, spec: ServerSpec, devices: Sequence[str], on_exit: OnExit | None = None) -> ServerHandle:
        """Start a server that may use these CUDA devices, by number or name; all of the machine's if none is named.
        `on_exit(returncode)` is called after each end of the server that nobody asked for."""
        ...


class LocalServer:
    """A server that runs as a supervised process of this one."""

    def __init__(self, spec: ServerSpec, process: SupervisedProcess) -> None:
        self.url = spec.url
        self._process = process
        self._supervision = asyncio.create_task(process.run(), name=f"supervise {process.name}")

    @property
    def incarnation(self) -> str | None:
        pid = self._process.pid
        return None if pid is None else f"start {self._process.starts}, process {pid}"

    @property
    def running_s(self) -> float | None:
        return self._process.running_s

    def log_tail(self, lines: int = 20) -> str:
        return self._process.log_tail(lines)

    def restart(self, incarnation: str) -> bool:
        pid = self._process.pid
        return pid is not None and self.incarnation == incarnation and self._process.kill(pid)

    def give_up(self) -> None:
        self._process.give_up()

    async def supervised(self) -> None:
        await asyncio.shield(self._supervision)

    async def stop(self, grace_s: float = 10.0) -> None:
        await self._process.stop(grace_s)
        await self._supervision


class LocalPlacement:
    """Plain subprocesses on this machine; output is appended to `log_dir / spec.log_name`."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir

    async def start(self, spec: ServerSpec, devices: Sequence[str], on_exit: OnExit | None = None) -> LocalServer:
        name, log = spec.log_name.removesuffix(".log"), self._log_dir / spec.log_name
        env = {**spec.env, DEVICES_ENV: ",".join(devices)} if devices else spec.env
        return LocalServer(spec, SupervisedProcess(name, spec.argv, env, log, on_exit=on_exit))


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now; another server may still take it before it is used.

    It is none of those that systems give to outgoing connections (32768 and up on Linux): any process's connection
    could take such a port while the server starts, or between its end and its restart. Raises OSError.
    """
    while True:
        port = FIRST_PORT + secrets.randbelow(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port
