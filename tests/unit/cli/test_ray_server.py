"""A server on a cluster of scripted nodes: where it is started again, and what is said of it. Ray is not used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from skyrl.cli.ray_placement import ray_server
from skyrl.cli.ray_placement.ray_server import NOT_STARTED, Lost, RayServer
from skyrl.cli.ray_placement.scheduling import actor_options, choose
from skyrl.runtime.ray_cluster.capacity import Cancelled, NodeCapacity
from skyrl.runtime.ray_cluster.hosts import Look, Started

BUNDLE = {"CPU": 1.0}


class FakeHost:
    """An actor. `code` is the exit code of its server; `lost` and `quiet` are those of the actor."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.starts = 0
        self.code: int | None = None
        self.lost = ""
        self.quiet = False
        self.trouble = ""
        self.log = b""
        self.sidecar_log = b""
        self.sidecar_trouble = ""
        self.calls: list[str] = []

    async def node(self, within_s: float) -> tuple[str, str]:
        self._raise()
        return f"id{self.number}", f"10.0.0.{self.number}"

    async def start(self, within_s: float) -> Started:
        self._raise()
        self.starts += 1
        if self.trouble:
            return Started(None, "", self.trouble)
        return Started(f"http://10.0.0.{self.number}:{self.starts}", f"process {self.starts}")

    async def look(self, offset: int, sidecar_offset: int, within_s: float) -> Look:
        await asyncio.sleep(0)
        self._raise()
        of_sidecar = self.sidecar_log[sidecar_offset:], len(self.sidecar_log), self.sidecar_trouble
        return Look(self.code, self.log[offset:], len(self.log), *of_sidecar)

    async def ended(self, within_s: float) -> None:
        self.code = None

    def kill(self) -> None:
        self.calls.append("kill")

    async def stop(self, grace_s: float) -> None:
        self.calls.append("stop")

    async def release(self) -> None:
        self.calls.append("release")

    def _raise(self) -> None:
        if self.lost:
            raise Lost(self.lost)
        if self.quiet:
            raise TimeoutError


class FakeSpots:
    """Gives the hosts one after another; without one, it tells what is missing and waits."""

    def __init__(self, *hosts: FakeHost) -> None:
        self.hosts = list(hosts)
        self.avoided: list[str] = []

    def avoid(self, node_id: str) -> None:
        self.avoided.append(node_id)

    async def reserve(
        self, name: str, bundle: object, on_waiting: Callable[[str], None], is_cancelled: Callable[[], bool]
    ) -> FakeHost:
        while not self.hosts:
            on_waiting("no node has 1 CPU: 10.0.0.1 has 0 of 1 CPU free")
            if is_cancelled():
                raise Cancelled
            await asyncio.sleep(0.001)
        return self.hosts.pop(0)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_server, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(ray_server, "LONGEST_DELAY_S", 0.002)
    monkeypatch.setattr(ray_server, "LOOK_S", 0.001)


@asynccontextmanager
async def placed(spots: FakeSpots, log: Path, ends: list[int] | None = None) -> AsyncIterator[RayServer]:
    server = RayServer("vllm-0", BUNDLE, spots, log, None if ends is None else ends.append, lambda: None)
    try:
        yield server
    finally:
        await server.stop(0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing sets an event
            await asyncio.sleep(0.001)


async def test_a_server_that_ends_starts_again_on_its_node(tmp_path: Path) -> None:
    host, ends = FakeHost(1), []
    async with placed(FakeSpots(host), tmp_path / "log", ends) as server:
        await until(lambda: server.url == "http://10.0.0.1:1")
        first = server.incarnation
        moved = asyncio.create_task(server.until_moved(server.url))
        host.code = 3
        await until(lambda: server.url == "http://10.0.0.1:2")
        await asyncio.wait_for(moved, 60)
        assert ends == [3]
        assert server.incarnation != first
        assert not server.restart(first or "")
        assert server.restart(server.incarnation or "")
        assert host.calls == ["kill"]
    assert host.calls == ["kill", "stop", "release"]
    assert ends == [3], "an end by `stop` is not reported"


async def test_trouble_of_the_sidecar_is_a_reason_and_no_cause_of_the_servers_end(tmp_path: Path) -> None:
    host, log = FakeHost(1), tmp_path / "log"
    async with placed(FakeSpots(host), log) as server:
        await until(lambda: server.url is not None)
        host.log, host.sidecar_log = b"of vLLM\n", b"OSError: the address is taken\n"
        host.sidecar_trouble = "it has ended 2 times in a row"
        await until(lambda: server.reason)
        trouble = "its sidecar does not stay alive: it has ended 2 times in a row"
        assert server.reason == f"runs on node 10.0.0.1, but {trouble}"
        assert server.url is not None
        await until(lambda: log.read_bytes().endswith(b"of vLLM\nOSError: the address is taken\n"))
        assert server.log_tail() == "of vLLM"
        host.sidecar_trouble = ""
        await until(lambda: not server.reason)


async def test_a_server_whose_node_is_lost_comes_up_elsewhere(tmp_path: Path) -> None:
    first, second = FakeHost(1), FakeHost(2)
    spots = FakeSpots(first)
    async with placed(spots, tmp_path / "log") as server:
        await until(lambda: server.url is not None)
        first.lost = "the node died"
        await until(lambda: server.url is None)
        await until(lambda: server.reason.startswith("waits for 1 CPU: no node has 1 CPU: 10.0.0.1"))
        assert server.node is None
        assert first.calls == ["release"]
        spots.hosts.append(second)
        await until(lambda: server.url == "http://10.0.0.2:1")
        assert server.reason == ""


async def test_a_node_that_does_not_answer_keeps_its_server_until_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FakeHost(1)
    async with placed(FakeSpots(host, FakeHost(2)), tmp_path / "log") as server:
        await until(lambda: server.url is not None)
        host.quiet = True
        await until(lambda: server.reason == "is on node 10.0.0.1, which does not answer")
        assert server.url == "http://10.0.0.1:1"
        host.quiet = False
        await until(lambda: server.reason == "")
        monkeypatch.setattr(ray_server, "LOST_S", 0.01)
        host.quiet = True
        await until(lambda: server.url == "http://10.0.0.2:1")
        assert host.calls == ["release"]


async def test_a_node_that_cannot_run_the_server_is_told_as_an_end(tmp_path: Path) -> None:
    host, ends = FakeHost(1), []
    host.trouble = "on node 10.0.0.1: vLLM is not installed"
    async with placed(FakeSpots(host), tmp_path / "log", ends) as server:
        await until(lambda: ends)
        assert ends[0] == NOT_STARTED
        assert server.reason == "cannot start on node 10.0.0.1: vLLM is not installed"
        assert server.log_tail(1) == "on node 10.0.0.1: vLLM is not installed"
        host.trouble = ""
        await until(lambda: server.url is not None)


async def test_a_server_leaves_a_node_that_cannot_run_it(tmp_path: Path) -> None:
    unfit, spots = FakeHost(1), FakeSpots(FakeHost(1), FakeHost(2))
    spots.hosts[0] = unfit
    unfit.trouble = "on node 10.0.0.1: vLLM is not installed"
    async with placed(spots, tmp_path / "log") as server:
        await until(lambda: server.url == "http://10.0.0.2:1")
        assert spots.avoided == [(await unfit.node(1.0))[0]]
        assert unfit.calls[-1] == "release"


async def test_the_log_of_the_node_is_brought_here(tmp_path: Path) -> None:
    host = FakeHost(1)
    async with placed(FakeSpots(host), tmp_path / "log") as server:
        await until(lambda: server.url is not None)
        host.log = b"one\ntwo\n"
        await until(lambda: "two" in server.log_tail())
        host.log += b"three\n"
        await until(lambda: server.log_tail(2) == "two\nthree")
        await until(lambda: (tmp_path / "log").read_text().splitlines()[1:] == ["one", "two", "three"])


async def test_a_server_that_waits_for_a_node_can_be_stopped(tmp_path: Path) -> None:
    async with placed(FakeSpots(), tmp_path / "log") as server:
        await until(lambda: server.reason.startswith("waits"))
    await server.supervised()


def node(number: int, **free: float) -> NodeCapacity:
    return NodeCapacity(f"id{number}", f"10.0.0.{number}", free, free)


def test_a_server_goes_where_the_fewest_are_and_never_where_a_part_of_it_does_not_fit():
    nodes = [node(1, CPU=8, GPU=8), node(2, CPU=8, GPU=1), node(3, CPU=8)]
    assert choose(nodes, {"CPU": 1}, {}) == "id1"
    assert choose(nodes, {"CPU": 1}, {"id1": 1}) == "id2"
    assert choose(nodes, {"CPU": 1}, {"id1": 1, "id2": 1}) == "id3"
    assert choose(nodes, {"CPU": 1}, {"id1": 1, "id2": 1, "id3": 1}) == "id1"
    assert choose(nodes, {"GPU": 2}, {"id1": 5}) == "id1", "a tensor-parallel server never spans nodes"
    assert choose(nodes, {"GPU": 9}, {}) is None


def test_a_bundle_as_options_of_an_actor():
    options = {"num_cpus": 0.0, "num_gpus": 2, "memory": None, "resources": {"box": 1.0}}
    assert actor_options({"GPU": 2.0, "box": 1.0}) == options
    assert actor_options({"memory": 2.0**30}) == options | {"num_gpus": 0, "memory": 2.0**30, "resources": {}}
    assert actor_options({"CPU": 1.0, "GPU": 0.5})["num_gpus"] == 0.5
