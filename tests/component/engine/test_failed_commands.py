"""Commands that fail by a fault of the server: the model, its files and a restart are as if the command had never come.
The client gets a message without internals."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_harness import Harness, Trainer, data, harness_in

from skyrl.base.types.requests import Kind
from skyrl.engine import recovery
from skyrl.engine.command_log import OUT_OF_MEMORY
from skyrl.storage.db.futures import Outcome
from skyrl.trainer import adamw
from skyrl.trainer.lora import files as state_module
from skyrl.trainer.protocol import DeviceFault, OutOfMemory
from tests.failures import FailingLine, FailingOperation
from tests.local_ranks import rank_of

HUGE = {"data": [3e36] * 4, "dtype": "float32", "shape": [4]}


async def restart(harness: Harness, prepare: Callable[[Harness], None] = lambda _: None) -> None:
    await harness.crash()
    await harness.start(prepare)


class FailingCall:
    """The next call of one method of the backend fails at a chosen point, on whatever thread it runs."""

    def __init__(self, harness: Harness, method: str) -> None:
        self.failed = False
        self._harness = harness
        self._method = method

    def at(self, failing: FailingOperation | FailingLine) -> None:
        act = getattr(self._harness.backend, self._method)

        def act_once(*arguments: Any, **options: Any) -> Any:
            setattr(self._harness.backend, self._method, act)
            with failing:
                try:
                    return act(*arguments, **options)
                finally:
                    self.failed = failing.failed

        setattr(self._harness.backend, self._method, act_once)


def expect_out_of_memory(outcome: Outcome) -> None:
    assert (outcome.error, outcome.error_category) == (OUT_OF_MEMORY, "server")


STEP = {"learning_rate": 0.01, "weight_decay": 0.2, "grad_clip_norm": 0.1}


async def test_a_step_that_runs_out_of_memory_changes_nothing_even_after_a_restart(harness: Harness) -> None:
    """The step fails at each of its allocations in turn. The model stays the same, and is the same to the last bit
    after a restart. test_torch_lora_memory has steps of other forms."""
    trainer = await Trainer.create(harness)
    await trainer.result(await trainer.forward_backward(7))
    before = await trainer.state()
    at = 0
    for at in itertools.count():
        failing = FailingCall(harness, "optim_step")
        failing.at(FailingOperation(at, allocating=True))
        outcome = await trainer.outcome(await trainer.send(Kind.OPTIM_STEP, adam_params=STEP))
        if outcome.error is None:
            assert not failing.failed
            break
        expect_out_of_memory(outcome)
        assert await trainer.state() == before, f"allocation {at}"
        await harness.sessions.beat(trainer.session)  # a slow machine may take minutes
        await restart(harness)
        assert await trainer.state() == before, f"operation {at}, after a restart"
    assert at >= 4
    after = await trainer.state()
    assert after != before
    await harness.sessions.beat(trainer.session)
    await restart(harness)
    assert await trainer.state() == after


async def test_a_step_that_fails_in_its_arithmetic_ends_the_engine_and_runs_after_the_restart(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await trainer.result(await trainer.forward_backward(2))
    step_chunk = adamw._step_chunk

    def step_and_fail(*arguments: Any) -> None:
        step_chunk(*arguments)
        raise RuntimeError("CUDA error: invalid device function")

    with monkeypatch.context() as patch:
        patch.setattr(adamw, "_step_chunk", step_and_fail)
        request_id = await trainer.send(Kind.OPTIM_STEP, adam_params=STEP)
        await harness.wait_until_killed(DeviceFault)
    await harness.start()
    await trainer.result(request_id)
    after = await trainer.state()
    async with harness_in(tmp_path / "steady") as steady:
        await steady.start()
        trainer = await Trainer.create(steady)
        await trainer.step(1)
        await trainer.result(await trainer.forward_backward(2))
        await trainer.result(await trainer.send(Kind.OPTIM_STEP, adam_params=STEP))
        assert await trainer.state() == after


@pytest.mark.parametrize("kind", [Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER, Kind.SAVE_WEIGHTS_EXTERNAL])
async def test_a_save_that_fails_at_any_point_leaves_no_file_and_no_row(harness: Harness, kind: Kind) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await trainer.result(await trainer.forward_backward(2))
    before = await trainer.state()
    method = "save_state" if kind is Kind.SAVE_WEIGHTS else "save_adapter"
    places = (harness.config.adapters_dir, harness.config.state_dir / "checkpoints")
    step = 7  # test_out_of_memory tries every point
    at, failing = 0, FailingCall(harness, method)
    for at in itertools.count(0, step):
        failing = FailingCall(harness, method)
        failing.at(FailingLine(at, [state_module]))
        outcome = await trainer.outcome(await trainer.send(kind, path="name"))
        if outcome.error is None:
            break
        expect_out_of_memory(outcome)
        assert harness.checkpoint_rows(trainer.model_id) == []
        assert [file for place in places for file in place.rglob("*") if file.is_file()] == []
        assert await trainer.state() == before
    assert not failing.failed
    assert at >= 2 * step
    (row,) = harness.checkpoint_rows(trainer.model_id)
    saved = harness.stored(row)
    assert set(saved) >= {"adapter_model.safetensors", "adapter_config.json"}
    assert saved["adapter_model.safetensors"] == before["adapter_model.safetensors"]
    await harness.sessions.beat(trainer.session)  # a slow machine has taken minutes
    await restart(harness)
    assert await trainer.state() == before


async def test_a_failed_snapshot_keeps_the_snapshot_before_it(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, trainer.seq_id + 1))
    await trainer.step(2)
    after = await trainer.state()
    at = 0
    for at in itertools.count(0, 3):
        failing = FailingCall(harness, "save_snapshot")
        failing.at(FailingLine(at, [state_module]))
        try:
            await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, trainer.seq_id + 1))
        except MemoryError:
            (snapshot,) = (harness.config.snapshots_dir).glob("*/*")
            assert snapshot.name == "4"
            continue
        break
    assert at > 3
    await restart(harness)
    assert await trainer.state() == after


async def test_internal_errors_are_logged_and_not_shown_to_the_client(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("cannot open /srv/skyrl/state at postgres://user:password@host")

    trainer = await Trainer.create(harness)
    await trainer.step(1)
    commands: list[tuple[str, Kind, dict[str, Any]]] = [
        ("run", Kind.FORWARD_BACKWARD, {"forward_backward_input": {"data": data(1), "loss_fn": "cross_entropy"}}),
        ("optim_step", Kind.OPTIM_STEP, {}),
        ("save_adapter", Kind.SAVE_WEIGHTS_FOR_SAMPLER, {"path": "name"}),
    ]
    for method, kind, body in commands:
        with monkeypatch.context() as patch:
            patch.setattr(harness.backend, method, broken)
            request_id = await trainer.send(kind, **body)
            outcome = await trainer.outcome(request_id)
        assert outcome.error_category == "server"
        assert outcome.error == (
            f"the server failed while it ran this command; the server's log says why, under {request_id}"
        )
        (record,) = [one for one in caplog.records if request_id in one.getMessage() and one.exc_info]
        assert "password" in str(record.exc_info)
    refused = await trainer.fails(Kind.OPTIM_STEP, adam_params={"learning_rate": -1})
    assert (refused.error or "").startswith("adam_params.learning_rate: must be"), (
        "the message of a user error reaches the user"
    )


async def overflow(trainer: Trainer) -> None:
    """Run two passes with finite losses whose gradients exceed float32 in sum."""
    (datum,) = data(5, 4)
    datum["loss_fn_inputs"]["weights"] = HUGE
    for _ in range(2):
        given = {"data": [datum], "loss_fn": "cross_entropy"}
        await trainer.do(Kind.FORWARD_BACKWARD, forward_backward_input=given)


def with_gradients(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Harness], None]:
    """A backend that rounds differently: it applies `change` to the gradient after every batch of passes."""

    def prepare(harness: Harness) -> None:
        backend = harness.backend
        run = backend.run

        def run_and_change(passes: Any) -> Any:
            outcomes = run(passes)
            for adapter in rank_of(backend).adapters.values():
                if adapter.gradient is not None:
                    adapter.gradient = change(adapter.gradient)
            return outcomes

        backend.run = run_and_change  # type: ignore[method-assign]

    return prepare


def finite(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.nan_to_num(0.0, 1.0, -1.0).clamp(-1, 1)


async def test_recovery_does_not_apply_a_step_that_was_not_finite_even_if_rounding_differs(harness: Harness) -> None:
    """Recovery must tell this step from a step that was refused: a refused step keeps its gradient."""
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await overflow(trainer)
    outcome = await trainer.fails(Kind.OPTIM_STEP, adam_params={"learning_rate": 0.01})
    assert "the accumulated gradient has norm" in (outcome.error or "")
    await trainer.result(await trainer.forward_backward(3))
    await trainer.fails(Kind.OPTIM_STEP, adam_params={"beta1": 7})
    other = await trainer.fails(Kind.OPTIM_STEP, optimizer_params={"type": "dimuon", "learning_rate": 0.01})
    assert other.error == "optimizer_params: this model's optimizer is AdamW; send AdamParams"
    before = await trainer.state()
    assert any("optimizer" in name for name in before)
    await restart(harness)
    assert await trainer.state() == before

    await restart(
        harness, with_gradients(lambda gradient: gradient if gradient.abs().max() < 1e30 else finite(gradient))
    )
    assert harness.model_row(trainer.model_id).status == "ready"
    assert await trainer.state() == before


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "exact"])
async def test_a_step_that_fails_when_repeated_fails_its_model_only_if_repeats_are_exact(
    tmp_path: Path, merged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with harness_in(tmp_path / "state", backend_config={"trainer": {"merge_passes": merged}}) as harness:
        await harness.start()
        assert harness.backend.repeats_exactly == (not merged)
        trainer = await Trainer.create(harness)
        await trainer.step(1)
        await restart(harness, with_gradients(lambda gradient: gradient * torch.inf))
        if merged:
            assert "command 3 succeeded before and fails when repeated" in caplog.text
            await restart(harness)
            assert (await trainer.step(2))["optimizer_step"] == 2
        else:
            assert harness.model_row(trainer.model_id).status == "failed"


async def test_a_model_without_memory_at_recovery_waits_and_other_models_train(harness: Harness) -> None:
    short = [True]

    def without_memory(harness: Harness) -> None:
        run = harness.backend.run

        def run_or_fail(passes: Any) -> Any:
            with FailingOperation(60 if short[0] and passes[0].model_id == waits.model_id else 10**9):
                return run(passes)

        harness.backend.run = run_or_fail  # type: ignore[method-assign]

    waits, other = await Trainer.create(harness), await Trainer.create(harness, seed=2)
    for trainer in (waits, other):
        await trainer.step(1)
    before = await waits.state()
    await restart(harness, without_memory)
    assert (await other.step(2))["optimizer_step"] == 2
    queued = await waits.send_step(2)
    await harness.recovery.retry()
    assert harness.model_row(waits.model_id).status == "ready"
    short[0] = False
    harness.recovery._spared_until = 0.0
    await harness.recovery.retry()
    assert (await waits.result(queued))["metrics"]["optimizer_step"] == 2
    async with harness_in(harness.config.state_dir.parent / "steady") as steady:
        await steady.start()
        undisturbed = await Trainer.create(steady)
        await undisturbed.step(1)
        assert await undisturbed.state() == before
        await undisturbed.step(2)
        assert await undisturbed.state() == await waits.state()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), PermissionError("not allowed")])
async def test_a_model_whose_files_cannot_be_read_now_waits(
    harness: Harness, error: OSError, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    before = await trainer.state()
    await harness.stop()
    fails = [True]

    def unreadable(harness: Harness) -> None:
        restore = harness.backend.restore_model

        def restore_or_fail(*given: Any) -> None:
            if fails[0]:
                raise error
            restore(*given)

        harness.backend.restore_model = restore_or_fail  # type: ignore[method-assign]

    await harness.start(unreadable)
    queued = await trainer.send_step(2)
    await harness.recovery.retry()
    assert harness.model_row(trainer.model_id).status == "ready"
    assert f"waits until its files can be read, and written where that is needed: {error}" in caplog.text
    fails[0] = False
    harness.recovery._spared_until = 0.0
    await harness.recovery.retry()
    assert (await trainer.result(queued))["metrics"]["optimizer_step"] == 2
    assert await trainer.state() != before


async def test_settings_that_refuse_a_model_make_it_wait_for_another_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a snapshot or its commands bring it back. It loses nothing."""
    low = {"backend_config": {"trainer.policy.model.lora.max_lora_rank": 1}}
    async with harness_in(tmp_path / "state") as harness:
        await harness.start()
        stopped, killed = await Trainer.create(harness), await Trainer.create(harness, seed=2)
        await stopped.step(1)
        await harness.stop()
        await harness.start()
        await killed.step(1)
        states = [await trainer.state() for trainer in (stopped, killed)]
        await harness.crash()
    async with harness_in(tmp_path / "state", **low) as harness:
        await harness.start()
        await harness.recovery.retry()
        for trainer in (stopped, killed):
            assert harness.model_row(trainer.model_id).status == "ready"
            says = f"model {trainer.model_id} waits for a start with settings that allow it"
            assert [says in record.getMessage() for record in caplog.records].count(True) == 1
        assert (await Trainer.create(harness, rank=1)).creating
        await harness.crash()
    async with harness_in(tmp_path / "state") as harness:
        await harness.start()
        for trainer in (stopped, killed):
            trainer.harness = harness
        assert [await trainer.state() for trainer in (stopped, killed)] == states


async def test_retries_for_a_model_without_memory_leave_most_time_to_other_models(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try takes a minute on the backend's thread until it runs out of memory."""
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    now, tries = 1000.0, 0

    def without_memory(harness: Harness) -> None:
        def fail(*_: Any) -> None:
            nonlocal now, tries
            now, tries = now + 60.0, tries + 1
            raise OutOfMemory("out of memory")

        harness.backend.create_model = fail  # type: ignore[method-assign]

    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    await restart(harness, without_memory)
    assert tries == 1
    await harness.recovery.retry()
    assert tries == 2
    for wait_s in (0.0, 9 * 60.0 - 1):
        now += wait_s
        await harness.recovery.retry()
    assert tries == 2
    now += 2
    await harness.recovery.retry()
    assert tries == 3
    assert harness.model_row(trainer.model_id).status == "ready"
