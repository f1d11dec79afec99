"""A Ray actor that runs one inference server on its node, and the sidecar of each start of it: starts them, tells how
the server does, and ends them.

A sidecar that ends is started again; with the server it is ended. When it ends soon after each start, the server is
ended too: the server's next start gives it another port. Otherwise the actor decides nothing: the placement process
starts a server again, or elsewhere. The kernel ends the server when the actor ends. The actor ends by itself when
nobody has asked it for UNASKED_S: a node that was cut off from the cluster must not run a server for ever that another
node has replaced.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from skyrl.base.config.server import ConfigError
from skyrl.runtime.processes.ports import HeldPort, check_free
from skyrl.runtime.processes.supervision import kill_group, start_child

UNASKED_S = 60.0
LOG_BYTES, SIDECAR_LOG_BYTES = 64 * 1024, 16 * 1024
"""The most bytes of a log in one answer: more would not travel inside the answer, but through Ray's object store."""
LOG_FILE_BYTES = 16 * 2**20
"""A longer log is emptied on the node once it was read."""
DIRECTORY_PREFIX = "skyrl-host-"
LEFT_S = 60.0
"""A directory without a lock is somebody's left-over only when it is older: its maker may be about to lock it."""
REAPED_S = 2.0
SIDECAR_AGAIN_S = 2.0
"""How often a sidecar is started that ends."""
SIDECAR_STABLE_S = 30.0
SIDECAR_TROUBLE_ENDS, SIDECAR_ENDS = 2, 5
"""After so many ends in a row, each earlier than SIDECAR_STABLE_S after the start, the sidecar is in trouble, and the
server is ended."""
LAST_LINE_BYTES = 300


class Command(Protocol):
    """What `Kind.spec` makes."""

    @property
    def argv(self) -> tuple[str, ...]: ...

    @property
    def env(self) -> Mapping[str, str]: ...

    @property
    def url(self) -> str: ...

    @property
    def sidecar(self) -> Command | None:
        """What runs beside it."""
        ...


class Program(Protocol):
    """What the actor runs: makes the command for its node. Must be possible to pickle."""

    def check(self) -> None:
        """Raises ConfigError when this node cannot run it."""
        ...

    def command(self, host: str, port: int, sidecar_port: int, directory: Path) -> Command: ...


@dataclass(frozen=True)
class Started:
    """The answer to `start`. `trouble` says why this node cannot run the server; then there is no `url`. Only a server
    with a sidecar has a `sidecar_url`."""

    url: str | None
    incarnation: str
    trouble: str = ""
    sidecar_url: str | None = None


@dataclass(frozen=True)
class Look:
    """The answer to `look`: the exit code of the server, None while it runs; what its log had after `offset`, and its
    sidecar's after `sidecar_offset`. The next call gives `next_offset` and `next_sidecar_offset`. `sidecar_trouble`
    says why the sidecar does not stay alive, empty if it does."""

    code: int | None
    log: bytes
    next_offset: int
    sidecar_log: bytes = b""
    next_sidecar_offset: int = 0
    sidecar_trouble: str = ""


class ServerHost:
    """The actor. All calls run on its main thread, one after another: the kernel kills the server when the thread that
    has started it ends."""

    def __init__(self, name: str, program: Program, port: int | None) -> None:
        self._name = name
        self._program = program
        self._fixed_port = port
        self._port: HeldPort | None = None
        self._sidecar_port: HeldPort | None = None
        self._bad_port: int | None = None
        """Where the last sidecar was unable to stay alive."""
        self._starts = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._sidecar_command: Command | None = None
        self._sidecar: subprocess.Popen[bytes] | None = None
        self._sidecar_started = 0.0
        self._sidecar_ends = 0
        """How often in a row it has ended soon after its start."""
        self._sidecar_trouble = ""
        self._directory, self._lock = _private_directory()
        self._log, self._sidecar_log = (self._directory / f"{name}.log", self._directory / f"{name}-sidecar.log")
        for log in (self._log, self._sidecar_log):
            log.touch(0o600)
        self._asked_at = time.monotonic()
        threading.Thread(target=self._end_if_unasked, daemon=True).start()

    def node(self) -> tuple[str, str]:
        """The id and the address of the actor's node."""
        import ray

        self._asked_at = time.monotonic()
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def start(self) -> Started:
        """Start the server. The one before must have ended."""
        self._asked_at = time.monotonic()
        assert self._child is None
        self._starts += 1
        _, host = self.node()
        try:
            self._program.check()
            port = self._server_port(host)
            self._sidecar_port = _usable(self._sidecar_port, host, self._bad_port)
            command = self._program.command(host, port, self._sidecar_port.number, self._directory)
            self._child = self._run(command, self._log)
        except (ConfigError, OSError) as error:
            return Started(None, "", f"on node {host}: {error}")
        self._sidecar_command, self._sidecar_trouble, self._sidecar_ends = command.sidecar, "", 0
        self._start_sidecar()
        sidecar_url = None if command.sidecar is None else command.sidecar.url
        incarnation = f"{host}, start {self._starts}, process {self._child.pid}"
        return Started(command.url, incarnation, sidecar_url=sidecar_url)

    def _run(self, command: Command, log: Path) -> subprocess.Popen[bytes]:
        """Raises OSError."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with log.open("ab", buffering=0) as output:
            return start_child(command.argv, env | dict(command.env), output)

    def _see_to_sidecar(self) -> None:
        """Start the sidecar if it does not run. It takes a second to start, so not more often."""
        if self._sidecar_command is None:
            return
        age_s = time.monotonic() - self._sidecar_started
        if self._sidecar is not None:
            code = self._sidecar.poll()
            if code is not None:
                self._sidecar = None
                self._sidecar_ended(code, age_s)
            elif age_s >= SIDECAR_STABLE_S:
                self._sidecar_ends, self._sidecar_trouble, self._bad_port = 0, "", None
        if self._sidecar is None and self._sidecar_command is not None and age_s >= SIDECAR_AGAIN_S:
            self._start_sidecar()

    def _start_sidecar(self) -> None:
        if self._sidecar_command is None:
            return
        self._sidecar_started = time.monotonic()
        try:
            self._sidecar = self._run(self._sidecar_command, self._sidecar_log)
        except OSError as error:
            with self._sidecar_log.open("a") as log:
                log.write(f"the sidecar cannot be started: {error}\n")
            self._sidecar_ended(None, 0.0)

    def _sidecar_ended(self, code: int | None, age_s: float) -> None:
        if age_s >= SIDECAR_STABLE_S:
            self._sidecar_ends, self._sidecar_trouble = 0, ""
        self._sidecar_ends += 1
        if self._sidecar_ends >= SIDECAR_TROUBLE_ENDS:
            why = _last_line(self._sidecar_log) or f"exit code {code}"
            self._sidecar_trouble = f"it has ended {self._sidecar_ends} times in a row, the last time with: {why}"
        if self._sidecar_ends >= SIDECAR_ENDS:
            self._sidecar_command = None
            if self._sidecar_port is not None:
                self._bad_port = self._sidecar_port.number
                self._sidecar_port.close()
                self._sidecar_port = None
            self.kill()

    def _end_sidecar(self) -> None:
        sidecar, self._sidecar, self._sidecar_command = self._sidecar, None, None
        if sidecar is not None:
            kill_group(sidecar.pid)
            sidecar.wait()
            _wait_for_group(sidecar.pid)

    def look(self, offset: int, sidecar_offset: int = 0) -> Look:
        """How the server does. After its end, the rest of its log comes before its exit code."""
        self._asked_at = time.monotonic()
        code = self._reaped()
        if code is None:
            self._see_to_sidecar()
        text, next_offset = _read(self._log, offset, LOG_BYTES)
        if len(text) == LOG_BYTES:
            code = None
        of_sidecar = _read(self._sidecar_log, sidecar_offset, SIDECAR_LOG_BYTES)
        return Look(code, text, next_offset, *of_sidecar, self._sidecar_trouble)

    def ended(self) -> None:
        """The caller knows that the server has ended; `start` may follow."""
        self._asked_at = time.monotonic()
        self._child = None

    def kill(self) -> None:
        """Kill the server and all its processes."""
        self._asked_at = time.monotonic()
        if self._child is not None:
            kill_group(self._child.pid)

    def stop(self, grace_s: float) -> None:
        """End the server: SIGTERM, and SIGKILL after `grace_s`. Removes what it has left on the node."""
        self._asked_at = time.monotonic() + grace_s
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(grace_s)
        if self._child is not None:
            kill_group(self._child.pid)
            self._child.wait()
            _wait_for_group(self._child.pid)
        self._end_sidecar()
        for port in (self._port, self._sidecar_port):
            if port is not None:
                port.close()
        self._port = self._sidecar_port = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def _reaped(self) -> int | None:
        """The exit code of a server that has ended, with all its processes."""
        if self._child is None or (code := self._child.poll()) is None:
            return None
        kill_group(self._child.pid)
        _wait_for_group(self._child.pid)
        self._end_sidecar()
        return code

    def _server_port(self, host: str) -> int:
        """Raises OSError if the fixed port is not free."""
        if self._fixed_port is not None:
            check_free(self._fixed_port, host)
            return self._fixed_port
        self._port = _usable(self._port, host)
        return self._port.number

    def _end_if_unasked(self) -> None:
        while time.monotonic() - self._asked_at < UNASKED_S:
            time.sleep(1.0)
        for process in (self._child, self._sidecar):
            if process is not None:
                kill_group(process.pid)
        os._exit(1)


def _read(log: Path, offset: int, most: int) -> tuple[bytes, int]:
    """At most so many bytes after `offset`, and the next offset."""
    with log.open("rb") as file:
        file.seek(offset)
        text = file.read(most)
    if len(text) < most and offset + len(text) > LOG_FILE_BYTES:
        os.truncate(log, 0)
        return text, 0
    return text, offset + len(text)


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8 * LAST_LINE_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:LAST_LINE_BYTES] for line in reversed(lines) if line.strip()), "")


def _usable(held: HeldPort | None, host: str, bad: int | None = None) -> HeldPort:
    """The port of the start before if a server can listen there, else another one than `bad`. Raises OSError."""
    if held is not None:
        with suppress(OSError):
            check_free(held.number, host)
            return held
        held.close()
    return HeldPort.any(host, () if bad is None else {bad})


def _private_directory() -> tuple[Path, int]:
    """A new directory for the server's sockets, temporary files and log, and the descriptor that locks it. Removes the
    directories that killed actors of this user have left."""
    root = Path(tempfile.gettempdir())
    for left in root.glob(f"{DIRECTORY_PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                seen = left.stat()
                if seen.st_uid == os.geteuid() and time.time() - seen.st_mtime > LEFT_S:
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)
    directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return directory, descriptor


def _wait_for_group(group: int) -> None:
    deadline = time.monotonic() + REAPED_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
