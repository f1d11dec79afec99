"""Handles of inference servers on this machine: incarnations, restarts, devices, and ends."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from skyrl.inference.placement import LocalPlacement, LocalServer, ServerSpec

WAIT_S = 60.0
PRINTS_DEVICES = """
import os, time
print(f"devices: {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)  # one write: the test reads what is there
time.sleep(600)
"""


async def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def started(logs: Path, devices: Sequence[str] = (), ends: list[int] | None = None) -> AsyncIterator[LocalServer]:
    spec = ServerSpec((sys.executable, "-S", "-c", PRINTS_DEVICES), {}, "127.0.0.1", 1, "server.log")
    server = LocalPlacement(logs).run(spec, devices, None if ends is None else ends.append)
    try:
        await wait_until(lambda: "devices:" in server.log_tail())
        yield server
    finally:
        await server.stop()


async def test_a_restart_ends_only_the_named_incarnation(tmp_path: Path) -> None:
    ends: list[int] = []
    async with started(tmp_path, ends=ends) as server:
        first = server.incarnation
        assert first is not None
        assert not server.restart(f"{first}?")
        assert server.incarnation == first
        assert server.restart(first)
        await wait_until(lambda: server.incarnation not in (None, first))
        second = server.incarnation
        assert ends == [-9]
        assert not server.restart(first), "the first incarnation has ended, and the second must go on"
        assert server.incarnation == second
        assert server.running_s is not None
    assert server.incarnation is None
    assert server.running_s is None
    assert len(ends) == 1, "an end by `stop` is not reported"


@pytest.mark.parametrize(("devices", "seen"), [(["5", "7"], "5,7"), ([], "before")])
async def test_a_server_sees_the_devices_that_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str], seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "before")
    async with started(tmp_path, devices) as server:
        assert server.log_tail() == f"devices: {seen}"


async def test_a_server_that_was_given_up_is_not_started_again(tmp_path: Path) -> None:
    async with started(tmp_path) as server:
        server.give_up()
        assert server.incarnation is not None
        server.restart(server.incarnation)
        await asyncio.wait_for(server.supervised(), WAIT_S)
        assert server.incarnation is None
