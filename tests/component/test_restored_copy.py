"""A copy of a state directory is served beside the original, or after it: nothing of the original is touched."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_world import World, world_in
from engine_harness import Trainer, files_in, swept
from fake_upstream import FakeUpstream
from sqlalchemy import select, text, update

from alembic import command
from skyrl.adapters import adapter_location
from skyrl.api.tokens import tenant_of_key
from skyrl.db.adapter_versions import samplers
from skyrl.db.checkpoints import checkpoints
from skyrl.db.database import Database
from skyrl.db.migrate import _config
from skyrl.engine import reclaim
from skyrl.engine.adoption import adopt_adapters
from skyrl.futures.kinds import Kind
from tests.postgres_server import ON_SQLITE

pytestmark = ON_SQLITE

State = dict[str, tuple[int, bytes]]


def state_of(directory: Path) -> State:
    """Everything below a directory: times of change, and contents."""
    return {
        str(path.relative_to(directory)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(directory.rglob("*"))
    }


async def work(world: World, trainer: Trainer, number: int) -> None:
    """Every kind of save, training, and a sweep."""
    await trainer.step(number)
    await trainer.do(Kind.SAVE_WEIGHTS, path=f"state-{number}")
    await trainer.do(Kind.SAVE_WEIGHTS_EXTERNAL, path=f"export-{number}")
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path=f"named-{number}")
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=number)
    world.harness.snapshots.take(trainer.model_id, trainer.seq_id + 1)
    await swept(world.harness.engine)


async def sample(world: World, sampler: str, upstream: FakeUpstream) -> str:
    """Sample from it; returns the path from which the inference server was told to load the adapter."""
    upstream.adapters = set()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    promise = await world.post("asample", body)
    outcome = await world.services.store.wait(promise["request_id"], tenant_of_key("tml-one"), 60.0)
    assert outcome is not None
    assert outcome.error is None, outcome.error
    return upstream.loads[-1].json["lora_path"]


def as_before_0006(state_dir: Path, written_in: Path) -> None:
    """The database as an older version left it: with absolute paths."""
    database = Database(f"sqlite:///{state_dir / 'skyrl.db'}")
    command.downgrade(_config(database.url), "0005")
    for table, column in (("sampling_sessions", "adapter_path"), ("checkpoints", "directory")):
        change = f"UPDATE {table} SET {column} = '{written_in}/' || {column} WHERE {column} IS NOT NULL"
        database.write(lambda c, change=change: c.execute(text(change)))
    database.close()


@pytest.mark.parametrize("rows", ["of this version", "of an older version"])
@pytest.mark.parametrize("original", ["is there", "is gone"])
async def test_a_served_copy_leaves_the_original_alone(
    tmp_path: Path, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch, original: str, rows: str
) -> None:
    monkeypatch.setattr(reclaim, "GRACE_S", 0.0)
    here, copy = tmp_path / "live one", tmp_path / "restored"
    options: dict[str, Any] = {"external_inference_url": upstream.url}
    async with world_in(here, **options) as world:
        trainer = await world.trainer()
        await work(world, trainer, 1)
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="deleted")
    if rows == "of an older version":
        as_before_0006(here, here)
    shutil.copytree(here, copy, symlinks=True)
    if original == "is gone":
        here.rename(tmp_path / "elsewhere")
        here = tmp_path / "elsewhere"
    before = state_of(here)

    async with world_in(copy, **options) as world:
        again = Trainer(world.harness, trainer.session, trainer.model_id, trainer.seq_id)
        path = f"tinker://{trainer.model_id}/sampler_weights/named-1"
        wanted = {"session_id": trainer.session.id, "sampling_session_seq_id": 50, "model_path": path}
        shutil.rmtree(copy / adapter_location(trainer.model_id, 1))
        named = (await world.post("create_sampling_session", wanted))["sampling_session_id"]
        assert await sample(world, named, upstream) == str(copy / adapter_location(trainer.model_id, 1))
        unnamed = f"{trainer.session.id}:sample:1"
        assert await sample(world, unnamed, upstream) == str(copy / adapter_location(trainer.model_id, 2))
        assert files_in(upstream.loads[-1].json["lora_path"])
        await work(world, again, 2)
        world.harness.database.write(lambda c: c.execute(checkpoints.delete().where(checkpoints.c.name == "deleted")))
        await swept(world.harness.engine)
        await swept(world.harness.engine)
        assert sorted(path.name for path in world.harness.config.adapters_dir.glob("*/*")) == [
            f"v{number:06d}" for number in (1, 2, 4, 5)
        ]
    assert state_of(here) == before
    assert original == "is there" or not (tmp_path / "live one").exists()


async def test_paths_outside_the_state_directory_stay_and_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_in(tmp_path / "state") as world:
        trainer = await world.trainer()
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=1)
        harness = world.harness
        harness.database.write(lambda c: c.execute(update(samplers).values(adapter_path="/elsewhere/lora")))
        with caplog.at_level(logging.WARNING):
            adopt_adapters(harness.config, harness.database, harness.checkpoint_store)
    assert "sampling_sessions has paths outside the state directory (1, such as /elsewhere/lora)" in caplog.text


async def test_sizes_of_older_adapters_are_measured_at_the_start(tmp_path: Path) -> None:
    async with world_in(tmp_path / "state") as world:
        trainer, harness = await world.trainer(), world.harness
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=1)
        query = select(samplers.c.size_bytes)
        size = harness.database.read(lambda c: c.execute(query).scalar_one())
        harness.database.write(lambda c: c.execute(update(samplers).values(size_bytes=None)))
        adopt_adapters(harness.config, harness.database, harness.checkpoint_store)
        directory = harness.adapter(adapter_location(trainer.model_id, 1))
        assert harness.database.read(lambda c: c.execute(query).scalar_one()) == size
        assert size == sum(map(len, files_in(directory).values())) > 0
