"""A device that breaks during a command: the engine ends, and the next engine goes on with all models.
`test_failed_commands` tests running out of memory, which is not a device fault."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import Harness, Trainer, harness_in
from torch import Tensor

from skyrl.base.types.requests import Kind
from skyrl.engine import main
from skyrl.trainer import device
from skyrl.trainer.lora import files
from skyrl.trainer.losses import LOSSES, Loss, LossInputs, LossValue, importance_sampling
from skyrl.trainer.protocol import DeviceFault, OutOfMemory

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


def break_at(harness: Harness, gpu: Device, method: str) -> None:
    """The next call of this method of the backend breaks the device."""
    act = getattr(harness.backend, method)

    def act_and_break(*arguments: Any, **options: Any) -> Any:
        gpu.broken = True
        return act(*arguments, **options)

    setattr(harness.backend, method, act_and_break)


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


@pytest.mark.parametrize(
    ("kind", "method", "body"),
    [
        (Kind.OPTIM_STEP, "check_step", {"adam_params": {"learning_rate": 0.01}}),
        (Kind.SAVE_WEIGHTS_FOR_SAMPLER, "save_adapter", {"path": "name"}),
        (Kind.SAVE_WEIGHTS, "save_state", {"path": "name"}),
    ],
)
async def test_an_exclusive_command_that_met_a_device_fault_runs_after_the_restart(
    harness: Harness, gpu: Device, kind: Kind, method: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await trainer.result(await send_pass(trainer, 1.0))

    def fail(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    break_at(harness, gpu, method)
    with monkeypatch.context() as patch:
        # a step synchronizes with the device at its end, a save only after an error
        patch.setattr(files, "save_file", fail)
        request_id = await trainer.send(kind, **body)
        await harness.wait_until_killed(DeviceFault)
    assert commands_blamed(harness) == [request_id]
    assert await harness.store.wait(request_id, "tenant", 0.0) is None, "the command is still pending"
    gpu.broken = False
    await harness.start()
    await trainer.result(request_id)
    assert (await trainer.step(2))["optimizer_step"] == (3 if kind is Kind.OPTIM_STEP else 2)


async def test_a_device_fault_during_restoration_is_blamed_on_the_repeated_command(
    harness: Harness, gpu: Device
) -> None:
    """Two such deaths fail that model; the other model goes on. The first death fails no model."""
    poisoned, other = await Trainer.create(harness), await Trainer.create(harness)
    for trainer in (poisoned, other):
        await trainer.step(1)
    before = await other.state()
    await harness.crash()

    def faulty(harness: Harness) -> None:
        run = harness.backend.run

        def run_and_break(passes: Any) -> Any:
            gpu.broken = passes[0].model_id == poisoned.model_id
            return run(passes)

        harness.backend.run = run_and_break  # type: ignore[method-assign]

    for _ in range(2):
        gpu.broken = False
        with pytest.raises(DeviceFault):
            await harness.start(faulty)
        harness.close_after_failed_start()
        assert harness.model_row(poisoned.model_id).status == "ready"
        (blamed,) = commands_blamed(harness)
        assert blamed.startswith("again ")
    gpu.broken = False
    await harness.start(faulty)
    assert harness.model_row(poisoned.model_id).status == "failed"
    assert await other.state() == before


async def test_a_device_fault_while_retrying_a_waiting_model_ends_the_engine(
    harness: Harness, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model waited for memory; the device breaks when there is enough memory."""
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    before = await trainer.state()
    await harness.crash()
    monkeypatch.setattr(main, "RETRY_S", 0.01)

    def short_of_memory(harness: Harness) -> None:
        create_model = harness.backend.create_model

        def create_and_break(*arguments: Any) -> None:
            gpu.broken = True
            create_model(*arguments)

        def raise_once(*arguments: Any) -> None:
            harness.backend.create_model = create_and_break  # type: ignore[method-assign]
            raise OutOfMemory("out of memory")

        harness.backend.create_model = raise_once  # type: ignore[method-assign]

    await harness.start(short_of_memory, run=lambda parts: main.run_until_stopped(parts, []))
    await harness.wait_until_killed(DeviceFault)
    assert harness.model_row(trainer.model_id).status == "ready"
    gpu.broken = False
    await harness.start()
    assert await trainer.state() == before


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
