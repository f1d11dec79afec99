"""Supervised child processes: start, log to a file, restart with backoff, stop with the whole process group.

Knows processes, signals and time. Deliberately does not know what the children do or whether they are healthy. A
killed supervisor leaves no child behind: the kernel kills the child with it (Linux; a child that starts processes of
its own must ask for the same, as `skyrl.vllm_plugin` does for vLLM).

A child that cannot be started (no memory, no process id, no file descriptor, no log) counts as a child that has ended:
the supervisor logs the error, waits and tries again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

from skyrl.processes.backoff import Backoff

logger = logging.getLogger(__name__)

FIRST_DELAY_S, LONGEST_DELAY_S, STABLE_AFTER_S = 0.5, 30.0, 60.0
POLL_S = 0.1
"""Seconds between two looks at a child where the system cannot report its end."""
KILL_AGAIN_S = 1.0
"""A child that was being started while `stop` waited is killed after this long."""

# Runs in the child before the real program, for 20 ms: a preexec_fn would be unsafe in a process with threads. The
# kernel's signal follows the thread that forked. A parent that died before the call is seen by its pid.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
if os.getppid() != int(sys.argv[2]):
    os._exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def dies_with_parent(argv: Sequence[str], death: signal.Signals = signal.SIGKILL) -> tuple[str, ...]:
    """`argv` as a command that gets the signal `death` when this process ends, however it ends (Linux; else `argv`).

    Start it from the main thread: the signal comes when the thread that started it ends.
    """
    if sys.platform != "linux":
        return tuple(argv)
    shim = (sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(int(death)), str(os.getpid()))
    return (*shim, *argv)


class SupervisedProcess:
    """One child in a session of its own. `env` is added to this process's environment; the child inherits `pass_fds`.

    `on_exit(returncode)` is called each time the child ends without having been stopped (negative: a signal). It is
    not called for a start that failed. `starts` counts the attempts.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        *,
        pass_fds: Sequence[int] = (),
        on_exit: Callable[[int], None] | None = None,
        first_delay_s: float = FIRST_DELAY_S,
        stable_after_s: float = STABLE_AFTER_S,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.on_exit = on_exit
        self.starts = 0
        self._argv = tuple(argv)
        self._env = dict(env)
        self._pass_fds = tuple(pass_fds)
        self._backoff = Backoff(first_delay_s, LONGEST_DELAY_S, stable_s=stable_after_s)
        self._child: subprocess.Popen[bytes] | None = None
        self._log_begins = 0
        """Where in the log the output of the newest child begins."""
        self._began = 0.0
        self._started = False
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id (and process group id) of the running child."""
        return self._child.pid if self._child is not None and self._child.returncode is None else None

    @property
    def running_s(self) -> float | None:
        """Seconds since the running child was started; None while there is none."""
        return None if self.pid is None else time.monotonic() - self._began

    async def run(self) -> None:
        """Keep the child running until `stop`. When cancelled, kill it and its group at once."""
        self._started = True
        try:
            while not self._stopping.is_set():
                self._began = time.monotonic()
                ended = await self._run_once()
                if self._stopping.is_set():
                    return
                self._backoff.ran(time.monotonic() - self._began)
                delay = self._backoff.pause()
                logger.warning("%s %s; again in %.1f s (%s)", self.name, ended, delay, self.log_path)
                if await _set_within(self._stopping, delay):
                    return
        finally:
            self._ended.set()

    async def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM to the child, after `grace_s` seconds SIGKILL to its group. Returns when `run` is over.

        A child that has ended by itself, and is just being reaped, is no error.
        """
        self._stopping.set()
        if not self._started:
            return
        self._terminate()
        while not await _set_within(self._ended, grace_s):
            if self.pid is not None:
                logger.warning("%s did not end within %.0f s of SIGTERM: killed", self.name, grace_s)
                _kill_group(self.pid)
            grace_s = KILL_AGAIN_S

    def give_up(self) -> None:
        """Do not start the child again. A child that runs goes on, and `stop` must still be called."""
        self._stopping.set()

    def kill(self, pid: int) -> bool:
        """Send SIGKILL to the child's group if the child still is the process `pid`; says whether it is. `run` then
        starts it again. SIGKILL also ends a child that was stopped with SIGSTOP, which takes no other signal.
        """
        if self.pid != pid:
            return False
        _kill_group(pid)
        return True

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that the newest child wrote. Empty when it wrote none, or when the log cannot be read because
        it is gone or no file descriptor is free."""
        with suppress(OSError), self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            begins = self._log_begins if self._log_begins <= size else 0  # somebody has shortened the log
            log.seek(max(begins, size - 200 * lines))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        return ""

    async def _run_once(self) -> str:
        """Run one child from start to end. Returns how it ended, for people."""
        try:
            child = self._start()
        except OSError as error:
            return f"could not be started: {error}"
        self._child = child
        try:
            if self._stopping.is_set():
                self._terminate()
            code = await _reaped(child)
        finally:
            _kill_group(child.pid)
            await _reaped(child)
            await _group_gone(child.pid)
        if self.on_exit is not None and not self._stopping.is_set():
            self.on_exit(code)
        return f"ended with {code}"

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a child. Raises OSError when it could not be started."""
        self.starts += 1
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab", buffering=0) as log:
            self._log_begins = self._divide(log)
            return subprocess.Popen(
                dies_with_parent(self._argv),
                env=os.environ | self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=self._pass_fds,
            )

    def _divide(self, log: FileIO) -> int:
        """Write the line that divides this start from the one before; return where the child's output begins."""
        line = f"===== {self.name}: start {self.starts}, {time.strftime('%Y-%m-%d %H:%M:%S')} =====\n"
        with suppress(OSError):  # a full disk is no reason not to start
            log.write(line.encode())
        return log.seek(0, os.SEEK_END)

    def _terminate(self) -> None:
        """Send SIGTERM to the child, if there is one. A child that has ended is not reaped before the event loop runs
        again, so no other process has its id yet."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGTERM)


async def _reaped(child: subprocess.Popen[bytes]) -> int:
    """The child's exit code, once it has ended. Needs no thread, unlike asyncio's own subprocesses: where no thread can
    be started, they leave a child running without an owner."""
    if (code := child.poll()) is not None:
        return code
    try:
        descriptor = os.pidfd_open(child.pid)
    except (AttributeError, OSError):  # not Linux, or no file descriptor is free
        while (code := child.poll()) is None:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(POLL_S)
        return code
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return child.wait()


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


async def _group_gone(group: int, within_s: float = 2.0) -> None:
    """Wait until the killed grandchildren are gone, at most `within_s` seconds: an init process that never reaps keeps
    zombies in the group."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.01)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
