"""One adapter: its float32 weights, gradient accumulator and moments, each in one flat buffer with named views.

`random_adapter` makes adapters that compare the trainer with the sampler: weights on layers of some kinds, zero on all
others. A kind of layer is a module's name without the numbers of layers: `self_attn.q_proj`, `mlp.experts.down_proj`,
`lm_head`. Of the base model it knows only the names and sizes of modules. Knows nothing of batches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.adamw import Buffers
from skyrl.trainer.shares import EVERY_EXPERT, ExpertShare

LoraPair = tuple[Tensor, Tensor]
"""lora_A [rank, in_features] and lora_B [out_features, rank]; of experts, both with [experts, ...] before."""


@dataclass(frozen=True)
class Target:
    """A linear layer that adapters may train: its module name in the base model and its sizes. With `experts`, so many
    layers of these sizes, one for each expert: `<module of the experts>.<projection>`."""

    name: str
    in_features: int
    out_features: int
    experts: int | None = None


def whole_shapes(spec: LoraSpec, targets: Sequence[Target]) -> dict[str, tuple[int, ...]]:
    """The shapes of an adapter's matrices, by name, in the order of its buffers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        first = () if target.experts is None else (target.experts,)
        shapes[f"{target.name}.lora_A"] = (*first, spec.rank, target.in_features)
        shapes[f"{target.name}.lora_B"] = (*first, target.out_features, spec.rank)
    return shapes


class Adapter(Buffers):
    """Weights of one LoRA adapter over `targets`, with their gradient, moments and step count.

    lora_A is drawn as in PEFT, kaiming_uniform(a=sqrt(5)), which is uniform within 1/sqrt(in_features), from a
    generator seeded with `spec.seed`; lora_B is zero. The draw depends only on the seed, the rank and the targets.
    """

    def __init__(
        self,
        spec: LoraSpec,
        targets: Sequence[Target],
        device: torch.device,
        *,
        drawn: bool = True,
        share: ExpertShare = EVERY_EXPERT,
    ) -> None:
        """Without `drawn`, the weights are empty until `replace`. `share`: the experts whose matrices it has. They are
        drawn as if it had all of them."""
        self.spec = spec
        self.targets = tuple(targets)
        super().__init__(device)
        self._share = share
        self.shapes = {name: share.part(shape) for name, shape in whole_shapes(spec, self.targets).items()}
        self.weights = self._initial_weights().to(device) if drawn else torch.empty(0, device=device)

    def chunks(self, size: int) -> Iterator[tuple[Tensor, slice]]:
        for start in range(0, len(self.weights), size):
            place = slice(start, min(start + size, len(self.weights)))
            yield self.weights[place], place

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank

    def _initial_weights(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.spec.seed % 2**63)
        flat = torch.zeros(sum(map(math.prod, self.shapes.values())))
        whole = whole_shapes(self.spec, self.targets)
        for name, view in self.views(flat).items():
            if name.endswith(".lora_A"):
                bound = 1 / math.sqrt(view.shape[-1])
                drawn = torch.rand(whole[name], generator=generator) * (2 * bound) - bound
                view.copy_(self._share.of_matrices(drawn))
        return flat

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A flat float32 buffer on the adapter's device from named matrices. Raises ValueError unless names and shapes
        match exactly."""
        if set(tensors) != set(self.shapes):
            raise ValueError(f"tensor names differ from the adapter's: {sorted(set(tensors) ^ set(self.shapes))[:4]}")
        for name, shape in self.shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, not {shape}")
        return torch.cat([tensors[name].reshape(-1).to(self.device, torch.float32) for name in self.shapes])

    def leaves(self, requires_grad: bool, dtype: torch.dtype = torch.float32) -> dict[str, LoraPair]:
        """New autograd leaves, by target name: float32 ones share the weights' memory. Each slice of a pass gets its
        own set. Those of another `dtype` are copies, made at once for all layers. An adapter on experts has float32
        leaves in any case: a copy of all its matrices would need much memory."""
        flat = self.weights.detach()
        if not any(target.experts for target in self.targets):
            flat = flat.to(dtype)
        views = self.views(flat)
        if requires_grad:
            views = {name: view.detach().requires_grad_() for name, view in views.items()}
        return {t.name: (views[f"{t.name}.lora_A"], views[f"{t.name}.lora_B"]) for t in self.targets}

    def replace(
        self,
        weights: Tensor,
        exp_avg: Tensor | None,
        exp_avg_sq: Tensor | None,
        gradient: Tensor | None,
        step: int,
    ) -> None:
        """Replace all buffers (flat, float32) by new ones, in one statement that allocates nothing."""
        new = weights, exp_avg, exp_avg_sq, gradient, step
        self.weights, self.exp_avg, self.exp_avg_sq, self.gradient, self.step = new


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
