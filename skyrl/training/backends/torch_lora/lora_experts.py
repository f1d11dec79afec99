"""The experts of a layer that serve many adapters at once: each segment of rows gets the updates of its adapter.

Knows how transformers keeps a layer's experts. Knows nothing of routers, losses or the sum of gradients.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from skyrl.training.backends.torch_lora.adapter import Target
from skyrl.training.backends.torch_lora.expert_product import BaseExperts, ExpertsUpdate, experts_with_updates
from skyrl.training.backends.torch_lora.lora import ActiveSegments

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
_PARAMETERS = {"gate_up_proj", "down_proj"}
OWN_PRODUCTS = "skyrl"
"""For transformers: experts without adapters compute with `expert_product`, too. Its own grouped products are the same,
but their gradients differ from run to run with several threads."""


def base_experts(module: Any) -> BaseExperts:
    return BaseExperts(module.gate_up_proj, module.down_proj, module.act_fn)


def _without_updates(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return experts_with_updates(hidden, chosen, weights, base_experts(module))


ALL_EXPERTS_FUNCTIONS.register(OWN_PRODUCTS, _without_updates)


class MultiLoraExperts(nn.Module):
    """Frozen experts, plus each active segment's low-rank update of its rows' experts: a pair of matrices for each
    expert and projection.

    Raises ValueError for experts that have other parameters than gate, up and down projections.
    """

    def __init__(self, name: str, base: Any, active: ActiveSegments) -> None:
        super().__init__()
        found = {leaf for leaf, _ in base.named_parameters()}
        if found != _PARAMETERS or getattr(base, "is_transposed", False):
            raise ValueError(
                f"{name} ({type(base).__name__}) has {', '.join(sorted(found))}; no adapter can train it: set "
                "trainer.policy.model.lora.train_mlp_of_mixtures to leave_out or refuse, and the model starts"
            )
        self.name = name
        self.base = base
        self.active = active

    @property
    def targets(self) -> list[Target]:
        experts, hidden, size = self.base.down_proj.shape
        return [
            Target(f"{self.name}.{GATE}", hidden, size, experts),
            Target(f"{self.name}.{UP}", hidden, size, experts),
            Target(f"{self.name}.{DOWN}", size, hidden, experts),
        ]

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden: [rows, hidden]; chosen: int64 [rows, k]; weights: [rows, k]. Returns [rows, hidden]."""
        updates = [
            ExpertsUpdate(
                segment.start,
                segment.stop,
                segment.scale,
                *(segment.pairs[f"{self.name}.{leaf}"] for leaf in (GATE, UP, DOWN)),
            )
            for segment in self.active.segments
            if f"{self.name}.{GATE}" in segment.pairs
        ]
        if not updates:
            return self.base(hidden, chosen, weights)
        return experts_with_updates(hidden, chosen, weights, base_experts(self.base), updates)
