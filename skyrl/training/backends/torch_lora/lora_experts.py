"""The experts of a layer that serve many adapters at once: each segment of rows gets the updates of its adapter.

Knows how transformers keeps a layer's experts, and under which names PEFT and vLLM load adapters on them. Knows nothing
of routers, losses or the sum of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from skyrl.training.backends.torch_lora.adapter import Target
from skyrl.training.backends.torch_lora.expert_product import BaseExperts, ExpertsUpdate, experts_with_updates, gated
from skyrl.training.backends.torch_lora.lora import ActiveSegments, LoraSegment

OWN_PRODUCTS = "skyrl"
"""For transformers: experts without adapters compute with `expert_product`, too. Its own grouped products are the same,
but their gradients differ from run to run with several threads."""


@dataclass(frozen=True)
class AdapterNames:
    """Under which names adapters on experts are known. `first`: the parts of the first product that have a pair of
    matrices each; `down`: the second product. `block`: what a release calls the module with the experts, where
    transformers calls it `mlp`."""

    first: tuple[str, ...]
    down: str
    block: str = "mlp"


_PER_EXPERT = AdapterNames(("gate_proj", "up_proj"), "down_proj")
_WITHOUT_GATE = AdapterNames(("up_proj",), "down_proj")
_FUSED = AdapterNames(("gate_up_proj",), "down_proj")
_NUMBERED = AdapterNames(("w1", "w3"), "w2", "block_sparse_moe")
_OF_CLASS = {
    "GptOssExperts": _FUSED,
    "Qwen3VLMoeTextExperts": _FUSED,
    "Qwen3_5MoeExperts": _FUSED,
    "KimiLinearExperts": _NUMBERED,
    "MiniMaxM2Experts": _NUMBERED,
    "MixtralExperts": _NUMBERED,
}
"""PEFT and vLLM take an adapter on a fused gate and up as one pair of matrices where the release has them fused
(vLLM's `is_3d_moe_weight`), and else as two. The other names are those of the projections of one expert."""


def _names_of(module: Any) -> AdapterNames:
    return _OF_CLASS.get(type(module).__name__, _PER_EXPERT if module.has_gate else _WITHOUT_GATE)


def base_experts(module: Any) -> BaseExperts:
    """What transformers' module of a layer's experts computes with."""
    first, down = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    if module.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    biases = (None, None)
    if module.has_bias:
        biases = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias, module.down_proj_bias
    if not module.has_gate:
        return BaseExperts(first, down, module.act_fn, 1, *biases)
    if len(_names_of(module).first) == 1 or _has_own_gate(module):
        return BaseExperts(first, down, module._apply_gate, 1, *biases)
    return BaseExperts(first, down, gated(module.act_fn), 2, *biases)


def _parameters_of(module: Any) -> set[str]:
    """The names of the parameters of experts of a known kind; none for a module that transformers does not say the kind
    of (`use_experts_implementation`)."""
    if not hasattr(module, "has_gate"):
        return set()
    weights = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"}
    return weights | {f"{leaf}_bias" for leaf in weights if module.has_bias}


def _has_own_gate(module: Any) -> bool:
    """Whether the experts make something else than `act_fn(gate) * up` of their first product."""
    return type(module)._apply_gate is not _default_apply_gate


def _without_updates(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return experts_with_updates(hidden, chosen, weights, base_experts(module))


ALL_EXPERTS_FUNCTIONS.register(OWN_PRODUCTS, _without_updates)


class MultiLoraExperts(nn.Module):
    """Frozen experts, plus each active segment's low-rank update of its rows' experts: a pair of matrices for each
    expert and projection.

    Raises ValueError for experts that have other parameters than gate, up and down projections and their biases.
    """

    def __init__(self, name: str, base: Any, active: ActiveSegments) -> None:
        """`name`: of the module in transformers' model."""
        super().__init__()
        found = {leaf for leaf, _ in base.named_parameters()}
        if found != _parameters_of(base) or (_has_own_gate(base) and type(base).__name__ not in _OF_CLASS):
            raise ValueError(
                f"{name} ({type(base).__name__}) has {', '.join(sorted(found))}; no adapter can train it: set "
                "trainer.policy.model.lora.train_mlp_of_mixtures to leave_out or refuse, and the model starts"
            )
        self.base = base
        self.active = active
        self.count: int = len(base.down_proj)
        """The layer's experts, also where a rank holds only some of them."""
        self.over_ranks: Callable[[MultiLoraExperts, Tensor, Tensor, Tensor], Tensor] | None = None
        """Computes in place of `forward` where each rank holds some of the experts."""
        names = _names_of(base)
        block, _, own = name.rpartition(".")
        prefix = f"{block.removesuffix('mlp')}{names.block}.{own}" if block.endswith(".mlp") else name
        self._first = [f"{prefix}.{leaf}" for leaf in names.first]
        self._down = f"{prefix}.{names.down}"

    @property
    def targets(self) -> list[Target]:
        base = base_experts(self.base)
        (_, outputs, hidden), size = base.first.shape, base.down.shape[2]
        return [
            *(Target(name, hidden, outputs // base.parts, self.count) for name in self._first),
            Target(self._down, size, hidden, self.count),
        ]

    def update(self, segment: LoraSegment) -> ExpertsUpdate | None:
        """The segment's update; None if its adapter does not train these experts."""
        if self._down not in segment.pairs:
            return None
        first = [segment.pairs[name] for name in self._first]
        return ExpertsUpdate(segment.start, segment.stop, segment.scale, first, segment.pairs[self._down])

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden: [rows, hidden]; chosen: int64 [rows, k]; weights: [rows, k]. Returns [rows, hidden]."""
        if self.over_ranks is not None:
            return self.over_ranks(self, hidden, chosen, weights)
        updates = [update for segment in self.active.segments if (update := self.update(segment)) is not None]
        if not updates:
            return self.base(hidden, chosen, weights)
        return experts_with_updates(hidden, chosen, weights, base_experts(self.base), updates)
