"""A copy of a state directory is served beside the original or after it. The original stays unchanged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_world import World, world_in
from engine_harness import Trainer, files_in
from fake_upstream import FakeUpstream

from skyrl.api.access import tenant_of_key
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion
from skyrl.engine import sweeping
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db.checkpoints import checkpoints
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


@pytest.mark.parametrize("original", ["is there", "is gone"])
async def test_serving_a_copy_leaves_the_original_unchanged(
    tmp_path: Path, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch, original: str
) -> None:
    monkeypatch.setattr(sweeping, "GRACE_S", 0.0)
    here, copy = tmp_path / "live one", tmp_path / "restored"
    options: dict[str, Any] = {"external_inference_url": upstream.url}
    async with world_in(here, **options) as world:
        trainer = await world.trainer()
        await train_and_save(world, trainer, 1)
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="deleted")
    shutil.copytree(here, copy, symlinks=True)
    if original == "is gone":
        here.rename(tmp_path / "elsewhere")
        here = tmp_path / "elsewhere"
    before = state_of(here)

    async with world_in(copy, **options) as world:
        again = Trainer(world.harness, trainer.session, trainer.model_id, trainer.seq_id)
        path = f"tinker://{trainer.model_id}/sampler_weights/named-1"
        wanted = {"session_id": trainer.session.id, "sampling_session_seq_id": 50, "model_path": path}
        first, second = (version_directory(copy, AdapterVersion.of(trainer.model_id, number)) for number in (1, 2))
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
        assert [path.name for path in world.harness.versions(trainer.model_id)] == [
            f"v{number:06d}" for number in (1, 2, 4, 5)
        ]
    assert state_of(here) == before
    assert original == "is there" or not (tmp_path / "live one").exists()
