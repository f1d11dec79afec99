"""Mixtures of experts among base models: which layers have experts, and where their weights are in files.

Where no adapter trains experts, they compute as transformers' `grouped_mm`: the rows are sorted by expert, and each
expert that is used makes one matrix product (docs/decisions/mixtures-of-experts.md). Knows the layout of transformers'
layers. Knows nothing of passes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skyrl.base.config.mixtures import FROZEN_EXPERTS
from skyrl.base.types.lora import LoraSpec
from skyrl.training.backends.base import Mixture, PassResult
from skyrl.training.backends.torch_lora.adapter import Target

_FUSED = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)$")


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


@dataclass(frozen=True)
class _JoinedExperts:
    """One tensor of all experts, whose files hold one tensor for each expert and projection. `parts[e]`: the stored
    tensors of expert e, whose rows follow each other."""

    parts: Sequence[Sequence[Any]]

    def get_shape(self) -> list[int]:
        shapes = [part.get_shape() for part in self.parts[0]]
        return [len(self.parts), sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def __getitem__(self, experts: slice) -> Tensor:
        return torch.stack([torch.cat([part[:] for part in parts]) for parts in self.parts[experts]])


def stored_tensor(stored: Mapping[str, Any], name: str) -> Any | None:
    """A tensor of safetensors files by the name of the module's parameter, as an object that gives its shape and
    slices; None if the files lack it. `stored`: the files' readers by tensor name.

    transformers keeps all experts of a layer in one tensor [experts, rows, columns] (gate above up). Files hold
    `experts.<number>.<projection>.weight`, as vLLM reads them."""
    if name in stored:
        return stored[name].get_slice(name)
    if (found := _FUSED.match(name)) is None:
        return None
    prefix, leaf = found.groups()
    projections = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    parts: list[list[Any]] = []
    while True:
        keys = [f"{prefix}.{len(parts)}.{projection}.weight" for projection in projections]
        if not all(key in stored for key in keys):
            return _JoinedExperts(parts) if parts else None
        parts.append([stored[key].get_slice(key) for key in keys])
