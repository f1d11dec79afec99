"""Helpers for tests of losses without a model: slices of passes of one adapter that trains nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.lora.adapter import Adapter
from skyrl.trainer.losses import LOSSES, Loss
from skyrl.trainer.passes.pass_run import MicroBatchItem, SinglePassRun
from skyrl.trainer.protocol import Datum, TrainingPass

CPU = torch.device("cpu")


def running_pass(data: Sequence[Datum], loss: Loss | str, **config: float) -> SinglePassRun:
    """A loss is one of `LOSSES`, or the test's own."""
    name = loss if isinstance(loss, str) else "own"
    adapter = Adapter(LoraSpec(8, 8.0, seed=0), [], CPU, drawn=False)
    return SinglePassRun(
        adapter, TrainingPass("m", data, name, config), LOSSES[loss] if isinstance(loss, str) else loss
    )


def slice_of(data: Sequence[Datum], loss: Loss | str, *, rows: int = 1, **config: float) -> MicroBatchItem:
    """All sequences of a pass in one slice."""
    return MicroBatchItem(running_pass(data, loss, **config), range(len(data)), rows)
