"""Models taken out of memory by their client: after what was sent before, for good, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from api_harness import BASE, Api
from engine_harness import Harness, Trainer, harness_in, until

from skyrl.backends.base import InvalidRequest
from skyrl.types.kinds import Kind
from skyrl.types.requests import NewRequest

GONE = "is not there any more"


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    async with harness_in(tmp_path / "state", snapshot_interval_s=1e-6) as harness:
        await harness.start()
        yield harness


async def unload(trainer: Trainer) -> str:
    """As the API records it: without a number."""
    request = NewRequest(
        Kind.UNLOAD_MODEL, trainer.session.tenant, trainer.session.id, b"{}", model_id=trainer.model_id
    )
    request_id, new = await trainer.harness.store.record(request)
    assert new
    if trainer.harness.is_running:
        trainer.harness.engine.ring()
    return request_id


async def test_unload_comes_after_what_was_sent_before_it(harness: Harness) -> None:
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
    await until(lambda: trainer.model_id not in harness.backend._adapters)
    with pytest.raises(InvalidRequest):
        await trainer.state()
    await other.step(1)  # who goes on as if nothing had been


async def test_its_numbers_go_on_and_fail_clearly(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.result(await unload(trainer))
    for _ in range(2):
        assert GONE in str((await trainer.fails(Kind.OPTIM_STEP)).error)


async def test_unloading_again_succeeds(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    for _ in range(2):
        assert (await trainer.result(await unload(trainer)))["model_id"] == trainer.model_id


async def test_commands_that_wait_for_a_missing_number_do_not_hold_it_up(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    waiting = await trainer.forward_backward(2, 17)
    await harness.queued(1)
    await trainer.result(await unload(trainer))
    assert GONE in str((await trainer.outcome(waiting)).error)


async def test_what_it_saved_stays_and_its_snapshots_go(harness: Harness) -> None:
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


async def test_engine_that_dies_before_the_unload_is_settled_unloads_when_it_is_back(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await asyncio.sleep(0.01)
    request_id = ""
    harness.kill_before_commit_of(lambda settled: settled == request_id)
    request_id = await unload(trainer)
    await harness.wait_until_killed()
    assert harness.model_row(trainer.model_id).status == "ready"
    await harness.start()
    await trainer.result(request_id)
    assert harness.model_row(trainer.model_id).status == "closed"


async def test_closed_model_is_not_restored(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await trainer.result(await unload(trainer))
    await harness.stop()
    await harness.start()
    assert trainer.model_id not in harness.scheduler
    assert GONE in str((await trainer.fails(Kind.OPTIM_STEP)).error)


async def test_through_the_api_it_is_a_future_of_its_model(api: Api) -> None:
    session = (await api.post("create_session", {})).json()["session_id"]
    wanted: dict[str, Any] = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
    model_id = (await api.post("create_model", wanted)).json()["model_id"]
    promise = (await api.post("unload_model", {"model_id": model_id, "type": "unload_model"})).json()
    assert promise["model_id"] == model_id
    assert isinstance(promise["request_id"], str)
    step = await api.post("optim_step", {"model_id": model_id, "seq_id": 1})
    assert step.status_code == 200, "an unload takes none of the client's numbers"
