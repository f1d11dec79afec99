"""Two base models on a Ray cluster: each has vLLMs and, if it trains, ranks of its own, and one's placement is nobody
else's business."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tinker import types

from skyrl.cli.demo.server import DemoServer
from tests.databases import rows_in, url_of
from tests.e2e.conftest import cross_entropy, train
from tests.e2e.load import client_that_outlives
from tests.second_model import make_second
from tests.servers import ready, wait_all

from .machines import Machine, Machines

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

PROMPT = types.ModelInput.from_ints([1, 7, 300, 12, 45])


@pytest.fixture(scope="module")
def server(cluster: Machines, boxes: list[Machine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    directory = tmp_path_factory.mktemp("placed-base-models")
    placed = {
        "generator.inference_engine.resources": {"CPU": 1, "box": 1},
        "trainer.placement.policy_resources": {"CPU": 0, "trainer": 1},  # on the head
    }
    entries = [
        {"base_model": "tiny", "served_model_names": ["student"], "backend_config": placed},
        {
            "base_model": str(make_second(directory / "teacher")),
            "served_model_names": ["teacher"],
            "uses": ["sample"],
            "backend_config": placed,
        },
    ]
    store = tmp_path_factory.mktemp("store")
    flags = ("--ray-address", cluster.address, "--checkpoint-store", f"file://{store}")
    with ready(DemoServer(directory / "server", *flags, "--base-models", json.dumps(entries))) as running:
        wait_all(running)
        yield running


def test_each_base_model_is_trained_and_sampled_where_ray_has_placed_it(server: DemoServer) -> None:
    with client_that_outlives(server.url, "tml-placed") as client:
        trainer = client.create_lora_training_client(base_model="student", rank=4).result()
        losses = train(trainer, [cross_entropy(PROMPT.to_ints())], steps=3, learning_rate=1e-2)
        assert losses[-1] < losses[0]
        trained = trainer.save_weights_and_get_sampling_client().result().compute_logprobs(PROMPT).result()
        of_base = [
            client.create_sampling_client(base_model=name).result().compute_logprobs(PROMPT).result()
            for name in ("student", "teacher")
        ]
    assert len({tuple(logprobs) for logprobs in (trained, *of_base)}) == 3
    owners = {
        owner.rpartition("/")[2]
        for (owner,) in rows_in(url_of(server.state_dir), "select owner from inference_servers")
    }
    assert owners == {"student", "teacher"}
