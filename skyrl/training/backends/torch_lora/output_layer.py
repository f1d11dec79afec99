"""The output layer, and what a model does to its logits afterwards: scaling and soft-capping.

Knows the names that transformers' configurations give to both. Knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skyrl.training.backends.torch_lora.lora import LoraSegment

_WIDEST = 200.0
"""Logits of the check lie between minus this and this: every known soft-capping and scaling shows there."""


@dataclass(frozen=True)
class LogitTransform:
    """logits -> cap(scale * logits), where cap(x) is softcap * tanh(x / softcap), or x without a softcap."""

    scale: float = 1.0
    softcap: float | None = None

    @staticmethod
    def of(config: Any) -> LogitTransform:
        """As transformers' configuration of a text model says: `logit_scale` (Cohere) multiplies, `logits_scaling`
        (Granite) divides, `final_logit_softcapping` (Gemma) caps."""
        scale = getattr(config, "logit_scale", None)
        divisor = getattr(config, "logits_scaling", None)
        return LogitTransform(
            scale=(1.0 if scale is None else float(scale)) / (1.0 if divisor is None else float(divisor)),
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


@dataclass(frozen=True)
class OutputLayer:
    """lm_head with the model's transform of logits. `linear`: the layer on rows [n, hidden] of one segment, whichever
    segments are active; `base`: the frozen linear layer inside."""

    linear: Callable[[Tensor, LoraSegment], Tensor]
    base: nn.Linear
    transform: LogitTransform

    def for_segment(self, rows: Tensor, segment: LoraSegment) -> Tensor:
        """The logits [n, vocabulary] of rows [n, hidden] of one segment."""
        return self.transform(self.linear(rows, segment))


@contextmanager
def given_logits(head: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, the output layer gives evenly spaced numbers in the place of its logits. The list gets them."""
    given: list[Tensor] = []

    def replace(module: nn.Module, args: object, output: Tensor) -> Tensor:
        spaced = torch.linspace(-_WIDEST, _WIDEST, output.numel(), device=output.device)
        given.append(spaced.to(output.dtype).view(output.shape))
        return given[-1]

    handle = head.register_forward_hook(replace)
    try:
        yield given
    finally:
        handle.remove()
