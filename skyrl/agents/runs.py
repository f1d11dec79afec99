"""Runs an agent on each task several times, in sessions of its own, with a bound on how many run at once."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar, Unpack

from skyrl.agents.blame import is_servers
from skyrl.agents.groups import Group, Trajectory
from skyrl.agents.progress import Progress
from skyrl.agents.session import AgentServer, Session, SessionOptions

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
    """Run the agent once, or again if the server has failed."""
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
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the agent's reward is {reward}")
    return reward
