"""Servers on PostgreSQL without vLLM: training, samples and saves go on through deaths, and the death of one of two
engines leaves the other's training alone."""

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

from .conftest import cross_entropy, greedy, train
from .mortal_server import MortalServer, Upstream

DATA = [cross_entropy([5, 6, 7, 8, 9, 10])]


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as running:
        yield running


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    """An empty database; the server creates the tables."""
    name = postgres.new_database()
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture
def server(tmp_path: Path, url: str, upstream: Upstream) -> Iterator[MortalServer]:
    flags = ("--database-url", url, "--external-inference-url", upstream.url)
    with ready(MortalServer(tmp_path / "state", *flags)) as running:
        yield running


@pytest.mark.slow
def test_a_server_on_postgresql_trains_samples_and_saves_through_deaths(server: MortalServer, url: str) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
        first = train(trainer, DATA, 3, 1e-3)
        assert first[0] > first[-1]
        saved = trainer.save_state("third").result().path
        engine = server.engine()
        engine.kill()
        engine.wait(SLOW_START_S)
        steady = train(trainer, DATA, 3, 1e-3)
        server.kill_api()
        assert len(greedy(client.create_sampling_client(base_model="tiny").result(), [5, 6, 7])) == 4
        resumed = client.create_training_client_from_state_with_optimizer(saved).result()
        assert train(resumed, DATA, 3, 1e-3) == steady, (
            "a model from the checkpoint trains like the model in memory, in spite of the deaths"
        )
    rest = tinker.RestClient(base_url=server.url, api_key="tml-test")
    listed = rest.list_user_checkpoints().result().checkpoints
    assert [checkpoint.tinker_path for checkpoint in listed] == [saved]
    assert rows_in(url, "select count(*) from futures where status <> 'done'") == [(0,)]
    assert rows_in(url, "select status, count(*) from sessions group by status") == [("finished", 1)]


NAMES = ("first", "second")
MANY = 30


@pytest.fixture
def two_trainers(tmp_path: Path, url: str) -> Iterator[MortalServer]:
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


@pytest.mark.slow
def test_an_engine_that_dies_takes_only_its_own_training_away(two_trainers: MortalServer, url: str) -> None:
    with tinker.ServiceClient(base_url=two_trainers.url, api_key="tml-test") as client:
        trainers = [client.create_lora_training_client(base_model=name, rank=4, seed=3).result() for name in NAMES]
        before = [train(trainer, DATA, 2, 1e-3) for trainer in trainers]
        assert before[0] != before[1], "they train different base models"
        victim = two_trainers.engine_of("first")
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
