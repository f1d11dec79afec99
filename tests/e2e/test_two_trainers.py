"""Two base models that both train, on PostgreSQL, with two API processes: the death of one engine leaves the other's
training alone, and both models go on as if nothing had been. No vLLM."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.databases import rows_in
from tests.postgres_server import PostgresServer
from tests.second_model import make_second
from tests.servers import SLOW_START_S, ready, wait_all

from .conftest import cross_entropy, train
from .mortal_server import MortalServer, Upstream

DATA = [cross_entropy([5, 6, 7, 8, 9, 10])]
NAMES = ("first", "second")
MANY = 30


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    name = postgres.new_database()
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture
def server(tmp_path: Path, url: str) -> Iterator[MortalServer]:
    with Upstream() as upstream:
        paths = ("tiny", str(make_second(tmp_path / "other")))
        entries = [
            {"base_model": path, "served_model_names": [name], "external_inference_url": upstream.url}
            for name, path in zip(NAMES, paths, strict=True)
        ]
        flags = ("--database-url", url, "--api-processes", "2", "--base-models", json.dumps(entries))
        with ready(MortalServer(tmp_path / "state", *flags)) as running:
            wait_all(running)
            yield running


def test_an_engine_that_dies_takes_only_its_own_training_away(server: MortalServer, url: str) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as client:
        trainers = [client.create_lora_training_client(base_model=name, rank=4, seed=3).result() for name in NAMES]
        before = [train(trainer, DATA, 2, 1e-3) for trainer in trainers]
        assert before[0] != before[1], "they train different base models"
        victim = server.engine_of("first")
        beside: list[float] = []
        training = threading.Thread(target=lambda: beside.extend(train(trainers[1], DATA, MANY, 1e-3)))
        training.start()
        victim.kill()
        went_on = train(trainers[0], DATA, 2, 1e-3)
        training.join(SLOW_START_S)
        assert len(beside) == MANY
        assert beside[-1] < beside[0]
        whole = client.create_lora_training_client(base_model="first", rank=4, seed=3).result()
        assert train(whole, DATA, 4, 1e-3) == [*before[0], *went_on], "the death changed no step"
    states = rows_in(url, "select base_model, training_ready from engine_state")
    assert sorted(states) == [(name, True) for name in NAMES]
    assert rows_in(url, "select count(*) from futures where status <> 'done'") == [(0,)]
