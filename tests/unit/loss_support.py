"""Helpers for tests of losses without a model: slices of passes of one adapter that trains nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl.base.types.weights import LoraSpec
from skyrl.training.backends.base import Datum, TrainingPass
from skyrl.training.backends.torch_lora.adapter import Adapter
from skyrl.training.backends.torch_lora.losses import LOSSES, Loss
from skyrl.training.backends.torch_lora.running import RunningPass, Slice

CPU = torch.device("cpu")


def running_pass(data: Sequence[Datum], loss: Loss | str, **config: float) -> RunningPass:
    """A loss is one of `LOSSES`, or the test's own."""
    name = loss if isinstance(loss, str) else "own"
    adapter = Adapter(LoraSpec(8, 8.0, seed=0), [], CPU, drawn=False)
    return RunningPass(adapter, TrainingPass("m", data, name, config), LOSSES[loss] if isinstance(loss, str) else loss)


def slice_of(data: Sequence[Datum], loss: Loss | str, *, rows: int = 1, **config: float) -> Slice:
    """All sequences of a pass in one slice."""
    return Slice(running_pass(data, loss, **config), range(len(data)), rows, last=True)
