"""`skyrl rollout` with its engines on the nodes of a Ray cluster: /generate through the router, new weights, and the
death of a node.

The tests share one cluster and one plane, and run in the order of this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.torch import load_file

from skyrl.base.tiny import model_path
from skyrl.weights.group import TrainerGroup
from skyrl.weights.protocol import push
from skyrl.weights.workers import Workers
from tests.plane.running import RunningPlane
from tests.plane.trainer import Reference, save_variant

from .conftest import BOX, addresses
from .machines import Machine, Machines
from .test_placed_vllms import until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

KEY, ADMIN = "key-of-clients", "key-of-the-trainer"
TOKENS = list(range(5, 25))
BACKEND = '{"generator.inference_engine.resources": {"CPU": 1, "box": 1}}'


@pytest.fixture(scope="module")
def plane(cluster: Machines, boxes: list[Machine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlane]:
    flags = ("--num-engines", "2", "--ray-address", cluster.address, "--backend-config", BACKEND)
    running = RunningPlane(tmp_path_factory.mktemp("plane"), *flags)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SKYRL_ROUTER_API_KEY", KEY)
        patched.setenv("SKYRL_ADMIN_KEY", ADMIN)
        running.start()
    running.http.headers["Authorization"] = f"Bearer {KEY}"
    try:
        running.wait_routable(2)
        yield running
    finally:
        running.stop()


def generate(plane: RunningPlane) -> httpx.Response:
    body = {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 4, "temperature": 0.0}, "return_logprob": True}
    return plane.http.post("/generate", json=body | {"logprob_start_len": 0})


def logprobs(plane: RunningPlane) -> list[float]:
    """Of all tokens of the prompt but the first."""
    answer = generate(plane)
    assert answer.status_code == 200, answer.text
    return [entry[0] for entry in answer.json()["meta_info"]["input_token_logprobs"][1:]]


def routable(plane: RunningPlane) -> set[str]:
    """The nodes whose engines get requests."""
    urls = [worker["url"] for worker in plane.http.get("/workers").json()["workers"] if worker["routable"]]
    return {url.removeprefix("http://").partition(":")[0] for url in urls}


def update(plane: RunningPlane, checkpoint: Path, version: str) -> None:
    """New weights from a disk for all engines."""
    body = {"model_path": str(checkpoint), "weight_version": version}
    answer = plane.http.post(
        "/update_weights_from_disk", json=body, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=120
    )
    assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with other weights than the plane's model."""
    directory = tmp_path_factory.mktemp("variant")
    save_variant(model_path(), directory, 1)
    return directory


@pytest.fixture(scope="module")
def expected(variant: Path) -> list[float]:
    return Reference(variant).logprobs(TOKENS)


def test_engines_on_two_nodes_answer_through_the_router_and_nobody_without_a_key(
    plane: RunningPlane, boxes: list[Machine]
) -> None:
    assert routable(plane) == addresses(boxes, 0, 1)
    of_base = Reference(model_path()).logprobs(TOKENS)
    for _ in range(4):
        assert logprobs(plane) == pytest.approx(of_base, abs=1e-4)
    for url in plane.sidecars():
        assert httpx.post(f"{url}/generate", json={"input_ids": TOKENS}, trust_env=False).status_code == 401
    assert "Application startup complete" in (plane.state_dir / "logs" / "vllm-1.log").read_text()


def test_new_weights_from_a_disk_and_from_a_group_reach_engines_on_nodes(
    plane: RunningPlane, variant: Path, expected: list[float]
) -> None:
    workers = asyncio.run(Workers.behind(plane.url, ADMIN))
    assert len(workers.urls) == 2
    push(TrainerGroup(workers, address="127.0.0.2"), "group-1", [load_file(variant / "model.safetensors")])
    for _ in range(4):
        assert logprobs(plane) == pytest.approx(expected, abs=1e-4)
    update(plane, model_path(), "disk-1")
    assert logprobs(plane) != pytest.approx(expected, abs=1e-2)
    update(plane, variant, "disk-2")
    for _ in range(4):
        assert logprobs(plane) == pytest.approx(expected, abs=1e-4)


def test_an_engine_that_comes_up_elsewhere_waits_for_an_update(
    plane: RunningPlane, cluster: Machines, boxes: list[Machine], variant: Path, expected: list[float]
) -> None:
    boxes[1].kill()
    until(lambda: routable(plane) == addresses(boxes, 0))
    assert logprobs(plane) == pytest.approx(expected, abs=1e-4)
    boxes.append(cluster.add(**BOX))
    until(lambda: len(plane.sidecars()) == 2)
    for _ in range(6):
        assert logprobs(plane) == pytest.approx(expected, abs=1e-4)
    assert routable(plane) == addresses(boxes, 0), "the other one has its first weights"
    update(plane, variant, "disk-3")
    until(lambda: routable(plane) == addresses(boxes, 0, 2))
    for _ in range(6):
        assert logprobs(plane) == pytest.approx(expected, abs=1e-4)
    assert "vllm-1 waits for" in plane.log() or "vllm-0 waits for" in plane.log()


def test_a_killed_placement_brings_all_engines_back_and_they_wait_for_an_update(
    plane: RunningPlane, boxes: list[Machine], variant: Path, expected: list[float]
) -> None:
    (placement,) = plane.processes("skyrl.cli.ray_placement.rollout_plane")
    before = set(plane.sidecars())
    placement.kill()
    until(lambda: not routable(plane))
    until(lambda: len(set(plane.sidecars())) == 2 and not before & set(plane.sidecars()))
    assert generate(plane).status_code == 503
    update(plane, variant, "disk-4")
    until(lambda: routable(plane) == addresses(boxes, 0, 2))
    assert logprobs(plane) == pytest.approx(expected, abs=1e-4)


def test_a_stop_leaves_no_process_on_any_node(plane: RunningPlane, boxes: list[Machine]) -> None:
    placed = [each for node in (boxes[0], boxes[2]) for each in (*node.vllms(), *node.sidecars(), *node.actors())]
    assert len(placed) >= 6
    own = psutil.Process(plane.pid).children(recursive=True)
    assert plane.stop() == 0
    alive = psutil.wait_procs([*placed, *own], timeout=60)[1]
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
