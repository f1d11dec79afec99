"""A process with a real engine and two models: python -m tests.gpu.engine_process '{"state_dir": ..., ...}'.

A second process on the same state directory sends the same requests again, so it goes on where the first one died.
Prints one JSON line per step and model.
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

from skyrl.base.types.requests import Kind
from skyrl.storage.db.sessions import Session
from skyrl.trainer import device
from skyrl.trainer.losses import LOSSES, Loss, LossInputs, LossValue, importance_sampling
from skyrl.trainer.model import base_model as model_module
from skyrl.trainer.ranks import sharded_model
from tests.gpu.support import REHEARSAL

POISON = 666.0
SEEDS = (1, 2)


def _break_device(target: torch.device) -> None:
    """On a GPU: cause a real fault, an index out of range in a kernel. In a rehearsal: make the device raise from now
    on."""
    if target.type == "cuda":
        torch.arange(4, device=target)[torch.tensor([2**20], device=target)].sum().item()
        raise AssertionError("the kernel accepted an index out of range")

    def broken(_: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered (rehearsed)")

    device.synchronize = broken
    broken(target)


def _loss_with_poison(lp: Tensor, inputs: LossInputs, config: Any) -> LossValue:
    if (inputs["advantages"] == POISON).any():
        _break_device(lp.device)
    return importance_sampling(lp, inputs, config)


async def _trainers(harness: Harness, earlier: list[list[str]] | None) -> list[Trainer]:
    """Trainers for the models of an earlier process on this directory, or for new models."""
    if earlier is None:
        return [await Trainer.create(harness, seed=seed, create=False) for seed in SEEDS]
    return [Trainer(harness, Session(session, "tenant", "active"), model_id) for session, model_id in earlier]


def _saved_clients(clients: Path) -> list[list[str]] | None:
    return json.loads(clients.read_text()) if clients.exists() else None


def _save_clients(clients: Path, trainers: list[Trainer]) -> None:
    clients.write_text(json.dumps([[trainer.session.id, trainer.model_id] for trainer in trainers]))


async def _poison(trainer: Trainer) -> str | None:
    """Send the command that breaks the device; returns its error if this process survives it."""
    floats = {"data": [POISON] * 3, "dtype": "float32", "shape": [3]}
    inputs = {"target_tokens": {"data": [1, 2, 3], "dtype": "int64", "shape": [3]}}
    datum = {
        "model_input": {"chunks": [{"tokens": [5, 6, 7]}]},
        "loss_fn_inputs": inputs | {"logprobs": floats, "advantages": floats},
    }
    poisoned = {"data": [datum], "loss_fn": "importance_sampling"}
    return (await trainer.outcome(await trainer.send(Kind.FORWARD_BACKWARD, forward_backward_input=poisoned))).error


async def _drive(harness: Harness, options: dict[str, Any]) -> None:
    clients = Path(options["state_dir"]) / "clients.json"
    trainers = await _trainers(harness, _saved_clients(clients))
    _save_clients(clients, trainers)
    for trainer in trainers:
        await trainer.result(await trainer.send(Kind.CREATE_MODEL, 0))
    for number in range(options["steps"]):
        if number == options.get("poison_at"):
            print(json.dumps({"poison": await _poison(trainers[0])}), flush=True)
        passes, steps = [], []
        for seed, trainer in zip(SEEDS, trainers, strict=True):
            passes.append(
                [await trainer.forward_backward(10 * seed, None, 40, 31), await trainer.forward_backward(seed)]
            )
            steps.append(await trainer.optim_step())
        for index, trainer in enumerate(trainers):
            losses = [(await trainer.result(request_id))["metrics"]["loss:sum"] for request_id in passes[index]]
            step = (await trainer.result(steps[index]))["metrics"]["optimizer_step"]
            print(json.dumps({"model": index, "step": step, "loss": sum(losses)}), flush=True)
    for index, trainer in enumerate(trainers):
        directory = Path(options["out"]) / str(index)
        directory.mkdir(parents=True)
        for name, content in (await trainer.state()).items():
            (directory / name).write_bytes(content)


async def main(options: dict[str, Any]) -> None:
    trainer = {"merge_passes": options["merge"]}
    flags = {"backend_config": {"trainer": trainer}, "snapshot_interval_s": options["snapshot_interval_s"]}
    async with harness_in(Path(options["state_dir"]), **flags) as harness:
        await harness.start()
        driving = asyncio.create_task(_drive(harness, options))
        engine = harness._running
        assert engine is not None
        await asyncio.wait({driving, engine}, return_when=asyncio.FIRST_COMPLETED)
        if not driving.done():
            driving.cancel()
            await engine
        await driving


if __name__ == "__main__":
    LOSSES["importance_sampling"] = Loss(_loss_with_poison, ("logprobs", "advantages"))
    if REHEARSAL:
        torch.set_num_threads(1)
        model_module.base_dtype = sharded_model.base_dtype = lambda _: torch.bfloat16
    asyncio.run(main(json.loads(sys.argv[1])))
