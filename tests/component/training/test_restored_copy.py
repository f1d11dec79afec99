"""A copy of a state directory is served beside the original or after it. The original stays unchanged."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_world import World, world_in
from engine_harness import Trainer, files_in
from fake_upstream import FakeUpstream
from sqlalchemy import select, text, update

from alembic import command
from skyrl.api.access import tenant_of_key
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion
from skyrl.engine import sweeping
from skyrl.engine.publishing import adopt_adapters
from skyrl.storage.checkpoint_store.versions import adapter_directory
from skyrl.storage.db.adapter_versions import samplers
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import _config
from tests.postgres_server import ON_SQLITE

pytestmark = ON_SQLITE

State = dict[str, tuple[int, bytes]]


def state_of(directory: Path) -> State:
    """Everything under a directory: modification times and contents."""
    return {
        str(path.relative_to(directory)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(directory.rglob("*"))
    }


async def train_and_save(world: World, trainer: Trainer, number: int) -> None:
    """Train, save in every way, and sweep."""
    await trainer.step(number)
    await trainer.do(Kind.SAVE_WEIGHTS, path=f"state-{number}")
    await trainer.do(Kind.SAVE_WEIGHTS_EXTERNAL, path=f"export-{number}")
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path=f"named-{number}")
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=number)
    world.harness.snapshots.take(trainer.model_id, trainer.seq_id + 1)
    await world.harness.sweep()


async def sample(world: World, sampler: str, upstream: FakeUpstream) -> str:
    """Sample from the sampling session; returns the path from which the inference server was told to load the
    adapter."""
    upstream.adapters = set()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    promise = await world.post("asample", body)
    outcome = await world.services.futures.wait(promise["request_id"], tenant_of_key("tml-one"), 60.0)
    assert outcome is not None
    assert outcome.error is None, outcome.error
    return upstream.loads[-1].json["lora_path"]


def downgrade_to_absolute_paths(state_dir: Path, written_in: Path) -> None:
    """The database as a version before migration 0006 left it: with absolute paths."""
    database = Database(f"sqlite:///{state_dir / 'skyrl.db'}")
    command.downgrade(_config(database.url), "0005")
    for table, column in (("sampling_sessions", "adapter_path"), ("checkpoints", "directory")):
        change = f"UPDATE {table} SET {column} = '{written_in}/' || {column} WHERE {column} IS NOT NULL"
        database.write(lambda c, change=change: c.execute(text(change)))
    database.close()


@pytest.mark.parametrize("rows", ["of this version", "of an older version"])
@pytest.mark.parametrize("original", ["is there", "is gone"])
async def test_serving_a_copy_leaves_the_original_unchanged(
    tmp_path: Path, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch, original: str, rows: str
) -> None:
    monkeypatch.setattr(sweeping, "GRACE_S", 0.0)
    here, copy = tmp_path / "live one", tmp_path / "restored"
    options: dict[str, Any] = {"external_inference_url": upstream.url}
    async with world_in(here, **options) as world:
        trainer = await world.trainer()
        await train_and_save(world, trainer, 1)
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="deleted")
    if rows == "of an older version":
        downgrade_to_absolute_paths(here, here)
    shutil.copytree(here, copy, symlinks=True)
    if original == "is gone":
        here.rename(tmp_path / "elsewhere")
        here = tmp_path / "elsewhere"
    before = state_of(here)

    async with world_in(copy, **options) as world:
        again = Trainer(world.harness, trainer.session, trainer.model_id, trainer.seq_id)
        path = f"tinker://{trainer.model_id}/sampler_weights/named-1"
        wanted = {"session_id": trainer.session.id, "sampling_session_seq_id": 50, "model_path": path}
        first, second = (adapter_directory(copy, AdapterVersion.of(trainer.model_id, number)) for number in (1, 2))
        shutil.rmtree(first)
        named = (await world.post("create_sampling_session", wanted))["sampling_session_id"]
        assert await sample(world, named, upstream) == str(first)
        unnamed = f"{trainer.session.id}:sample:1"
        assert await sample(world, unnamed, upstream) == str(second)
        assert files_in(upstream.loads[-1].json["lora_path"])
        await train_and_save(world, again, 2)
        world.harness.database.write(lambda c: c.execute(checkpoints.delete().where(checkpoints.c.name == "deleted")))
        await world.harness.sweep()
        await world.harness.sweep()
        assert sorted(path.name for path in world.harness.config.adapters_dir.glob("*/*")) == [
            f"v{number:06d}" for number in (1, 2, 4, 5)
        ]
    assert state_of(here) == before
    assert original == "is there" or not (tmp_path / "live one").exists()


async def test_adapters_outside_the_state_directory_are_copied_into_it(tmp_path: Path, upstream: FakeUpstream) -> None:
    """Named and unnamed adapters, from an absolute path and from another place in the state directory."""
    async with world_in(tmp_path / "state", external_inference_url=upstream.url) as world:
        trainer, harness = await world.trainer(), world.harness
        await trainer.step(1)
        elsewhere = {1: tmp_path / "elsewhere" / "lora", 2: harness.config.state_dir / "mine"}
        (tmp_path / "elsewhere").mkdir()
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=1)
        path = (await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="named"))["path"]
        first, second = (AdapterVersion.of(trainer.model_id, number) for number in (1, 2))
        for table, adapter, place in ((samplers, first, str(elsewhere[1])), (checkpoints, second, "mine")):
            harness.adapter(adapter).rename(elsewhere[adapter.number])
            change = update(table).where(table.c.weights == adapter).values(old_directory=place)
            harness.database.write(lambda c, change=change: c.execute(change))
        (row,) = harness.checkpoint_rows(trainer.model_id)
        harness.checkpoint_store.delete(row.store_key)
        harness.database.write(lambda c: c.execute(update(checkpoints).values(store_key=None)))
        before = state_of(tmp_path / "elsewhere")
        adopt_adapters(harness.config, harness.database, harness.checkpoint_store)
        assert state_of(tmp_path / "elsewhere") == before
        for adapter in (first, second):
            assert files_in(harness.adapter(adapter)) == files_in(elsewhere[adapter.number]) != {}
        (row,) = harness.checkpoint_rows(trainer.model_id)
        assert harness.stored(row) == files_in(elsewhere[2])
        assert await sample(world, f"{trainer.session.id}:sample:1", upstream) == str(harness.adapter(first))
        wanted = {"session_id": trainer.session.id, "sampling_session_seq_id": 50, "model_path": path}
        named = (await world.post("create_sampling_session", wanted))["sampling_session_id"]
        assert await sample(world, named, upstream) == str(harness.adapter(second))
        for table in (samplers, checkpoints):
            assert harness.database.read(lambda c, t=table: set(c.execute(select(t.c.old_directory)).scalars())) == {
                None
            }


async def test_an_adapter_that_cannot_be_copied_in_is_logged_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_in(tmp_path / "state") as world:
        trainer, harness = await world.trainer(), world.harness
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=1)
        adapter = AdapterVersion.of(trainer.model_id, 1)
        files = files_in(harness.adapter(adapter))
        harness.adapter(adapter).rename(tmp_path / "unplugged")
        place = str(tmp_path / "disk")
        harness.database.write(lambda c: c.execute(update(samplers).values(old_directory=place)))
        with caplog.at_level(logging.WARNING):
            adopt_adapters(harness.config, harness.database, harness.checkpoint_store)
        assert f"adapter {adapter.name} could not be brought in from {place}" in caplog.text
        assert not harness.adapter(adapter).exists()
        (tmp_path / "unplugged").rename(place)
        adopt_adapters(harness.config, harness.database, harness.checkpoint_store)
        assert files_in(harness.adapter(adapter)) == files


async def test_sizes_of_older_adapters_are_measured_at_the_start(tmp_path: Path) -> None:
    async with world_in(tmp_path / "state") as world:
        trainer, harness = await world.trainer(), world.harness
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=1)
        query = select(samplers.c.size_bytes)
        size = harness.database.read(lambda c: c.execute(query).scalar_one())
        harness.database.write(lambda c: c.execute(update(samplers).values(size_bytes=None)))
        adopt_adapters(harness.config, harness.database, harness.checkpoint_store)
        directory = harness.adapter(AdapterVersion.of(trainer.model_id, 1))
        assert harness.database.read(lambda c: c.execute(query).scalar_one()) == size
        assert size == sum(map(len, files_in(directory).values())) > 0
