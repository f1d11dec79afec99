"""What kills an engine - a command that is poison, a rank that dies, a device that breaks - is told to the next engine,
which goes on with all models. `test_failed_commands` tests running out of memory, which is no death."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import Harness, Trainer, data, harness_in
from torch import Tensor

from skyrl.base.types.requests import Kind
from skyrl.engine import main
from skyrl.storage.checkpoint_store.base import StoreError
from skyrl.trainer import device
from skyrl.trainer.losses import LOSSES, Loss, LossInputs, LossValue, importance_sampling
from skyrl.trainer.protocol import DeviceFault, RankDied


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


PASS = {"forward_backward_input": {"data": data(7), "loss_fn": "cross_entropy"}}
STEP = {"adam_params": {"learning_rate": 0.01, "grad_clip_norm": 1.0}}


def lose_a_rank(harness: Harness, method: str, *, half_done: bool = False) -> list[str]:
    """From now on every call of this method of the backend raises. Returns a list of the threads that called the
    method."""
    act: Callable[..., Any] = getattr(harness.backend, method)
    threads: list[str] = []

    def die(*arguments: Any, **options: Any) -> None:
        threads.append(threading.current_thread().name)
        if half_done:
            act(*arguments, **options)
        raise RankDied("rank 1 has ended with exit code -9")

    setattr(harness.backend, method, die)
    return threads


def running_at_death(harness: Harness) -> list[str]:
    return json.loads(harness.config.running_file.read_text().partition("\n")[0])["running"]


@pytest.mark.parametrize("half_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("kind", "method", "thread", "body"),
    [
        (Kind.FORWARD_BACKWARD, "run", "backend", PASS),
        (Kind.OPTIM_STEP, "optim_step", "backend", STEP),
        (Kind.SAVE_WEIGHTS, "save_state", "files", {"path": "name"}),
        (Kind.SAVE_WEIGHTS_FOR_SAMPLER, "save_adapter", "files", {"path": "name"}),
    ],
    ids=["pass", "step", "save", "save-for-sampler"],
)
async def test_a_rank_that_dies_during_a_command_ends_the_engine_and_loses_nothing(
    harness: Harness, tmp_path: Path, kind: Kind, method: str, thread: str, body: dict[str, Any], half_done: bool
) -> None:
    other, trainer = await Trainer.create(harness, seed=2), await Trainer.create(harness)
    for each in (other, trainer):
        await each.step(1)
        await each.result(await each.forward_backward(2))
    threads = lose_a_rank(harness, method, half_done=half_done)
    request_id = await trainer.send(kind, **body)
    await harness.wait_until_killed(RankDied)
    assert [name.rpartition("_")[0] for name in threads] == [thread]
    assert running_at_death(harness) == [request_id]
    assert await harness.store.wait(request_id, "tenant", 0.0) is None, "the command is still pending"
    unharmed = await other.optim_step()
    await harness.start()
    await trainer.result(request_id)
    assert (await other.result(unharmed))["metrics"]["optimizer_step"] == 2
    states = [await each.state() for each in (other, trainer)]
    async with harness_in(tmp_path / "steady") as steady:
        await steady.start()
        for seed, state in ((2, states[0]), (1, states[1])):
            each = await Trainer.create(steady, seed=seed)
            await each.step(1)
            await each.result(await each.forward_backward(2))
            await (each.do(Kind.OPTIM_STEP, **STEP) if seed == 2 else each.do(kind, **body))
            assert await each.state() == state


async def test_a_rank_that_dies_during_a_snapshot_ends_the_engine_and_the_earlier_snapshot_stays(
    tmp_path: Path,
) -> None:
    async with harness_in(tmp_path / "state", snapshot_interval_s=1e-9) as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.step(1)
        await trainer.step(2)
        before = await trainer.state()
        (snapshot,) = harness.config.snapshots_dir.glob("*/*")
        lose_a_rank(harness, "save_snapshot", half_done=True)
        request_id = await trainer.send_step(3)
        await harness.wait_until_killed(RankDied)
        assert (await trainer.result(request_id))["metrics"]["optimizer_step"] == 3, (
            "the step was settled before the snapshot"
        )
        assert list(harness.config.snapshots_dir.glob("*/*")) == [snapshot]
        await harness.start()
        assert await trainer.state() != before
        assert (await trainer.step(4))["optimizer_step"] == 4


@pytest.mark.parametrize("method", ["restore_model", "run"], ids=["from its snapshot", "from its commands"])
async def test_a_rank_that_dies_during_restoration_ends_the_engine(harness: Harness, method: str) -> None:
    """While a rank dies at each start, the engine dies too. Two deaths with one model fail that model, so engines can
    start again."""
    trainer, other = await Trainer.create(harness), await Trainer.create(harness, seed=2)
    await trainer.step(1)
    await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, trainer.seq_id + 1))
    await trainer.step(2)
    before = await other.state()
    await harness.crash()
    for _ in range(2):
        with pytest.raises(RankDied):
            await harness.start(lambda harness: lose_a_rank(harness, method))
        harness.close_after_failed_start()
        assert harness.model_row(trainer.model_id).status == "ready"
        (key,) = running_at_death(harness)
        assert key.startswith("snapshot " if method == "restore_model" else "again ")
    await harness.start()
    assert harness.model_row(trainer.model_id).status == "failed"
    assert await other.state() == before


async def test_a_rank_that_dies_while_retrying_a_waiting_model_ends_the_engine(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, trainer.seq_id + 1))
    before = await trainer.state()
    await harness.crash()
    monkeypatch.setattr(main, "RETRY_S", 0.01)

    def fail_once_then_lose_a_rank(harness: Harness) -> None:
        def away(*_: Any) -> None:
            lose_a_rank(harness, "restore_model")
            raise StoreError("the store is away")

        harness.backend.restore_model = away  # type: ignore[method-assign]

    await harness.start(fail_once_then_lose_a_rank, run=lambda parts: main.run_until_stopped(parts, []))
    await harness.wait_until_killed(RankDied)
    assert harness.model_row(trainer.model_id).status == "ready"
    await harness.start()
    assert await trainer.state() == before


POISON = 666.0


class Device:
    """Stands for a GPU: after a failed kernel nothing works until a new process uses the device."""

    def __init__(self) -> None:
        self.broken = False
        self.says_so_at_once = True

    def synchronize(self, where: torch.device) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def fail(self) -> None:
        self.broken = True
        if self.says_so_at_once:
            raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device that the loss importance_sampling breaks if an advantage is 666."""
    gpu = Device()
    monkeypatch.setattr(device, "synchronize", gpu.synchronize)

    def breaking(lp: Tensor, inputs: LossInputs, config: Any) -> LossValue:
        if (inputs["advantages"] == POISON).any():
            gpu.fail()
        return importance_sampling(lp, inputs, config)

    monkeypatch.setitem(LOSSES, "importance_sampling", Loss(breaking, ("logprobs", "advantages")))
    return gpu


@pytest.fixture
async def harness(tmp_path: Path, gpu: Device) -> AsyncIterator[Harness]:
    async with harness_in(tmp_path / "state") as harness:
        await harness.start()
        yield harness


def datum(advantage: float) -> dict[str, Any]:
    def floats(value: float) -> dict[str, Any]:
        return {"data": [value] * 3, "dtype": "float32", "shape": [3]}

    inputs = {"target_tokens": {"data": [1, 2, 3], "dtype": "int64", "shape": [3]}}
    inputs |= {"logprobs": floats(-6.0), "advantages": floats(advantage)}
    return {"model_input": {"chunks": [{"tokens": [5, 6, 7]}]}, "loss_fn_inputs": inputs}


async def send_pass(trainer: Trainer, advantage: float) -> str:
    given = {"data": [datum(advantage)], "loss_fn": "importance_sampling"}
    return await trainer.send(Kind.FORWARD_BACKWARD, forward_backward_input=given)


def commands_blamed(harness: Harness) -> list[str]:
    """The commands that ran when the engine died."""
    return json.loads(harness.config.running_file.read_text().partition("\n")[0])["running"]


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "later"])
async def test_a_device_fault_in_a_pass_ends_the_engine_and_loses_nothing(
    harness: Harness, gpu: Device, at_once: bool, tmp_path: Path
) -> None:
    """A fault that shows after the kernel was started is also blamed on the command that started the kernel."""
    other, culprit = await Trainer.create(harness), await Trainer.create(harness, seed=2)
    for trainer in (other, culprit):
        await trainer.step(1)
    gpu.says_so_at_once = at_once
    request_id = await send_pass(culprit, POISON)
    await harness.wait_until_killed(DeviceFault)
    assert commands_blamed(harness) == [request_id]
    unharmed = await other.send_step(2)
    gpu.broken = False
    await harness.start()
    await harness.wait_until_killed(DeviceFault)
    gpu.broken = False
    await harness.start()
    outcome = await culprit.outcome(request_id)
    assert "the engine died 2 times while it ran this command" in (outcome.error or "")
    assert (await other.result(unharmed))["metrics"]["optimizer_step"] == 2
    assert (await culprit.step(2))["optimizer_step"] == 2
    states = [await trainer.state() for trainer in (other, culprit)]
    async with harness_in(tmp_path / "steady") as steady:
        await steady.start()
        for seed, files in ((1, states[0]), (2, states[1])):
            trainer = await Trainer.create(steady, seed=seed)
            await trainer.step(1)
            await trainer.step(2)
            assert await trainer.state() == files


async def test_an_error_on_a_device_that_still_works_fails_one_command(
    harness: Harness, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await Trainer.create(harness)

    def fail() -> None:
        raise RuntimeError("CUDA error: invalid configuration argument")

    monkeypatch.setattr(gpu, "fail", fail)
    outcome = await trainer.outcome(await send_pass(trainer, POISON))
    assert outcome.error_category == "server"
    assert (await trainer.step(1))["optimizer_step"] == 1
