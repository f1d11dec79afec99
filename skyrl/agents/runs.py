"""Runs an agent on each task several times, in sessions of its own, with a bound on how many run at once; says how far
the run is, for a callback and as a line of text.

When an agent raises, `is_servers` tells whose fault that is: the server's, and a new session may go well, or the
agent's own. Agents use SDKs that this package does not import, and these use HTTP libraries of several names. So errors
are known by HTTP's status, or by the names of their classes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TextIO, TypeVar, Unpack

from skyrl.agents.session import AgentServer, Session, SessionOptions
from skyrl.agents.trajectories import Group, Trajectory

logger = logging.getLogger(__name__)

T = TypeVar("T")
Agent = Callable[[Session, T], Awaitable[float | None]]
"""`await agent(session, task)` is the reward, or None if there is none."""


async def run(
    server: AgentServer,
    agent: Agent[T],
    tasks: Iterable[T],
    *,
    group_size: int = 1,
    concurrency: int = 64,
    retries: int = 2,
    on_progress: Callable[[Progress], None] | None = None,
    **options: Unpack[SessionOptions],
) -> list[Group[T]]:
    """One group for each task, in order, with `group_size` trajectories each. `options` are those of every session.

    An agent that raises an exception has failed: its trajectory has no reward. If the cause is the server (a broken
    connection, or a 5xx that the agent's SDK did not get over), the agent is run again in a new session, up to
    `retries` times. An error of the calls that make, reward or read sessions is raised, and ends all that still runs;
    so does a cancellation.
    """
    if group_size < 1 or concurrency < 1 or retries < 0:
        raise ValueError("group_size and concurrency must be at least 1, retries at least 0")
    tasks = list(tasks)
    slots = deque((number, member) for number in range(len(tasks)) for member in range(group_size))
    found: dict[tuple[int, int], Trajectory] = {}
    progress = Progress(total=len(slots))
    report = on_progress or (lambda _: None)

    async def work() -> None:
        while slots:
            slot = slots.popleft()
            progress.running += 1
            found[slot] = await _trajectory(server, agent, tasks[slot[0]], retries, progress, options)
            progress.running -= 1
            report(progress)

    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(slots)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    members = range(group_size)
    return [Group(task, tuple(found[number, member] for member in members)) for number, task in enumerate(tasks)]


async def _trajectory(
    server: AgentServer, agent: Agent[T], task: T, retries: int, progress: Progress, options: SessionOptions
) -> Trajectory:
    for attempt in range(retries + 1):
        async with await server.session(**options) as session:
            try:
                reward = _checked(await agent(session, task))
            except Exception as error:  # agents are programs of the user: logged, and the session has no reward
                if attempt < retries and is_servers(error):
                    logger.warning("session %s: the server failed (%s); again in a new session", session.id, error)
                    progress.retried += 1
                    continue
                logger.warning("session %s: the agent failed", session.id, exc_info=error)
                progress.failed += 1
                return Trajectory(session.id, None, error=f"{type(error).__name__}: {error}")
            if reward is None:
                progress.unrewarded += 1
                return Trajectory(session.id, None)
            await session.reward(reward)
        progress.rewarded += 1
        progress.reward_sum += reward
        return Trajectory(session.id, reward, tuple(await session.rows()))
    raise AssertionError("the last attempt returns")


def _checked(reward: float | None) -> float | None:
    """A plain number: numpy's and truth values are no JSON numbers. Raises ValueError and TypeError."""
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the agent's reward is {reward}")
    return None if reward is None else float(reward)


BROKEN = frozenset({"APIConnectionError", "TransportError", "ClientConnectionError", "ConnectionError"})
"""Classes of errors of connections: of openai and anthropic, of httpx and its forks, of aiohttp, and Python's own."""


def is_servers(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, is a connection that broke or an answer 5xx."""
    return any(_is_servers(each) for each in _chain(error))


def _is_servers(error: BaseException) -> bool:
    status = getattr(error, "status_code", None)  # openai, anthropic, litellm
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)  # httpx
    if isinstance(status, int):
        return status >= 500
    return not BROKEN.isdisjoint(kind.__name__ for kind in type(error).__mro__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, and those of an exception group."""
    seen: set[int] = set()
    found = [error]
    while found:
        each = found.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        found += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        found += [cause for cause in (each.__cause__, each.__context__) if cause is not None]


@dataclass
class Progress:
    """Numbers of sessions. `rewarded`, `failed` and `unrewarded` have ended, `retried` began again."""

    total: int
    running: int = 0
    rewarded: int = 0
    failed: int = 0
    unrewarded: int = 0
    retried: int = 0
    reward_sum: float = 0.0

    @property
    def done(self) -> int:
        return self.rewarded + self.failed + self.unrewarded

    def __str__(self) -> str:
        parts = [f"{self.done}/{self.total} sessions", f"{self.running} running"]
        parts += [f"{number} {name}" for name in ("failed", "unrewarded", "retried") if (number := getattr(self, name))]
        return ", ".join(parts + ([f"mean reward {self.reward_sum / self.rewarded:.3f}"] if self.rewarded else []))


class ProgressLine:
    """A callback for `run`: keeps one line of a terminal up to date. In a file only the last state is written."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def __call__(self, progress: Progress) -> None:
        last = progress.done == progress.total
        if self._stream.isatty():
            self._stream.write(f"\r{progress}\x1b[K" + ("\n" if last else ""))
            self._stream.flush()
        elif last:
            self._stream.write(f"{progress}\n")
