"""A number that never arrives: the commands behind it fail after a bound, nothing runs out of order, and the model goes
on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_harness import Harness, Trainer, harness_in
from test_unload import unload

from skyrl.base.types.requests import Kind
from skyrl.engine import loop

TIMEOUT_S = 0.1
NEVER_CAME = "command 2 of this model has not arrived within 0.1 s"
UNREACHED_TIMEOUT_S = 60.0


@pytest.fixture
async def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    monkeypatch.setattr(loop, "SAFETY_POLL_S", TIMEOUT_S / 4)
    async with harness_in(tmp_path / "state", missing_seq_id_timeout_s=UNREACHED_TIMEOUT_S) as harness:
        await harness.start()
        yield harness


async def failure(trainer: Trainer, request_id: str) -> str:
    """The error of a command that was not run. Its category must be `unknown`: recovery takes a step that failed by its
    client's fault for one that has dropped its gradient."""
    outcome = await trainer.outcome(request_id)
    assert outcome.error is not None
    assert outcome.error_category == "unknown"
    return outcome.error


async def with_a_hole(harness: Harness) -> tuple[Trainer, list[str]]:
    """A model that has run command 1, and its commands 3 and 5, which wait."""
    trainer = await Trainer.create(harness)
    await trainer.result(await trainer.forward_backward(1))
    trainer.seq_id = 5
    return trainer, [await trainer.forward_backward(3, 3), await trainer.optim_step(5)]


async def as_without(harness: Harness, trainer: Trainer) -> None:
    """The model must be as one that has only run its first pass and then one step."""
    await trainer.result(await trainer.optim_step())
    alone = await Trainer.create(harness)
    await alone.forward_backward(1)
    await alone.result(await alone.optim_step())
    assert await trainer.state() == await alone.state()


async def test_commands_behind_a_number_that_never_comes_fail_and_name_it(harness: Harness) -> None:
    trainer, waiting = await with_a_hole(harness)
    await harness.queued(2)
    harness.parts.log._gaps.timeout_s = TIMEOUT_S  # not before: command 5 may come long after command 3
    assert all([NEVER_CAME in await failure(trainer, each) for each in waiting])
    assert harness.scheduler.waiting == 0
    await as_without(harness, trainer)


async def test_no_other_model_is_touched_and_an_unload_waits_for_nothing(harness: Harness) -> None:
    trainer, waiting = await with_a_hole(harness)
    other = await Trainer.create(harness)
    unloaded = await unload(trainer)
    await trainer.result(unloaded)
    assert "unloaded" in ((await trainer.outcome(waiting[0])).error or "")
    await other.step(1)
    assert (await other.do(Kind.SAVE_WEIGHTS, path="end"))["path"].endswith("/end")
