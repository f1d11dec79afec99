"""A program as an agent: its environment, its output, and its end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl.agents import Command, CommandFailed, Finished, Session
from skyrl.agents.requests import Requests

# The program asks nothing, so there is no server behind the session.
SESSION = Session(Requests("http://127.0.0.1:9", "tml-key", 1.0), "s1", "ska-s1", "http://127.0.0.1:9", "tiny")


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


async def length(script: str, finished: Finished) -> float:
    return len(finished.output)


async def said(script: str, finished: Finished) -> float:
    return float(finished.output)


async def test_the_program_finds_the_session_in_its_environment_and_no_other_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "sk-of-another-server")
    seen: list[str] = []

    async def reward(script: str, finished: Finished) -> float:
        seen.extend(finished.output.split())
        return 1.0

    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY")
    agent = Command(shell, reward, cwd=lambda _: tmp_path, environment={"EXTRA": "more"})
    await agent(SESSION, f"echo {' '.join('$' + name for name in (*names, 'EXTRA', 'PATH'))}; pwd")
    url, key = SESSION.base_url, SESSION.key
    assert seen == [f"{url}/v1", key, url, key, key, "more", os.environ["PATH"], str(tmp_path)]


async def test_only_the_end_of_a_long_output_is_kept() -> None:
    agent = Command(shell, length, max_output=1_000)
    assert await agent(SESSION, "yes | head -c 3000000; echo; echo end >&2") == 1_000
    assert await Command(shell, said, max_output=4)(SESSION, "yes | head -c 3000000; printf 0.75 >&2") == 0.75


async def test_a_status_other_than_0_is_a_failure_with_the_end_of_the_output() -> None:
    with pytest.raises(CommandFailed, match="status 3: cannot go on"):
        await Command(shell, length)(SESSION, "echo cannot go on; exit 3")


async def test_after_the_time_limit_the_program_and_its_children_are_killed(tmp_path: Path) -> None:
    child = tmp_path / "child"
    began = time.monotonic()
    with pytest.raises(CommandFailed, match=r"stopped after 0\.5 s: started"):
        await Command(shell, length, timeout_s=0.5)(
            SESSION, f"sleep 600 & echo $! > {child}; echo started; trap '' TERM; wait; sleep 600"
        )
    assert time.monotonic() - began < 30
    await ended(int(child.read_text()))


async def test_a_cancelled_program_is_killed(tmp_path: Path) -> None:
    child = tmp_path / "child"
    running = asyncio.create_task(Command(shell, length)(SESSION, f"sleep 600 & echo $! > {child}; wait"))
    await until(lambda: child.exists() and child.read_text().endswith("\n"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await ended(int(child.read_text()))


async def test_a_program_that_is_cancelled_while_it_starts_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the program runs before asyncio has its pipes."""
    child, start = tmp_path / "child", asyncio.create_subprocess_exec

    async def slow(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*argv, **options)
        await until(lambda: child.exists() and child.read_text().endswith("\n"))
        running.cancel()
        await asyncio.sleep(0)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    running = asyncio.create_task(Command(shell, length)(SESSION, f"sleep 600 & echo $! > {child}; wait"))
    with pytest.raises(asyncio.CancelledError):
        await running
    await ended(int(child.read_text()))


async def ended(pid: int) -> None:
    """Wait until the process is gone, or is a zombie that init has not looked at yet."""
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(0.01)
