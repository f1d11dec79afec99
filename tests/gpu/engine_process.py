"""A process with a real engine and two models on it: python -m tests.gpu.engine_process '{"state_dir": ..., ...}'.

Started again on the same state directory it sends the same commands once more, which are the same requests, and goes on
where the one before it died. Prints one JSON line per step and model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "component"))

import torch
from engine_harness import Harness, Trainer, harness_in  # pyright: ignore[reportMissingImports]
from torch import Tensor

from skyrl.backends.torch_lora import device
from skyrl.backends.torch_lora import model as model_module
from skyrl.backends.torch_lora.losses import LOSSES, Loss, LossInputs, LossValue, importance_sampling
from skyrl.db.sessions import Session
from skyrl.types.kinds import Kind
from tests.gpu.support import REHEARSAL

POISON = 666.0
SEEDS = (1, 2)


def _fault(where: torch.device) -> None:
    """A real fault of a GPU, an index out of range in a kernel; or the rehearsal's: a device that answers no more."""
    if where.type == "cuda":
        torch.arange(4, device=where)[torch.tensor([2**20], device=where)].sum().item()
        raise AssertionError("the index was taken")

    def broken(_: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered (rehearsed)")

    device.synchronize = broken
    broken(where)


def _breaking(lp: Tensor, inputs: LossInputs, config: Any) -> LossValue:
    if (inputs["advantages"] == POISON).any():
        _fault(lp.device)
    return importance_sampling(lp, inputs, config)


async def _trainers(harness: Harness, earlier: list[list[str]] | None) -> list[Trainer]:
    """The models of an earlier process on this directory, or new ones."""
    if earlier is None:
        return [await Trainer.create(harness, seed=seed, create=False) for seed in SEEDS]
    return [Trainer(harness, Session(session, "tenant", "active"), model_id) for session, model_id in earlier]


def _noted(clients: Path) -> list[list[str]] | None:
    return json.loads(clients.read_text()) if clients.exists() else None


def _note(clients: Path, trainers: list[Trainer]) -> None:
    clients.write_text(json.dumps([[one.session.id, one.model_id] for one in trainers]))


async def _poison(trainer: Trainer) -> str | None:
    """Send the command that breaks the device; returns how it ended, if this process lives to see it."""
    floats = {"data": [POISON] * 3, "dtype": "float32", "shape": [3]}
    inputs = {"target_tokens": {"data": [1, 2, 3], "dtype": "int64", "shape": [3]}}
    datum = {
        "model_input": {"chunks": [{"tokens": [5, 6, 7]}]},
        "loss_fn_inputs": inputs | {"logprobs": floats, "advantages": floats},
    }
    given = {"data": [datum], "loss_fn": "importance_sampling"}
    return (await trainer.outcome(await trainer.send(Kind.FORWARD_BACKWARD, forward_backward_input=given))).error


async def _drive(harness: Harness, wanted: dict[str, Any]) -> None:
    clients = Path(wanted["state_dir"]) / "clients.json"
    trainers = await _trainers(harness, _noted(clients))
    _note(clients, trainers)
    for trainer in trainers:
        await trainer.result(await trainer.send(Kind.CREATE_MODEL, 0))
    for number in range(wanted["steps"]):
        if number == wanted.get("poison_at"):
            print(json.dumps({"poison": await _poison(trainers[0])}), flush=True)
        passes, steps = [], []
        for seed, trainer in zip(SEEDS, trainers, strict=True):
            passes.append(
                [await trainer.forward_backward(10 * seed, None, 40, 31), await trainer.forward_backward(seed)]
            )
            steps.append(await trainer.optim_step())
        for index, trainer in enumerate(trainers):
            losses = [(await trainer.result(one))["metrics"]["loss:sum"] for one in passes[index]]
            made = (await trainer.result(steps[index]))["metrics"]["optimizer_step"]
            print(json.dumps({"model": index, "step": made, "loss": sum(losses)}), flush=True)
    for index, trainer in enumerate(trainers):
        directory = Path(wanted["out"]) / str(index)
        directory.mkdir(parents=True)
        for name, content in (await trainer.state()).items():
            (directory / name).write_bytes(content)


async def main(wanted: dict[str, Any]) -> None:
    trainer = {"merge_passes": wanted["merge"]}
    flags = {"backend_config": {"trainer": trainer}, "snapshot_interval_s": wanted["snapshot_interval_s"]}
    async with harness_in(Path(wanted["state_dir"]), **flags) as harness:
        await harness.start()
        driving = asyncio.create_task(_drive(harness, wanted))
        engine = harness._running
        assert engine is not None
        await asyncio.wait({driving, engine}, return_when=asyncio.FIRST_COMPLETED)
        if not driving.done():
            driving.cancel()
            await engine
        await driving


if __name__ == "__main__":
    LOSSES["importance_sampling"] = Loss(_breaking, ("logprobs", "advantages"))
    if REHEARSAL:
        torch.set_num_threads(1)
        model_module.base_dtype = lambda _: torch.bfloat16
    asyncio.run(main(json.loads(sys.argv[1])))
