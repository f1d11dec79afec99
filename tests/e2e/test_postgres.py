"""A whole server on PostgreSQL with the unmodified SDK: it trains, samples and saves, and both its processes are
killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.databases import rows_in
from tests.postgres_server import PostgresServer
from tests.servers import SLOW_START_S, ready

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
