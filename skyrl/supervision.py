"""Supervised child processes: start, log to a file, restart with backoff, stop with the whole process group.

Knows processes, signals and time. Deliberately knows nothing of what the children do or whether they are
healthy. A killed supervisor leaves no child behind: the kernel kills the child with it (Linux; a child that starts
processes of its own must ask for the same, as `skyrl.vllm_plugin` does for vLLM).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

FIRST_DELAY_S, LONGEST_DELAY_S, STABLE_AFTER_S = 0.5, 30.0, 60.0

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
    """One child in a session of its own. `env` is added to this process's environment; it inherits `pass_fds`.

    `on_exit(returncode)` is called each time the child ends without having been stopped (negative: a signal).
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
        self.restarts = 0
        self._argv = tuple(argv)
        self._env = dict(env)
        self._pass_fds = tuple(pass_fds)
        self._first_delay_s = first_delay_s
        self._stable_after_s = stable_after_s
        self._child: asyncio.subprocess.Process | None = None
        self._started = False
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id (and process group id) of the running child."""
        return self._child.pid if self._child is not None and self._child.returncode is None else None

    async def run(self) -> None:
        """Keep the child running until `stop`. When cancelled, kill it and its group at once."""
        delay = self._first_delay_s
        self._started = True
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                code = await self._run_once()
                if self._stopping.is_set():
                    return
                if self.on_exit is not None:
                    self.on_exit(code)
                if time.monotonic() - began >= self._stable_after_s:
                    delay = self._first_delay_s
                logger.warning("%s ended with %s; again in %.1f s (%s)", self.name, code, delay, self.log_path)
                if await _set_within(self._stopping, delay):
                    return
                delay = min(2 * delay, LONGEST_DELAY_S)
                self.restarts += 1
        finally:
            self._ended.set()

    async def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM to the child, after `grace_s` SIGKILL to its group. Returns when `run` is over."""
        self._stopping.set()
        if not self._started:
            return
        if self.pid is not None:
            os.kill(self.pid, signal.SIGTERM)
        if not await _set_within(self._ended, grace_s) and self._child is not None:
            logger.warning("%s did not end within %.0f s of SIGTERM: killed", self.name, grace_s)
            _kill_group(self._child.pid)
        await self._ended.wait()

    def kill(self, pid: int) -> bool:
        """SIGKILL to the child's group if the child is still the process `pid`: `run` then starts it again.

        Says whether it was. Also ends a child that is stopped (SIGSTOP), which hears no other signal.
        """
        if self.pid != pid:
            return False
        _kill_group(pid)
        return True

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the log, for a message to the user."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 200 * lines))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    async def _run_once(self) -> int:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                *dies_with_parent(self._argv),
                env=os.environ | self._env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=self._pass_fds,
            )
        self._child = child
        try:
            if self._stopping.is_set():
                child.terminate()
            return await child.wait()
        finally:
            _kill_group(child.pid)
            await child.wait()
            await _group_gone(child.pid)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


async def _group_gone(group: int, within_s: float = 2.0) -> None:
    """Wait for killed grandchildren; bounded, because an init that never reaps keeps zombies in the group."""
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
