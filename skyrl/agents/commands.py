"""Runs a program as an agent: with the session's environment, a time limit, and a bound on the output that is kept.

The program runs in a process group of its own, which is killed at its end, so that no child of it goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from skyrl.agents.errors import CommandFailed
from skyrl.agents.session import Session

T = TypeVar("T")
TERMINATE_S = 5.0
"""From SIGTERM to SIGKILL."""
POLL_S = 0.05
REST_S = 1.0
"""How long the rest of the output may take, after the end. A child in a group of its own may hold the pipe for ever."""


@dataclass(frozen=True)
class Finished:
    """A program that has ended with the status 0. `output` is the end of its stdout and stderr together."""

    output: str


@dataclass(frozen=True)
class Command(Generic[T]):
    """An agent for `run`: `argv(task)` is the program with its arguments, `reward(task, finished)` grades it.

    `cwd` and `environment`, which is added to this process's and the session's, may depend on the task. A status other
    than 0, and more than `timeout_s` seconds, raise CommandFailed: then the trajectory has no reward. `max_output` is
    in bytes.
    """

    argv: Callable[[T], Sequence[str]]
    reward: Callable[[T, Finished], Awaitable[float | None]]
    cwd: Callable[[T], Path] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    max_output: int = 65_536

    async def __call__(self, session: Session, task: T) -> float | None:
        environment = {**os.environ, **session.environment, **self.environment}
        process = await _start(self.argv(task), None if self.cwd is None else self.cwd(task), environment)
        assert process.stdout is not None
        kept = bytearray()
        reading = asyncio.create_task(_read(process.stdout, kept, self.max_output))
        failure = None
        try:
            async with asyncio.timeout(self.timeout_s):
                await _ended(process)
            if process.returncode:
                failure = f"ended with status {process.returncode}"
        except TimeoutError:
            failure = f"stopped after {self.timeout_s:g} s"
        finally:
            await _kill_group(process)
            await asyncio.wait({reading}, timeout=REST_S)
            reading.cancel()
        text = kept.decode(errors="replace")
        if failure is not None:
            raise CommandFailed(failure, text)
        return await self.reward(task, Finished(text))


async def _start(argv: Sequence[str], cwd: Path | None, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start a program in a group of its own. If this is cancelled meanwhile, asyncio would kill the program alone, and
    not what it has started already."""
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with suppress(OSError):  # it could not be started
            await _kill_group(await starting)
        raise


async def _read(stream: asyncio.StreamReader, kept: bytearray, limit: int) -> None:
    """Read to the end, and keep the last `limit` bytes."""
    while part := await stream.read(65_536):
        kept += part
        del kept[: max(0, len(kept) - limit)]


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of the program itself. `process.wait` also waits for its children, which hold its pipe."""
    while process.returncode is None:  # noqa: ASYNC110 - asyncio has no event for it
        await asyncio.sleep(POLL_S)


async def _kill_group(process: asyncio.subprocess.Process) -> None:
    """End the program and what it has started. Its group may outlive it."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(TERMINATE_S):
                await _ended(process)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await _ended(process)
