"""When the placement process gives up: no vLLM can start. A node that cannot run one of several does not count."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from skyrl.base.config.loading import load_config
from skyrl.cli.launcher.inference_parts import ServerParts
from skyrl.cli.launcher.metrics import RestartMetrics
from skyrl.cli.launcher.parts import Part, Parts
from skyrl.cli.ray_placement.lifecycle import Starts, run_servers
from skyrl.cli.ray_placement.ray_server import NOT_STARTED, RayServer
from skyrl.inference.engine_kinds import Vllm
from skyrl.inference.placement import ServerPlan
from tests.unit.cli.test_ray_server import FakeHost, FakeSpots

REFUSAL = "on node 10.0.0.1: vLLM is not installed"


def starts_of(count: int) -> tuple[Starts, list[Any]]:
    starts = Starts()
    servers: list[Any] = [SimpleNamespace(has_answered=False) for _ in range(count)]
    starts.servers = servers
    for number in range(count):
        process: Any = SimpleNamespace(log_tail=lambda lines: REFUSAL)
        starts.watch(f"vllm-{number}", process)
    return starts, servers


async def test_the_only_vllm_that_its_node_refuses_ends_the_start() -> None:
    starts, _ = starts_of(1)
    starts.ended("vllm-0", NOT_STARTED, None)
    assert (await starts.hopeless).sentence == REFUSAL


async def test_one_of_two_that_its_node_refuses_does_not_end_the_start_of_the_other() -> None:
    starts, _ = starts_of(2)
    for _ in range(3):
        starts.ended("vllm-0", NOT_STARTED, None)
    assert not starts.hopeless.done()
    starts.ended("vllm-1", NOT_STARTED, None)
    assert (await starts.hopeless).sentence == REFUSAL


@pytest.mark.parametrize("count", [1, 2])
async def test_once_a_vllm_has_answered_others_are_tried_for_ever(count: int) -> None:
    starts, servers = starts_of(count)
    servers[0].has_answered = True
    for number in range(count):
        starts.ended(f"vllm-{number}", NOT_STARTED, None)
    assert not starts.hopeless.done()


async def test_what_runs_beside_the_servers_and_fails_ends_the_placement() -> None:
    ended: list[str] = []

    async def returns() -> None:
        pass

    async def runs() -> None:
        await asyncio.Event().wait()

    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise OSError("the disk is full")

    async def goes_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    part: Any = SimpleNamespace(parts=lambda needs: [Part("server", supervise=runs)])
    starts = Starts()
    starts.servers = [part]
    with pytest.raises(OSError, match="the disk is full"):
        await asyncio.wait_for(run_servers("127.0.0.1:1", starts, (returns, fails, goes_on)), 60)
    assert ended == ["cancelled"]
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(name)


class FakePlacement:
    """Places a server on one scripted node."""

    def __init__(self, host: FakeHost, log: Path) -> None:
        self._spots = FakeSpots(host)
        self._log = log

    async def start(self, plan: ServerPlan, on_exit: Any = None) -> RayServer:
        return RayServer(plan.name, plan.kind.bundle(cuda=False), self._spots, self._log, on_exit, lambda: None)


async def test_a_wrong_option_of_vllm_ends_the_start_with_a_sentence_that_names_it(tmp_path: Path) -> None:
    host = FakeHost(1)
    host.code, host.log = 2, b"usage: ...\napi_server.py: error: unrecognized arguments: --bogus-flag\n"
    options = {"generator.inference_engine.engine_init_kwargs": {"bogus_flag": 1}}
    kind = Vllm(load_config({"ray_address": "local", "backend_config": options}), "key")
    starts, parts = Starts(), Parts()
    server = ServerParts(
        ServerPlan("vllm-0", kind, cuda=False),
        kind,
        FakePlacement(host, tmp_path / "log"),
        starts,
        RestartMetrics(CollectorRegistry()),
        probe_interval_s=1.0,
    )
    starts.servers = [server]
    await parts.add(server.parts(())[0])
    cause = await asyncio.wait_for(starts.hopeless, 60)
    await parts.stop()
    option = "generator.inference_engine.engine_init_kwargs.bogus_flag=1"
    assert cause.final
    assert cause.sentence == f"{option}: vLLM refuses it: unrecognized arguments: --bogus-flag"
    assert host.starts == 1, "it is not tried again"
