"""Random adapters that compare the trainer with the sampler: weights on layers of some kinds, zero on all others.

A kind of layer is a module's name without the numbers of layers: `self_attn.q_proj`, `mlp.experts.down_proj`,
`lm_head`. Knows names and shapes. Knows nothing of the base model or of the sampler.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

import torch

from skyrl.base.types.weights import LoraSpec
from skyrl.training.backends.torch_lora.adapter import Adapter, Target

_BEFORE_LAYER = re.compile(r"^.*\blayers\.\d+\.")
_SEED_OF_B = 1
"""Added to the seed of lora_A, so that lora_B is not drawn from the same numbers."""


def kind_of(target: str) -> str:
    """The kind of a layer, by its module name."""
    return _BEFORE_LAYER.sub("", target)


def kinds_of(targets: Iterable[Target]) -> list[str]:
    """The kinds of these layers, each once, in the order in which they first come."""
    return list(dict.fromkeys(kind_of(target.name) for target in targets))


def random_adapter(
    spec: LoraSpec, targets: Sequence[Target], kinds: Collection[str], size: float, device: torch.device
) -> Adapter:
    """An adapter over `targets` as a new model has it, but with lora_B on layers of these kinds, and of each of their
    experts, drawn from a normal distribution with standard deviation `size`. The draw depends on the spec and the
    targets alone, so another `size` gives a multiple of the same update."""
    adapter = Adapter(spec, targets, device)
    generator = torch.Generator().manual_seed((spec.seed + _SEED_OF_B) % 2**63)
    views = adapter.views(adapter.weights)
    for target in targets:
        if kind_of(target.name) in kinds:
            view = views[f"{target.name}.lora_B"]
            view.copy_(torch.randn(view.shape, generator=generator) * size)
    return adapter
