"""One adapter: its float32 weights, gradient accumulator and moments, each in one flat buffer with named views.

`random_adapter` makes adapters that compare the trainer with the sampler: weights on layers of some kinds, zero on all
others. Of the base model it knows only the names and sizes of modules. Knows nothing of batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from skyrl.base.adapter_files import Target, kind_of
from skyrl.base.model_files import TRAIN_MLP_REFUSED, TrainMlpOfMixtures
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.lora.rank_pattern import ranks_of, without_layer
from skyrl.trainer.protocol import InvalidRequest, Mixture
from skyrl.trainer.shares import EVERY_EXPERT, ExpertShare


class Buffers(ABC):
    """What is trained, an adapter, the parameters of a whole model, or one rank's part of either: weights with their
    gradient, moments and step count. Gradient and moments are flat, in the weights' order. `shapes`: of the weights, by
    name."""

    shapes: dict[str, tuple[int, ...]]
    has_value_head = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gradient: Tensor | None = None
        self.exp_avg: Tensor | None = None
        self.exp_avg_sq: Tensor | None = None
        self.step = 0

    @property
    def numel(self) -> int:
        """How many weights there are."""
        return sum(map(math.prod, self.shapes.values()))

    @abstractmethod
    def chunks(self, size: int) -> Iterator[tuple[Tensor, slice]]:
        """All weights, in flat parts of at most `size` elements, each with its place in a flat buffer."""

    def zeros(self) -> Tensor:
        """A new flat buffer."""
        return torch.zeros(self.numel, device=self.device)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named tensors that share memory with a flat buffer."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        return {
            name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), flat.split(sizes), strict=True)
        }


LoraPair = tuple[Tensor, Tensor]
"""lora_A [rank, in_features] and lora_B [out_features, rank]; of experts, both with [experts, ...] before. Of the value
head, its weight [1, in_features] and its bias [1]."""

VALUE_HEAD = "value_head"
"""A critic's value head among an adapter's targets: a linear layer from the states that lm_head reads to one number.
No layer of the base model is below it."""


def matrices_of(target: Target) -> tuple[str, str]:
    """The names of the pair that is trained."""
    parts = ("weight", "bias") if target.name == VALUE_HEAD else ("lora_A", "lora_B")
    return f"{target.name}.{parts[0]}", f"{target.name}.{parts[1]}"


def with_value_head(targets: Sequence[Target], hidden: int) -> tuple[Target, ...]:
    """The targets, and a value head before those of experts: it is on every rank. hidden: what lm_head reads."""
    linears = sum(target.experts is None for target in targets)
    return (*targets[:linears], Target(VALUE_HEAD, hidden, 1), *targets[linears:])


def without_value_head(targets: Sequence[Target]) -> list[Target]:
    """The layers of the base model among the targets."""
    return [target for target in targets if target.name != VALUE_HEAD]


def _ranks(spec: LoraSpec, targets: Sequence[Target]) -> tuple[int, ...]:
    """A value head has none: the adapter's stands in its place."""
    names = [target.name for target in without_value_head(targets)]
    of_layers = iter(ranks_of(spec.rank, spec.rank_pattern, names))
    return tuple(spec.rank if target.name == VALUE_HEAD else next(of_layers) for target in targets)


def whole_shapes(spec: LoraSpec, targets: Sequence[Target]) -> dict[str, tuple[int, ...]]:
    """The shapes of an adapter's matrices, by name, in the order of its buffers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target, rank in zip(targets, _ranks(spec, targets), strict=True):
        first = () if target.experts is None else (target.experts,)
        name_a, name_b = matrices_of(target)
        if target.name == VALUE_HEAD:
            shapes[name_a], shapes[name_b] = (1, target.in_features), (1,)
        else:
            shapes[name_a] = (*first, rank, target.in_features)
            shapes[name_b] = (*first, target.out_features, rank)
    return shapes


class Adapter(Buffers):
    """Weights of one LoRA adapter over `targets`, with their gradient, moments and step count.

    lora_A is drawn as in PEFT, kaiming_uniform(a=sqrt(5)), which is uniform within 1/sqrt(in_features), from a
    generator seeded with `spec.seed`; lora_B is zero. The draw depends only on the seed, the ranks and the targets. A
    value head is zero.
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
        self.has_value_head = any(target.name == VALUE_HEAD for target in self.targets)
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
        """Of the updates of all layers but those in `own_scales`."""
        return self.spec.alpha / self.spec.rank

    @property
    def own_scales(self) -> dict[str, float]:
        """The scales of layers that the spec's rank pattern gives another rank, by target name."""
        if not self.spec.rank_pattern:
            return {}
        ranks = zip(self.targets, _ranks(self.spec, self.targets), strict=True)
        return {target.name: self.spec.alpha / rank for target, rank in ranks if rank != self.spec.rank}

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
        leaves in any case: a copy of all its matrices would need much memory. So has a value head: bfloat16 has too few
        digits for returns."""
        flat = self.weights.detach()
        if not any(target.experts for target in self.targets):
            flat = flat.to(dtype)
        views = self.views(flat)
        if self.has_value_head:
            exact = self.views(self.weights.detach())
            views |= {name: exact[name] for t in self.targets if t.name == VALUE_HEAD for name in matrices_of(t)}
        if requires_grad:
            views = {name: view.detach().requires_grad_() for name, view in views.items()}
        return {t.name: (views[matrices_of(t)[0]], views[matrices_of(t)[1]]) for t in self.targets}

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """All buffers: weights, both moments, gradient."""
        return self.weights, self.exp_avg, self.exp_avg_sq, self.gradient

    def replace(self, parts: Sequence[Tensor | None], step: int) -> None:
        """Replace all `parts` (flat, float32) by new ones, in one statement that allocates nothing."""
        weights, *others = parts
        assert weights is not None
        self.weights, self.exp_avg, self.exp_avg_sq, self.gradient, self.step = weights, *others, step


_SEED_OF_B = 1
"""Added to the seed of lora_A, so that lora_B is not drawn from the same numbers."""


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


def check_spec(
    spec: LoraSpec, max_rank: int, mixture: Mixture | None, train_mlp_of_mixtures: TrainMlpOfMixtures
) -> None:
    """Raise InvalidRequest for an adapter that this backend cannot train."""
    if spec.rank == 0:
        raise InvalidRequest(
            "lora_config.rank: 0 asks for full fine-tuning, which needs a server started with trainer.full_finetuning; "
            f"give 1 to {max_rank}"
        )
    if not 1 <= spec.rank <= max_rank:
        raise InvalidRequest(f"lora_config.rank: must be 1 to {max_rank}, got {spec.rank}")
    for expression, rank in spec.rank_pattern:
        if not 1 <= rank <= max_rank:
            raise InvalidRequest(f"lora_config.rank_pattern: {expression!r} must have 1 to {max_rank}, got {rank}")
    if not (math.isfinite(spec.alpha) and spec.alpha > 0):
        raise InvalidRequest(f"lora_config.alpha: must be a finite number above 0, got {spec.alpha}")
    if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
        raise InvalidRequest("lora_config: at least one of train_attn, train_mlp and train_unembed must be true")
    if mixture is not None and spec.train_mlp and train_mlp_of_mixtures == "refuse":
        raise InvalidRequest(f"lora_config.train_mlp: {TRAIN_MLP_REFUSED}")
    if mixture is not None and train_mlp_of_mixtures != "train" and not (spec.train_attn or spec.train_unembed):
        raise InvalidRequest(
            "lora_config: train_attn or train_unembed must be true, because the experts of the base model are not "
            "trained"
        )


MOST_EXAMPLES = 16


def check_pattern(spec: LoraSpec, targets: Sequence[Target]) -> None:
    """Raise InvalidRequest for a rank pattern with an expression that decides the rank of none of the layers that the
    adapter trains: it is misspelt, or is for layers that are not trained."""
    targets = without_value_head(targets)
    if unused := without_layer(spec.rank_pattern, [target.name for target in targets]):
        raise InvalidRequest(
            f"lora_config.rank_pattern: {unused[0]!r} matches no trained layer, or only layers that an expression "
            f"before it matches; trained layers are {', '.join(_examples(targets))}"
        )


def _examples(targets: Sequence[Target]) -> list[str]:
    """One name of each kind of layer: the first."""
    return list({kind_of(target.name): target.name for target in reversed(targets)}.values())[::-1][:MOST_EXAMPLES]
