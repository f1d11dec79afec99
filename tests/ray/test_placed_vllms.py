"""Two vLLMs on the nodes of a Ray cluster, through a whole server: one waits until a node joins; the death of a node,
of an actor, of the placement process and of the launcher costs no client a sample, and leaves nothing behind.

The tests share one server, and run in the order of this file.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import tinker

from skyrl.cli.demo.server import DemoServer
from tests.e2e.conftest import cross_entropy, find_process, train
from tests.e2e.load import PROMPT, Load, client_that_outlives, sample, start_load
from tests.servers import ready

from .conftest import BOX
from .machines import HEAD, Machine, Machines

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

SHORT, LONG = 12, 300
WITHIN_S = 300.0
"""Ends a hanging test."""
CLIENTS = 12
RESOURCES = {"CPU": 1, "box": 1}


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def node(cluster: Machines) -> Machine:
    """The only node with a box."""
    for other in cluster.workers():
        other.kill()
    return cluster.add(**BOX)


@pytest.fixture(scope="module")
def server(cluster: Machines, node: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    backend = {
        "generator.inference_engine.num_engines": 2,
        "generator.inference_engine.resources": RESOURCES,
        "trainer.placement.policy_resources": {"CPU": 0, "trainer": 1},  # on the head, which lives
    }
    store = tmp_path_factory.mktemp("store")
    flags = ("--ray-address", cluster.address, "--checkpoint-store", f"file://{store}")
    with ready(DemoServer(tmp_path_factory.mktemp("placed"), *flags, backend_config=backend)) as running:
        yield running


@pytest.fixture(scope="module")
def samplers(server: DemoServer) -> Iterator[list[tinker.SamplingClient]]:
    with client_that_outlives(server.url, "tml-placed") as client:
        yield [each.result() for each in [client.create_sampling_client(base_model="tiny") for _ in range(CLIENTS)]]


def workers(server: DemoServer) -> list[dict]:
    (runtime,) = json.loads((server.state_dir / "run" / "runtime.json").read_text())["each"]
    headers = {"Authorization": f"Bearer {runtime['inference_api_key']}"}
    answer = httpx.get(f"{runtime['inference_url']}/statusz", headers=headers, trust_env=False, timeout=10)
    return answer.json()["workers"]


def used(server: DemoServer) -> set[str]:
    """The addresses of the nodes whose vLLMs get samples."""
    healthy = [worker["url"] for worker in workers(server) if worker["state"] == "healthy"]
    return {url.removeprefix("http://").partition(":")[0] for url in healthy}


def reasons(server: DemoServer) -> str:
    return "; ".join(httpx.get(f"{server.url}/readyz", trust_env=False, timeout=30).json()["reasons"])


def start(pool: ThreadPoolExecutor, samplers: list[tinker.SamplingClient], server: DemoServer) -> Load:
    """Return when both vLLMs sample."""
    return start_load(pool, samplers, lambda: workers(server), LONG)


def test_a_vllm_without_room_says_what_is_missing_and_is_placed_when_a_node_joins(
    server: DemoServer, cluster: Machines, node: Machine
) -> None:
    until(lambda: used(server) == {node.address})
    until(lambda: "waits for" in reasons(server))
    assert_names_what_is_missing(reasons(server), node)
    joined_at = time.monotonic()
    joined = cluster.add(**BOX)
    until(lambda: used(server) == {node.address, joined.address})
    print(f"the joined node was in use after {time.monotonic() - joined_at:.1f} s")
    assert reasons(server) == ""
    assert [len(each.vllms()) for each in (cluster.nodes[HEAD], node, joined)] == [0, 1, 1]


def assert_names_what_is_missing(said: str, full: Machine) -> None:
    """One of two replicas runs on the node `full`, and there is no other node with a box."""
    assert "sampling: 1 of 2 replicas are in use" in said
    assert "waits for 1 CPU and 1 box: no node has 1 CPU and 1 box: " in said
    assert f"{full.address} has 0 of 1 CPU free and 0 of 1 box free" in said


def test_adapters_reach_the_vllms_of_both_nodes(server: DemoServer) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-trains") as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
        losses = train(trainer, [cross_entropy(PROMPT + list(range(20, 40)))], 3, 2e-2)
        assert losses[-1] < losses[0]
        sampler = trainer.save_weights_and_get_sampling_client().result()
        assert len({sample(sampler, SHORT) for _ in range(4)}) == 1
    log = (server.state_dir / "logs" / "vllm-1.log").read_text()
    assert "===== vllm-1: start 1 on 127.0.0." in log
    assert "Application startup complete" in log


def _recovers(
    server: DemoServer, samplers: list[tinker.SamplingClient], kill: Callable[[], None], what: str, gone: str
) -> None:
    """After `kill` during samples, all samples end well, and both nodes are used again."""
    before = used(server)
    with ThreadPoolExecutor(CLIENTS) as pool:
        load = start(pool, samplers, server)
        killed_at = time.monotonic()
        kill()
        until(lambda: gone not in used(server))
        print(f"{what}: out after {time.monotonic() - killed_at:.1f} s")
        load.assert_well()
    until(lambda: used(server) == before)
    print(f"{what}: all in use after {time.monotonic() - killed_at:.1f} s")


def test_a_killed_vllm_starts_again_on_its_node(
    server: DemoServer, node: Machine, samplers: list[tinker.SamplingClient]
) -> None:
    actor = node.actors()[0].pid
    _recovers(server, samplers, node.vllms()[0].kill, "killed vLLM", node.address)
    assert node.actors()[0].pid == actor


def test_a_killed_actor_is_replaced(server: DemoServer, node: Machine, samplers: list[tinker.SamplingClient]) -> None:
    vllm = node.vllms()[0]
    _recovers(server, samplers, node.actors()[0].kill, "killed actor", node.address)
    assert not vllm.is_running() or vllm.status() == psutil.STATUS_ZOMBIE


def test_a_killed_placement_costs_no_sample(
    server: DemoServer, node: Machine, samplers: list[tinker.SamplingClient]
) -> None:
    placement = find_process(server, "skyrl.cli.ray_placement.main")
    _recovers(server, samplers, placement.kill, "killed placement process", node.address)
    assert find_process(server, "skyrl.cli.ray_placement.main").pid != placement.pid


def test_a_node_that_does_not_answer_costs_no_sample(
    server: DemoServer, cluster: Machines, samplers: list[tinker.SamplingClient]
) -> None:
    left, cut_off = cluster.workers()
    vllms = cut_off.vllms()
    with ThreadPoolExecutor(CLIENTS) as pool:
        load = start(pool, samplers, server)
        frozen_at = time.monotonic()
        frozen = cut_off.freeze()
        try:
            until(lambda: used(server) == {left.address})
            print(f"frozen node: out after {time.monotonic() - frozen_at:.1f} s")
            load.assert_well()
            print(f"frozen node: its samples were answered after {time.monotonic() - frozen_at:.1f} s")
        finally:
            for process in frozen:
                process.resume()
    _, alive = psutil.wait_procs(vllms, timeout=WITHIN_S)
    assert alive == [], "the old copy must end when its node is back"
    cut_off.kill()
    cluster.add(**BOX)


def test_a_killed_node_costs_no_sample_and_is_not_waited_for(
    server: DemoServer, cluster: Machines, samplers: list[tinker.SamplingClient]
) -> None:
    left, killed = cluster.workers()
    until(lambda: used(server) == {left.address, killed.address})
    with ThreadPoolExecutor(CLIENTS) as pool:
        load = start(pool, samplers, server)
        killed_at = time.monotonic()
        killed.kill()
        until(lambda: used(server) == {left.address})
        print(f"the killed node was out after {time.monotonic() - killed_at:.1f} s")
        load.assert_well()
    until(lambda: "waits for" in reasons(server))
    assert_names_what_is_missing(reasons(server), left)
    assert killed.address not in reasons(server).partition("waits for")[2]


def test_a_killed_launcher_leaves_nothing_on_any_node(server: DemoServer, cluster: Machines) -> None:
    own = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    placed = [process for node in cluster.workers() for process in [*node.actors(), *node.vllms()]]
    assert len(placed) >= 2
    psutil.Process(server.pid).send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    _, alive = psutil.wait_procs([*own, *placed], timeout=WITHIN_S)
    print(f"killed launcher: all gone after {time.monotonic() - killed_at:.1f} s")
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    until(lambda: all(not node.actors() for node in cluster.workers()))
