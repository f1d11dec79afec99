"""Mixtures of experts among base models: what a client must know of one, and what it is told.

Where no adapter trains experts, they compute as transformers' `grouped_mm`: the rows are sorted by expert, and each
expert that is used makes one matrix product (docs/decisions/mixtures-of-experts.md). Knows nothing of layers or passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from skyrl.base.model_files import FROZEN_EXPERTS
from skyrl.base.types.weights import LoraSpec
from skyrl.training.backends.base import Mixture, PassResult
from skyrl.training.backends.torch_lora.adapter import Target


def mixture_of(routers: Sequence[Any]) -> Mixture | None:
    """What a client must know to send routed experts; None for a dense model."""
    if not routers:
        return None
    return Mixture(len(routers), int(routers[0].num_experts), int(routers[0].top_k))


def noted(
    outcome: PassResult | Exception, spec: LoraSpec, targets: Sequence[Target], mixture: Mixture | None
) -> PassResult | Exception:
    """The outcome of a pass of an adapter that trains `targets`. Its metrics say so if the adapter asked for
    `train_mlp`, and does not train the experts of the base model."""
    trains_experts = any(target.experts is not None for target in targets)
    if mixture is None or trains_experts or not spec.train_mlp or isinstance(outcome, Exception):
        return outcome
    return replace(outcome, metrics=outcome.metrics | {FROZEN_EXPERTS: 1.0})
