"""Full fine-tuning with vLLMs on the nodes of a Ray cluster: each version reaches them by the checkpoint store, once
for each node, and a vLLM that comes up elsewhere has the newest version before it is used.

The tests share one cluster, one server and one model, and run in the order of this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from skyrl.cli.demo.server import DemoServer
from tests.e2e.conftest import cross_entropy
from tests.servers import ready

from .conftest import BOX, addresses
from .machines import Machine, Machines
from .test_placed_vllms import RESOURCES, until, used, workers

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

TOKENS = list(range(5, 29))
STEP = types.AdamParams(learning_rate=1e-3)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def server(
    cluster: Machines, boxes: list[Machine], store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DemoServer]:
    backend = {
        "trainer.full_finetuning": True,
        "generator.inference_engine.num_engines": 2,
        "generator.inference_engine.resources": RESOURCES,
        "trainer.placement.policy_num_cpu_ranks": 2,
        "trainer.placement.policy_resources": {"CPU": 0, "trainer": 0.5},  # on the head, which lives
    }
    flags = ("--ray-address", cluster.address, "--checkpoint-store", f"file://{store}")
    with ready(DemoServer(tmp_path_factory.mktemp("placed"), *flags, backend_config=backend)) as running:
        yield running


@pytest.fixture(scope="module")
def trainer(server: DemoServer) -> tinker.TrainingClient:
    """Its client is not closed: the last test stops the server."""
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-full")
    return client.create_lora_training_client(base_model="tiny", rank=0).result()


def updated(trainer: tinker.TrainingClient) -> tinker.SamplingClient:
    """One step, and the weights after it on the vLLMs."""
    trainer.forward_backward([cross_entropy(TOKENS)], "cross_entropy").result()
    trainer.optim_step(STEP).result()
    return trainer.save_weights_and_get_sampling_client().result()


def sampled(sampler: tinker.SamplingClient) -> np.ndarray:
    """The sampler's logprobs of all tokens but the first."""
    return np.asarray(sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:], np.float64)


def gap(trainer: tinker.TrainingClient, sampler: tinker.SamplingClient) -> float:
    """The largest difference between the logprobs of the sampler and of the trainer."""
    output = trainer.forward([cross_entropy(TOKENS)], "cross_entropy").result().loss_fn_outputs[0]
    return float(np.abs(sampled(sampler) - output["logprobs"].to_numpy().astype(np.float64)).max())


def versions(server: DemoServer) -> dict[str, str]:
    """By node, the version that its vLLM has."""
    key = json.loads((server.state_dir / "run" / "runtime.json").read_text())["each"][0]["inference_api_key"]
    found = {}
    for worker in workers(server):
        answer = httpx.get(f"{worker['url']}/weight_info", headers={"Authorization": f"Bearer {key}"}, trust_env=False)
        found[worker["url"].removeprefix("http://").partition(":")[0]] = answer.json()["weight_version"]
    return found


def test_each_version_reaches_both_nodes_and_only_the_newest_one_stays(
    server: DemoServer, boxes: list[Machine], store: Path, trainer: tinker.TrainingClient
) -> None:
    until(lambda: used(server) == addresses(boxes, 0, 1))
    last = None
    for _ in range(4):
        sampler = updated(trainer)
        assert gap(trainer, sampler) < 1e-4
        if last is not None:
            with pytest.raises(tinker.NotFoundError, match="these weights are not loaded any more"):
                sampled(last)
        last = sampler
    model_id = trainer.get_info().model_id
    assert versions(server) == dict.fromkeys(addresses(boxes, 0, 1), f"{model_id}@4")
    caches = [node.cache / "stored" for node in boxes]
    until(lambda: [sorted(path.name[:7] for path in cache.iterdir()) for cache in caches] == [["v000004"]] * 2)
    until(lambda: [path.name for path in store.glob("full-weights-*/v*")] == ["v000004"])


def test_a_sidecar_answers_nobody_without_the_key(server: DemoServer, boxes: list[Machine]) -> None:
    for node in boxes:
        (sidecar,) = node.sidecars()
        (port,) = {each.laddr.port for each in sidecar.net_connections() if each.status == psutil.CONN_LISTEN}
        for path in ("/health", "/generate", "/v1/models", "/update_weights_from_disk"):
            assert httpx.post(f"http://{node.address}:{port}{path}", json={}, trust_env=False).status_code == 401


def test_a_killed_sidecar_is_started_again_and_takes_the_next_version(
    server: DemoServer, boxes: list[Machine], trainer: tinker.TrainingClient
) -> None:
    node = boxes[0]
    (vllm,), (sidecar,) = node.vllms(), node.sidecars()
    sidecar.kill()
    until(lambda: [each for each in node.sidecars() if each.pid != sidecar.pid])
    assert gap(trainer, updated(trainer)) < 1e-4
    until(lambda: set(versions(server).values()) == {f"{trainer.get_info().model_id}@5"})
    assert [each.pid for each in node.vllms()] == [vllm.pid]


def test_a_vllm_whose_actor_is_killed_has_the_newest_version_before_it_is_used(
    server: DemoServer, boxes: list[Machine], trainer: tinker.TrainingClient
) -> None:
    sampler = updated(trainer)
    expected = sampled(sampler)
    params = types.SamplingParams(max_tokens=400, temperature=1.0, stop=[])
    node = boxes[0]
    ended = [*node.vllms(), *node.sidecars()]
    running = [sampler.sample(types.ModelInput.from_ints(TOKENS), 1, params) for _ in range(32)]
    until(lambda: all(worker["in_flight"] for worker in workers(server)))
    node.actors()[0].kill()
    assert {len(each.result().sequences[0].tokens) for each in running} == {400}
    assert psutil.wait_procs(ended, timeout=60)[1] == []
    until(lambda: used(server) == addresses(boxes, 0, 1))
    assert set(versions(server).values()) == {f"{trainer.get_info().model_id}@6"}
    for _ in range(6):
        np.testing.assert_allclose(sampled(sampler), expected, atol=1e-5)


def test_a_node_that_joins_for_a_dead_one_gets_the_newest_version(
    server: DemoServer, cluster: Machines, boxes: list[Machine], trainer: tinker.TrainingClient
) -> None:
    boxes[1].kill()
    sampler = updated(trainer)
    assert gap(trainer, sampler) < 1e-4
    boxes.append(cluster.add(**BOX))
    until(lambda: used(server) == addresses(boxes, 0, 2))
    assert set(versions(server).values()) == {f"{trainer.get_info().model_id}@7"}
    assert [path.name[:7] for path in (boxes[2].cache / "stored").iterdir()] == ["v000007"]
    sampler = updated(trainer)
    assert gap(trainer, sampler) < 1e-4
    assert len({tuple(sampled(sampler).round(4)) for _ in range(6)}) == 1


def test_a_stop_leaves_no_process_on_any_node(server: DemoServer, boxes: list[Machine]) -> None:
    processes = [each for node in (boxes[0], boxes[2]) for each in (*node.vllms(), *node.sidecars(), *node.actors())]
    assert len(processes) >= 6
    server.stop()
    alive = psutil.wait_procs(processes, timeout=60)[1]
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
