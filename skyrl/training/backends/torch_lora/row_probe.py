"""The forward of a small micro-batch at the start, which tells `Recomputation` what a row keeps for its backward.

Knows how a micro-batch runs. Knows nothing of budgets or of losses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from skyrl.base.types.weights import LoraSpec
from skyrl.training.backends.base import Datum
from skyrl.training.backends.torch_lora.adapter import Adapter, Target
from skyrl.training.backends.torch_lora.logprobs import Targets
from skyrl.training.backends.torch_lora.lora import LoraSegment
from skyrl.training.backends.torch_lora.model import BaseModel
from skyrl.training.backends.torch_lora.packing import pack_alone

SEQUENCES, LENGTH = 4, 64
RANK = 8
"""Of the probe's adapter. Other ranks keep little more or less: a row's product with lora_A has `rank` numbers, and its
inputs have thousands."""


def measure_row(base: BaseModel, targets: Sequence[Target]) -> None:
    """Run the forward of 256 rows, and drop what it keeps. `targets`: the layers that adapters will train; empty where
    the parameters themselves are trained. Ranks call it at the same time. Changes no weight."""
    length = min(LENGTH, base.max_context)
    tokens = np.random.default_rng(0).integers(0, base.vocab_size, (SEQUENCES, length))
    packed = pack_alone([Datum(each, {}) for each in tokens], base.device)
    trained = np.ones(tokens.size, np.bool_)
    of_rows = Targets.of(list(tokens), packed.layout.rows_of, trained, base.device)
    segment = LoraSegment(0, packed.stop, 1.0)
    if targets:
        adapter = Adapter(LoraSpec(RANK, float(RANK), seed=0), targets, base.device)
        segment = LoraSegment(0, packed.stop, adapter.scale, adapter.leaves(True))
    with torch.enable_grad(), base.packed.active.use([segment]):
        base.packed([packed], [of_rows], [segment])
