"""Supervised child processes: they log to a file, start again with backoff, and are stopped with their process group.

Does not know whether a child works; the watchdog of vLLM kills a child that hangs.

On Linux the kernel kills the child when the supervisor dies. It does not kill processes that the child has started:
the child must ask for that itself, as `skyrl.inference.vllm_plugin` does for vLLM.

If a child cannot be started (no memory, no process id, no file descriptor, no log), the supervisor logs the error,
waits and tries again, as it does after a child has ended.
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

from skyrl.runtime.processes.backoff import Backoff

logger = logging.getLogger(__name__)

FIRST_DELAY_S, LONGEST_DELAY_S, STABLE_AFTER_S = 0.5, 30.0, 60.0
POLL_S = 0.1
"""How often it is checked whether a child has ended, where the system cannot report that."""
KILL_AGAIN_S = 1.0
"""After a first SIGKILL, `stop` kills again this often: a child may have been started in between."""

# Runs in the child for 20 ms and then becomes the real program. A preexec_fn would be unsafe in a process with threads.
# The kernel sends the signal when the thread that forked ends. If the parent died before prctl was called, the child
# has another parent by then and exits.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
if os.getppid() != int(sys.argv[2]):
    os._exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def dies_with_parent(argv: Sequence[str], death_signal: signal.Signals = signal.SIGKILL) -> tuple[str, ...]:
    """`argv` as a command that gets `death_signal` when this process ends (on Linux; elsewhere `argv` itself).

    Run the command from the main thread, because the kernel sends the signal when the thread that started it ends.
    """
    if sys.platform != "linux":
        return tuple(argv)
    shim = (sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(int(death_signal)), str(os.getpid()))
    return (*shim, *argv)


class SupervisedProcess:
    """One child in a session of its own. `env` is added to this process's environment. The child inherits `pass_fds`.

    `on_exit(returncode)` is called each time the child ends by itself (a negative code is a signal), but not when a
    start has failed. `starts` counts all tries to start the child.
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
        self._log_offset = 0
        """Bytes in the log before the output of the newest child."""
        self._started_at = 0.0
        self._run_called = False
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id and process group id of the running child; None while there is none."""
        return self._child.pid if self._child is not None and self._child.returncode is None else None

    @property
    def running_s(self) -> float | None:
        """Seconds since the running child was started; None while there is none."""
        return None if self.pid is None else time.monotonic() - self._started_at

    @property
    def incarnation(self) -> str | None:
        """The name of the start that runs now; None while the child does not run. Each start has another name."""
        return None if self.pid is None else f"start {self.starts}, process {self.pid}"

    def restart(self, incarnation: str) -> bool:
        """Kill the child if `incarnation` still runs, so that `run` starts it again. Returns whether it was killed."""
        pid = self.pid
        return pid is not None and self.incarnation == incarnation and self.kill(pid)

    async def run(self) -> None:
        """Keep the child running until `stop`. If this is cancelled, the child and its group are killed at once."""
        self._run_called = True
        try:
            while not self._stopping.is_set():
                self._started_at = time.monotonic()
                how_ended = await self._run_once()
                if self._stopping.is_set():
                    return
                self._backoff.ran(time.monotonic() - self._started_at)
                delay = self._backoff.pause()
                logger.warning("%s %s; again in %.1f s (%s)", self.name, how_ended, delay, self.log_path)
                if await set_within(self._stopping, delay):
                    return
        finally:
            self._ended.set()

    async def stop(self, grace_s: float = 10.0) -> None:
        """Send SIGTERM to the child, and SIGKILL to its group after `grace_s` seconds. Returns when `run` has ended."""
        self._stopping.set()
        if not self._run_called:
            return
        self._terminate()
        while not await set_within(self._ended, grace_s):
            if self.pid is not None:
                logger.warning("%s did not end within %.0f s of SIGTERM: killed", self.name, grace_s)
                kill_group(self.pid)
            grace_s = KILL_AGAIN_S

    def give_up(self) -> None:
        """Do not start the child again. A running child keeps running until `stop`, which must still be called."""
        self._stopping.set()

    def kill(self, pid: int) -> bool:
        """Send SIGKILL to the child's group, if the child still has this process id; `run` then starts the child again.
        Returns whether it was sent. SIGKILL also ends a child that was stopped with SIGSTOP; SIGTERM does not.
        """
        if self.pid != pid:
            return False
        kill_group(pid)
        return True

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that the newest child wrote. Empty when it wrote none, or when the log cannot be read."""
        with suppress(OSError), self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            offset = self._log_offset if self._log_offset <= size else 0  # somebody has shortened the log
            log.seek(max(offset, size - 200 * lines))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        return ""

    async def _run_once(self) -> str:
        """Run one child from start to end. Returns how it ended, for the log."""
        try:
            child = self._start()
        except OSError as error:
            return f"could not be started: {error}"
        self._child = child
        try:
            if self._stopping.is_set():
                self._terminate()
            code = await exit_code(child)
        finally:
            kill_group(child.pid)
            await exit_code(child)
            await _wait_for_group(child.pid)
        if self.on_exit is not None and not self._stopping.is_set():
            self.on_exit(code)
        return f"ended with {code}"

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab", buffering=0) as log:
            self._log_offset = self._write_divider(log)
            return start_child(self._argv, os.environ | self._env, log, self._pass_fds)

    def _write_divider(self, log: FileIO) -> int:
        """Write the line that divides this start from the one before. Returns the size of the log in bytes."""
        line = f"===== {self.name}: start {self.starts}, {time.strftime('%Y-%m-%d %H:%M:%S')} =====\n"
        with suppress(OSError):  # a full disk is no reason not to start
            log.write(line.encode())
        return log.seek(0, os.SEEK_END)

    def _terminate(self) -> None:
        """Send SIGTERM to the child, if there is one. `pid` cannot be another process's by now: only `exit_code` reaps
        the child, and it cannot run while this method does."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGTERM)


def start_child(
    argv: Sequence[str], env: Mapping[str, str], log: FileIO, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a program in a group of its own, which writes to `log` and dies with this process. Raises OSError."""
    return subprocess.Popen(
        dies_with_parent(argv),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        pass_fds=pass_fds,
    )


async def exit_code(child: subprocess.Popen[bytes]) -> int:
    """Wait until the child has ended, and reap it. Needs no thread, unlike asyncio's subprocesses: where no thread can
    be started, nobody waits for their child."""
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


def kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


async def _wait_for_group(group: int, timeout_s: float = 2.0) -> None:
    """Wait until the killed grandchildren have ended, at most `timeout_s` seconds: under an init process that never
    reaps, they stay in the group as zombies."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.01)


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event, but at most `seconds`. Returns whether it is set."""
    try:
        async with asyncio.timeout(seconds):  # `wait_for` of Python 3.11 drops a cancellation that comes with the event
            await event.wait()
    except TimeoutError:
        return False
    return True
