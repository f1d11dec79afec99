"""Where inference servers run: what a server is (`ServerSpec`), and a `Placement` that starts and stops one.

Knows processes on this machine. Deliberately knows nothing of vLLM's options (that is `vllm_command`) nor whether
a server is healthy (that is `engine_group`): a started server may still be loading its model.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from skyrl.processes.supervision import SupervisedProcess

FIRST_PORT, PORTS = 12_000, 20_000
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
    def pid(self) -> int | None: ...

    @property
    def restarts(self) -> int: ...

    @property
    def running_s(self) -> float | None:
        """Seconds since the running process was started; None while there is none."""
        ...

    def log_tail(self, lines: int = 20) -> str: ...

    def kill(self, pid: int) -> bool:
        """End the server at once if it is still the process `pid`; says whether it was."""
        ...

    def give_up(self) -> None:
        """Do not start the server again when it ends."""
        ...

    async def supervised(self) -> None:
        """Return, or raise, when nobody would start the server again any more."""
        ...


class Placement(Protocol):
    """Starts servers somewhere. `on_exit(returncode)` hears of each end of the server that nobody asked for. `stop`
    returns once nothing of the server is left running."""

    async def start(self, spec: ServerSpec, on_exit: OnExit | None = None) -> ServerHandle: ...

    async def stop(self, handle: ServerHandle, grace_s: float = 10.0) -> None: ...


class LocalServer:
    """A server that runs as a supervised process of this one."""

    def __init__(self, spec: ServerSpec, process: SupervisedProcess) -> None:
        self.spec = spec
        self.process = process
        self.supervision = asyncio.create_task(process.run(), name=f"supervise {process.name}")

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def restarts(self) -> int:
        return self.process.restarts

    @property
    def running_s(self) -> float | None:
        return self.process.running_s

    def log_tail(self, lines: int = 20) -> str:
        return self.process.log_tail(lines)

    def kill(self, pid: int) -> bool:
        return self.process.kill(pid)

    def give_up(self) -> None:
        self.process.give_up()

    async def supervised(self) -> None:
        await asyncio.shield(self.supervision)


class LocalPlacement:
    """Plain subprocesses on this machine; output is appended to `log_dir / spec.log_name`."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir

    async def start(self, spec: ServerSpec, on_exit: OnExit | None = None) -> LocalServer:
        name, log = spec.log_name.removesuffix(".log"), self._log_dir / spec.log_name
        return LocalServer(spec, SupervisedProcess(name, spec.argv, spec.env, log, on_exit=on_exit))

    async def stop(self, handle: ServerHandle, grace_s: float = 10.0) -> None:
        assert isinstance(handle, LocalServer)
        await handle.process.stop(grace_s)
        await handle.supervision


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now; another server may still take it before it is used.

    It is none of those that systems give to outgoing connections (32768 and up on Linux): one of them, of whatever
    process, would take it while the server starts, or between its end and its restart. Raises OSError.
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
