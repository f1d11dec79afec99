"""The operations of a training step, and those that a GPU can do: what `benchmarks.trainer` needs for the MFU.

Formula: "PaLM: Scaling Language Modeling with Pathways" (arXiv 2204.02311), appendix B. Per token 6N for the N
parameters of matrix products (2N forward, 2N for the gradients of activations, 2N for those of weights) and 12 L H Q T
for attention: L layers, H heads, Q numbers of a head, T tokens of the sequence. The base model is frozen, so its
weights have no gradients: 4N of the base and 6N of the adapter. That is the MFU of all tokens: nothing is subtracted
for shared prompts, for masked rows or for the causal half of attention, and nothing is added for recomputation. So it
tells how fast a batch is trained, and may be above 1 where prompts are shared. `computed_flops` is at most what the
hardware does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cards import card_here
from benchmarks.models import Shape
from benchmarks.trainer_rows import TenantPass, tokens_of


def peak_flops() -> float | None:
    """bfloat16 operations per second of the GPU; None without a GPU or for one that is not known."""
    card = card_here()
    return None if card is None else card.peak(torch.bfloat16)


def model_flops(model: str, passes: Sequence[TenantPass]) -> float:
    """Operations of one step of all passes, for all tokens. `model`: a directory with config.json."""
    linear, attention = _flops(model, passes)
    return linear + attention


def computed_flops(model: str, passes: Sequence[TenantPass], rows: float) -> float:
    """The hardware does at least so many operations for one step in which `rows` rows go through the model: the part
    that rows are of tokens, with the causal half of attention. Rows behind a shared prompt attend to more keys than the
    mean token, so this is not too much; its part of what the GPU can do is never above 1."""
    linear, attention = _flops(model, passes)
    return (linear + attention / 2) * rows / tokens_of(passes)


def _flops(model: str, passes: Sequence[TenantPass]) -> tuple[float, float]:
    """Of all tokens: those of matrix products with weights, and those of attention."""
    shape = Shape(Path(model))
    linear, attention = 0.0, 0.0
    for each in passes:
        lengths = [len(datum.tokens) for datum in each.data]
        linear += sum(lengths) * (4 * shape.base_parameters() + 6 * shape.adapter_parameters(each.rank))
        attention += sum(12 * shape.layers * shape.queries * length * length for length in lengths)
    return linear, attention
