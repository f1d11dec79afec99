"""An engine goes on from snapshots that an earlier version has written.

`snapshot_format_2` was written by a version that stored snapshots with `Backend.save_state`. Its model has run
CREATE_MODEL, two steps of two passes each, and one more pass: commands 0 to 7.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from engine_harness import Harness, Trainer, files_in, harness_in
from sqlalchemy import update

from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import LoraSpec
from skyrl.base.wire.paths import model_id_of
from skyrl.storage.db.models import Model, models

OLD = Path(__file__).parents[1] / "snapshot_format_2"
TENSORS = ("adapter_model.safetensors", "optimizer.safetensors", "state.json")


async def left_by_an_earlier_version(harness: Harness) -> Trainer:
    """The row and the snapshot of a model, as the earlier version left them."""
    session = await harness.sessions.create("tenant", [], None, "")
    adapter = LoraSpec(1, 32.0, 1, train_attn=False, train_mlp=False, train_unembed=True)
    model = Model(model_id_of(session.id, 0), session.id, "tenant", "tiny", adapter, None)
    await harness.models.create(model, 0)
    restorable = update(models).where(models.c.id == model.id).values(status="ready", next_seq=8)
    harness.database.write(lambda c: c.execute(restorable))
    directory = harness.config.snapshots_dir / model.id.replace(":", "=3A") / "8"
    shutil.copytree(OLD, directory)
    return Trainer(harness, session, model.id, seq_id=7)


async def test_a_model_goes_on_from_a_snapshot_of_an_earlier_version(tmp_path: Path) -> None:
    async with harness_in(tmp_path / "state") as harness:
        trainer = await left_by_an_earlier_version(harness)
        await harness.start()
        restored = await trainer.state()
        assert {name: restored[name] for name in TENSORS} == {name: files_in(OLD)[name] for name in TENSORS}
        assert (await trainer.result(await trainer.optim_step()))["metrics"]["optimizer_step"] == 3


async def test_a_checkpoint_of_such_a_model_can_be_downloaded(tmp_path: Path) -> None:
    async with harness_in(tmp_path / "state") as harness:
        trainer = await left_by_an_earlier_version(harness)
        await harness.start()
        await trainer.do(Kind.SAVE_WEIGHTS, path="name")
        (row,) = harness.checkpoint_rows(trainer.model_id)
        assert set(harness.stored(row)) == {*TENSORS, "adapter_config.json"}
