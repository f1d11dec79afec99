"""Which adapters vLLM has, and what becomes of a sample whose adapter was dropped."""

from __future__ import annotations

import time
from typing import Any

import pytest
from api_harness import BASE, LONG_S, Api, Serve, sample_body, session_of, tokens
from fake_upstream import FakeUpstream, error
from sqlalchemy import select, update

from skyrl.base.types.weights import AdapterVersion, BaseWeights, FullWeights
from skyrl.storage.checkpoint_store.versions import version_directory, version_location
from skyrl.storage.db import adapter_versions
from skyrl.storage.db.adapter_versions import samplers
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import publish_state_dir
from skyrl.storage.db.samplers import Sampler, add_sampler
from skyrl.storage.db.sessions import Sessions
from skyrl.storage.db.writer import GroupCommitWriter
from tests.postgres_server import ON_BOTH

NAME = "m1@3"
ADAPTER = AdapterVersion(NAME)
LOCATION = version_location(ADAPTER)
SAYS = "have been deleted: no checkpoint holds them"


async def sampler_on_adapter(api: Api, database: Database) -> str:
    """A sampling session on an unnamed save, created as the engine creates it."""
    session_id = session_of(await api.sampler())
    row = database.read(lambda c: c.execute(select(samplers.c.tenant)).scalar_one())
    sampler = Sampler(f"{session_id}:sample:7", session_id, row, BASE, None, ADAPTER)
    database.write(lambda c: add_sampler(c, sampler, 7, 1000))
    version_directory(api.services.config.state_dir, ADAPTER).mkdir(parents=True)
    return sampler.id


def drop(database: Database, sampler_id: str, at: float | None = None) -> None:
    mine = update(samplers).where(samplers.c.id == sampler_id)
    closed_at = samplers.c.last_used_at if at is None else at
    database.write(lambda c: c.execute(mine.values(status="dropped", closed_at=closed_at)))


@pytest.fixture
def upstream_without_files(upstream: FakeUpstream) -> FakeUpstream:
    """An inference server that has the adapter once and cannot load it again, because the files are deleted."""
    upstream.adapters = {NAME}
    upstream.on_load = error(404, f"No adapter found for {LOCATION}")
    return upstream


async def test_vllm_gets_the_full_path_of_an_adapter(api: Api, upstream: FakeUpstream, database: Database) -> None:
    upstream.adapters = set()
    sampler = await sampler_on_adapter(api, database)
    promise = await api.sample(sampler, 1)
    assert tokens(await api.result(promise["request_id"])) == [[0, 1, 2]]
    (load,) = upstream.loads
    assert load.json == {"lora_name": NAME, "lora_path": str(api.services.config.state_dir / LOCATION)}


async def test_a_gateway_sends_adapter_paths_in_the_training_servers_state_directory(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    upstream.adapters = set()
    database.write(lambda c: publish_state_dir(c, "/the/trainer"))
    async with serve(backend="none", external_inference_url=upstream.url) as gateway:
        promise = await gateway.sample(await sampler_on_adapter(gateway, database), 1)
        assert tokens(await gateway.result(promise["request_id"])) == [[0, 1, 2]]
    assert [load.json["lora_path"] for load in upstream.loads] == [f"/the/trainer/{LOCATION}"]


async def test_a_sample_after_the_drop_is_refused_with_the_reason(
    api: Api, upstream_without_files: FakeUpstream, database: Database
) -> None:
    sampler = await sampler_on_adapter(api, database)
    assert tokens(await api.result((await api.sample(sampler, 1))["request_id"])) == [[0, 1, 2]]
    drop(database, sampler)
    await api.services.samplers.forget_dropped()
    for route, body in (
        ("asample", sample_body(sampler, 2)),
        ("join_sampling_session", {"sampling_session_id": sampler}),
    ):
        refused = await api.post(route, body)
        assert refused.status_code == 404
        assert refused.json()["field"] == "sampling_session_id"
        assert SAYS in refused.json()["detail"]
        assert repr(sampler) in refused.json()["detail"]
    assert len(upstream_without_files.completions) == 1


async def test_a_process_that_missed_the_drop_gives_the_same_reason(
    api: Api, upstream_without_files: FakeUpstream, database: Database
) -> None:
    """The process was stopped for longer than the grace period: vLLM has unloaded the adapter, and its files are
    deleted."""
    sampler = await sampler_on_adapter(api, database)
    assert tokens(await api.result((await api.sample(sampler, 1))["request_id"])) == [[0, 1, 2]]
    drop(database, sampler)
    upstream_without_files.adapters = set()
    failed = (await api.result((await api.sample(sampler, 2))["request_id"])).json()
    assert failed["category"] == "user"
    assert SAYS in failed["error"]


async def test_a_lost_adapter_that_was_not_dropped_is_a_server_error(
    api: Api, upstream_without_files: FakeUpstream, database: Database
) -> None:
    sampler = await sampler_on_adapter(api, database)
    upstream_without_files.adapters = set()
    failed = (await api.result((await api.sample(sampler, 2))["request_id"])).json()
    assert failed["category"] == "server"
    assert "lost adapter" in failed["error"]


async def test_a_process_writes_the_time_of_use_once_and_again_at_its_end(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    query = select(samplers.c.last_used_at).where(samplers.c.weights == ADAPTER)

    def used() -> Any:
        return database.read(lambda c: c.execute(query).scalar_one())

    async with serve() as api:
        sampler = await sampler_on_adapter(api, database)
        database.write(lambda c: c.execute(update(samplers).values(last_used_at=1.0)))
        for number in range(3):
            await api.sample(sampler, number)
        await api.services.sampling.drain(LONG_S)
        assert used() == 1.0, "samples do not write the time of use"
        await api.services.samplers.write_uses()
        assert used() > 1.0
        database.write(lambda c: c.execute(update(samplers).values(last_used_at=1.0)))
        await api.services.samplers.write_uses()
        assert used() == 1.0, "the time stays while there are no samples"
        await api.sample(sampler, 9)
    assert used() > 1.0


NOW = time.time()


def add(
    database: Database, session: str, number: int, adapter: str | None, used_s_ago: float, status: str = "active"
) -> None:
    weights = BaseWeights() if adapter is None else AdapterVersion(adapter)
    sampler = Sampler(f"{session}:sample:{number}", session, "tenant", "tiny", None, weights)
    database.write(lambda c: add_sampler(c, sampler, number))
    at = None if adapter is None else NOW - used_s_ago
    statement = update(samplers).where(samplers.c.id == sampler.id)
    database.write(lambda c: c.execute(statement.values(last_used_at=at, status=status)))


@ON_BOTH
async def test_the_adapters_in_use_are_the_most_recently_sampled_ones(database: Database) -> None:
    writer = GroupCommitWriter(database)
    session = (await Sessions(database, writer).create("tenant", [], None, "")).id
    await writer.close()
    add(database, session, 0, "m@1", 500)
    add(database, session, 1, "m@2", 30)
    add(database, session, 2, "m@1", 10)
    add(database, session, 3, "m@3", 601)
    add(database, session, 4, "m@4", 1, "closed")
    add(database, session, 5, "m@5", 1, "dropped")
    add(database, session, 6, None, 1)
    add(database, session, 7, "n@1", 40)

    def in_use(limit: int) -> list[str]:
        return [adapter.name for adapter in database.read(lambda c: adapter_versions.in_use(c, NOW - 600, limit))]

    assert in_use(8) == ["m@1", "m@2", "n@1"], "each adapter once, ordered by its latest sample"
    assert in_use(2) == ["m@1", "m@2"]
    assert in_use(0) == []
    full = update(samplers).where(samplers.c.id == f"{session}:sample:2").values(weights=FullWeights("step-7"))
    database.write(lambda c: c.execute(full))
    assert in_use(2) == ["m@2", "n@1"], "full weights are not an adapter"
