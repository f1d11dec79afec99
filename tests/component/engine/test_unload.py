"""A client unloads its model: the unload runs after earlier commands, is final, and touches no other model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from api_harness import BASE, Api
from engine_harness import Harness, Trainer, harness_in, until

from skyrl.base.types.requests import Kind, NewRequest
from skyrl.trainer.protocol import InvalidRequest
from tests.local_ranks import rank_of

GONE = "is not there any more"


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    async with harness_in(tmp_path / "state", snapshot_interval_s=1e-6) as harness:
        await harness.start()
        yield harness


async def unload(trainer: Trainer) -> str:
    """Record the unload as the API records it: without a number."""
    request = NewRequest(
        Kind.UNLOAD_MODEL, trainer.session.tenant, trainer.session.id, b"{}", model_id=trainer.model_id
    )
    request_id, new = await trainer.harness.store.record(request)
    assert new
    if trainer.harness.is_running:
        trainer.harness.engine.ring()
    return request_id


async def test_an_unload_runs_after_earlier_commands(harness: Harness) -> None:
    trainer, other = await Trainer.create(harness), await Trainer.create(harness)
    passes = [await trainer.forward_backward(seed) for seed in range(3)]
    step = await trainer.optim_step()
    request_id = await unload(trainer)
    late = await trainer.forward_backward(9)
    assert await trainer.result(request_id) == {"type": "unload_model", "model_id": trainer.model_id}
    for each in (*passes, step):
        await trainer.result(each)
    outcome = await trainer.outcome(late)
    assert outcome.error is not None
    assert GONE in outcome.error
    assert "unloaded" in outcome.error
    assert outcome.error_category == "user"
    assert harness.model_row(trainer.model_id).status == "closed"
    await until(lambda: trainer.model_id not in rank_of(harness.backend).adapters)
    with pytest.raises(InvalidRequest):
        await trainer.state()
    await other.step(1)  # the other model trains on unchanged


async def test_later_commands_of_an_unloaded_model_fail_with_a_reason(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.result(await unload(trainer))
    for _ in range(2):
        assert GONE in str((await trainer.fails(Kind.OPTIM_STEP)).error)


async def test_a_second_unload_succeeds(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    for _ in range(2):
        assert (await trainer.result(await unload(trainer)))["model_id"] == trainer.model_id


async def test_commands_behind_a_missing_number_do_not_delay_an_unload(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    waiting = await trainer.forward_backward(2, 17)
    await harness.queued(1)
    await trainer.result(await unload(trainer))
    assert GONE in str((await trainer.outcome(waiting)).error)


async def test_an_unload_keeps_checkpoints_and_deletes_snapshots(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    for seed in range(2):  # the first snapshot is taken at the second step
        await trainer.step(seed)
    await trainer.do(Kind.SAVE_WEIGHTS, path="kept")
    snapshots = harness.config.snapshots_dir
    await until(lambda: snapshots.is_dir() and bool(list(snapshots.iterdir())))
    await trainer.result(await unload(trainer))
    await until(lambda: not list(snapshots.iterdir()))
    (row,) = harness.checkpoint_rows(trainer.model_id)
    assert harness.stored(row)


async def test_an_unload_interrupted_by_the_engines_death_runs_in_the_next_engine(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    harness.kill_before_commit_of(lambda _: True)
    request_id = await unload(trainer)
    await harness.wait_until_killed()
    assert harness.model_row(trainer.model_id).status == "ready"
    await harness.start()
    await trainer.result(request_id)
    assert harness.model_row(trainer.model_id).status == "closed"


async def test_a_closed_model_is_not_restored(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await trainer.result(await unload(trainer))
    await harness.stop()
    await harness.start()
    assert trainer.model_id not in harness.scheduler
    assert GONE in str((await trainer.fails(Kind.OPTIM_STEP)).error)


async def test_an_unload_through_the_api_is_a_future_of_its_model(api: Api) -> None:
    session = (await api.post("create_session", {})).json()["session_id"]
    wanted: dict[str, Any] = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
    model_id = (await api.post("create_model", wanted)).json()["model_id"]
    promise = (await api.post("unload_model", {"model_id": model_id, "type": "unload_model"})).json()
    assert promise["model_id"] == model_id
    assert isinstance(promise["request_id"], str)
    step = await api.post("optim_step", {"model_id": model_id, "seq_id": 1})
    assert step.status_code == 200, "an unload uses up none of the client's numbers"
