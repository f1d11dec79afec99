"""A command that kills the engine whenever it runs is skipped, and only this command is skipped."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Killed, Trainer, harness_in

from skyrl.base.types.requests import Kind
from skyrl.trainer.protocol import TrainingPass


async def start_and_die_of(harness: Harness, poison: str) -> None:
    """Start an engine that dies of this command before the outcome is stored."""
    await harness.start(lambda started: started.kill_before_commit_of(lambda settled: settled == poison))
    await harness.wait_until_killed()


async def expect_skipped(trainer: Trainer, request_id: str) -> None:
    outcome = await trainer.outcome(request_id)
    assert "the engine died 2 times while it ran this command" in (outcome.error or "")
    assert outcome.error_category == "server"


@pytest.mark.parametrize("merged", [False, True], ids=["alone", "merged"])
async def test_a_poison_pass_fails_no_other_pass(tmp_path: Path, merged: bool) -> None:
    """The pass runs in one batch with other passes of its model and, if merged, of another model. Two deaths fail only
    this pass."""
    flags = {"backend_config": {"trainer": {"merge_passes": merged}}}
    async with harness_in(tmp_path / "state", **flags) as harness:
        await harness.start()
        pair = [await Trainer.create(harness, tenant=f"t{seed}", seed=seed) for seed in (1, 2)]
        for trainer in pair:
            await trainer.step(1)
        await harness.crash()
        mine, other = pair
        passes = [await mine.forward_backward(seed) for seed in (2, 3, 4)]
        others = [await other.forward_backward(seed) for seed in (2, 3)]
        steps = [await trainer.optim_step() for trainer in pair]
        poison = passes.pop(1)
        await start_and_die_of(harness, poison)
        await start_and_die_of(harness, poison)

        await harness.start()
        await expect_skipped(mine, poison)
        for trainer, requests in ((mine, [*passes, steps[0]]), (other, [*others, steps[1]])):
            for request_id in requests:
                await trainer.result(request_id)
            await trainer.step(5)
        states = [await trainer.state() for trainer in pair]

    if merged:  # in a merged batch the last bits depend on the other passes
        return
    async with harness_in(tmp_path / "without", **flags) as harness:
        await harness.start()
        for seed, given in ((1, (2, 4)), (2, (2, 3))):
            trainer = await Trainer.create(harness, seed=seed)
            await trainer.step(1)
            for pass_seed in given:
                await trainer.result(await trainer.forward_backward(pass_seed))
            await trainer.result(await trainer.optim_step())
            await trainer.step(5)
            assert await trainer.state() == states[seed - 1]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.OPTIM_STEP, {"adam_params": {"learning_rate": 0.01}}),
        (Kind.SAVE_WEIGHTS, {"path": "name"}),
        (Kind.SAVE_WEIGHTS_FOR_SAMPLER, {"path": "name"}),
    ],
)
async def test_a_skipped_poison_exclusive_command_leaves_its_model_unchanged(
    tmp_path: Path, kind: Kind, body: dict[str, Any]
) -> None:
    async with harness_in(tmp_path / "state") as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.step(1)
        await trainer.result(await trainer.forward_backward(2))
        before = await trainer.state()
        await harness.crash()
        poison = await trainer.send(kind, **body)
        await start_and_die_of(harness, poison)
        await start_and_die_of(harness, poison)
        await harness.start()
        await expect_skipped(trainer, poison)
        assert await trainer.state() == before
        assert harness.checkpoint_rows(trainer.model_id) == []
        assert (await trainer.do(kind, **body))["type"] == kind.lower(), "the next command of the same kind runs"


async def test_a_poison_creation_fails_its_model_and_other_models_go_on(tmp_path: Path) -> None:
    async with harness_in(tmp_path / "state") as harness:
        poison = await Trainer.create(harness, create=False)
        request_id = await poison.send(Kind.CREATE_MODEL, 0)
        await start_and_die_of(harness, request_id)
        await start_and_die_of(harness, request_id)
        await harness.start()
        await expect_skipped(poison, request_id)
        assert harness.model_row(poison.model_id).status == "failed"
        assert "not there any more" in ((await poison.fails(Kind.OPTIM_STEP)).error or "")
        other = await Trainer.create(harness)
        assert (await other.step(1))["optimizer_step"] == 1


async def test_two_deaths_under_different_commands_fail_no_command(tmp_path: Path) -> None:
    """The command that ran at the first death succeeds afterwards, and another command runs at the second death: no
    command is skipped."""
    async with harness_in(tmp_path / "state") as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.step(1)
        await harness.crash()
        for _ in range(3):
            unlucky = await trainer.forward_backward(2)
            await start_and_die_of(harness, unlucky)
            await harness.start()
            await trainer.result(unlucky)
            await harness.crash()


async def test_a_model_fails_if_repeating_its_commands_kills_the_engine_and_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def die_of(harness: Harness) -> None:
        run = harness.backend.run

        def run_or_die(passes: list[TrainingPass]) -> Any:
            if any(one.model_id == poisoned.model_id for one in passes):
                raise Killed
            return run(passes)

        harness.backend.run = run_or_die  # type: ignore[method-assign, assignment]

    async with harness_in(tmp_path / "state") as harness:
        await harness.start()
        poisoned, other = await Trainer.create(harness), await Trainer.create(harness)
        for trainer in (poisoned, other):
            await trainer.step(1)
        before = await other.state()
        await harness.crash()
        for _ in range(2):
            with contextlib.suppress(Killed):
                await harness.start(die_of)
                raise AssertionError("the engine did not die")
        await harness.start(die_of)
        assert harness.model_row(poisoned.model_id).status == "failed"
        assert "the engine died 2 times while command 1 was repeated" in caplog.text
        assert await other.state() == before
        assert (await other.step(2))["optimizer_step"] == 2
