"""The experts of a layer that serve many adapters at once: each segment of rows gets the updates of its adapter.

Over ranks each rank holds some experts of every layer, and rows travel to the ranks of their experts. A row has an
entry for each of its experts. A layer's experts make two exchanges between all ranks: the entries go to the ranks that
hold their experts, and come back computed. Their backward makes the same two exchanges the other way round. Every rank
takes part in each of them, with no entries if need be.
Knows how transformers keeps a layer's experts, and under which names PEFT and vLLM load adapters on them. Knows nothing
of routers, losses, passes, or of how experts' weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from skyrl.trainer.experts.product import (
    BaseExperts,
    ExpertsUpdate,
    counted_entries,
    experts_with_updates,
    gated,
    sorted_entries,
    summed_entries,
)
from skyrl.trainer.lora.adapter import Target
from skyrl.trainer.lora.linear import ActiveSegments, LoraSegment
from skyrl.trainer.quantized.kept import attach
from skyrl.trainer.shares import ExpertShare

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
    "Glm5NextTextExperts": _PER_EXPERT,
    "GptOssExperts": _FUSED,
    "Qwen3VLMoeTextExperts": _FUSED,
    "Qwen3_5MoeExperts": _FUSED,
    "KimiLinearExperts": _NUMBERED,
    "Lfm2MoeExperts": _NUMBERED,
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
    if len(_names_of(module).first) > 1 and type(module).__name__ in _OF_CLASS and _has_own_gate(module):
        return BaseExperts(first, down, _joined(module._apply_gate), 2, *biases)
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


def _joined(apply_gate: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """For `BaseExperts.inner`, of a function of gate and up side by side."""
    return lambda gate, up: apply_gate(torch.cat([gate, up], dim=-1))


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
        scales = [segment.scale_of(name) for name in (*self._first, self._down)]
        return ExpertsUpdate(segment.start, segment.stop, scales, first, segment.pairs[self._down])

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden: [rows, hidden]; chosen: int64 [rows, k]; weights: [rows, k]. Returns [rows, hidden]."""
        if self.over_ranks is not None:
            return self.over_ranks(self, hidden, chosen, weights)
        updates = [update for segment in self.active.segments if (update := self.update(segment)) is not None]
        if not updates:
            return self.base(hidden, chosen, weights)
        return experts_with_updates(hidden, chosen, weights, base_experts(self.base), updates)


class ExpertExchange:
    """Computes a model's experts, of which each rank holds its share.

    On a CPU the entries of each rank's micro-batch are computed apart, as they would be on one device: so other ranks'
    micro-batches, which may belong to other passes, change no bit of a pass. Elsewhere those of all ranks are computed
    together (`together`), in fewer products; results differ by rounding."""

    def __init__(self, share: ExpertShare, active: ActiveSegments, *, together: bool) -> None:
        """`active`: this rank's segments of the running micro-batch."""
        self.share = share
        self.together = together
        self._active = active
        self._others: Sequence[Sequence[LoraSegment]] = [()] * share.ranks
        self._slots = 0
        self._own_slots: Sequence[int] = ()

    def divide(self, layers: Iterable[MultiLoraExperts]) -> None:
        """Leave this rank's experts alone in layers whose parameters have no memory yet. Until `compute`, they compute
        as transformers does, with the weights of all experts, which each call gathers."""
        for experts in layers:
            base: Any = experts.base
            for name, parameter in list(base.named_parameters()):
                own = parameter.new_empty(len(self.share.of(experts.count)), *parameter.shape[1:])
                setattr(base, name, nn.Parameter(own, requires_grad=False))
            experts.over_ranks = self._gathered

    def compute(self, layers: Iterable[MultiLoraExperts]) -> None:
        """From now on rows travel, and no weights."""
        for experts in layers:
            experts.over_ranks = self._computed

    @contextmanager
    def use(self, others: Sequence[Sequence[LoraSegment]], slots: int, own_slots: Sequence[int]) -> Iterator[None]:
        """What the micro-batches of other ranks train, by rank, and by slot: the segments' matrices are those of this
        rank's experts. No rank has more than `slots`; a row in slot number `slots` has no adapter. `own_slots`: those
        of the active segments. Backward belongs inside, because it may recompute the forward."""
        before = self._others, self._slots, self._own_slots
        self._others, self._slots, self._own_slots = others, slots, own_slots
        try:
            yield
        finally:
            self._others, self._slots, self._own_slots = before

    def _computed(self, experts: MultiLoraExperts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As `experts_with_updates`, with the experts of all ranks. All ranks call this at the same time."""
        x, sorted_experts, order = sorted_entries(hidden, chosen)
        slots = self._slots + 1
        place = sorted_experts * slots + self._slot_of_rows(len(chosen), chosen.device)[order // chosen.shape[1]]
        counts = torch.bincount(place, minlength=experts.count * slots).view(experts.count, slots)
        ranks, held = self.share.ranks, self._held(experts)
        own = held[self.share.rank]
        counted = counts.new_empty(ranks * own, slots)
        dist.all_to_all_single(counted, counts, [own] * ranks, held)
        of_ranks = counted.view(ranks, own, slots)
        sizes = torch.stack([each.sum() for each in (*counts.split(held), *of_ranks)]).tolist()
        sent, received = sizes[:ranks], sizes[ranks:]
        arrived = _exchanged(x, sent, received)
        if self.together:
            made = self._of_all(experts, arrived, of_ranks)
        else:
            parts = zip(arrived.split(received), of_ranks, strict=True)
            made = torch.cat([self._of_rank(experts, rank, *part) for rank, part in enumerate(parts)])
        return summed_entries(_exchanged(made, received, sent), weights, order).to(hidden.dtype)

    def _of_rank(self, experts: MultiLoraExperts, rank: int, x: Tensor, counts: Tensor) -> Tensor:
        """What this rank's experts make of the entries of a rank. counts: int64 [experts, slots]."""
        if not len(x):
            return x
        return counted_entries(x, counts, base_experts(experts.base), self._updates(experts, rank))

    def _of_all(self, experts: MultiLoraExperts, x: Tensor, counts: Tensor) -> Tensor:
        """What this rank's experts make of the entries of all ranks, which come rank by rank. counts: int64 [ranks,
        experts, slots]."""
        if not len(x):
            return x
        of_expert = counts.sum(dim=2).flatten()
        expert = torch.arange(counts.shape[1], device=x.device).repeat(len(counts)).repeat_interleave(of_expert)
        order = expert.argsort(stable=True)
        updates = [update for rank in range(len(counts)) for update in self._updates(experts, rank)]
        parts = counts.transpose(0, 1).flatten(1)
        made = counted_entries(x[order], parts, base_experts(experts.base), updates)
        return torch.empty_like(made).index_copy(0, order, made)

    def _updates(self, experts: MultiLoraExperts, rank: int) -> list[ExpertsUpdate | None]:
        """Of a rank's entries, by slot."""
        updates: list[ExpertsUpdate | None] = [None] * (self._slots + 1)
        is_own = rank == self.share.rank
        segments = zip(self._own_slots, self._active.segments, strict=True) if is_own else enumerate(self._others[rank])
        for slot, segment in segments:
            updates[slot] = experts.update(segment)
        return updates

    def _gathered(self, experts: MultiLoraExperts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As transformers computes the experts. All ranks call this at the same time."""
        base: Any = experts.base
        own = dict(base.named_parameters())
        try:
            for name, parameter in own.items():
                parts = [parameter.new_empty(count, *parameter.shape[1:]) for count in self._held(experts)]
                parts[self.share.rank] = parameter.detach()
                for rank, part in enumerate(parts):
                    dist.broadcast(part, src=rank)
                setattr(base, name, nn.Parameter(torch.cat(parts), requires_grad=False))
            attach(base)
            return base(hidden, chosen, weights)
        finally:
            for name, parameter in own.items():
                setattr(base, name, parameter)
            attach(base)

    def _held(self, experts: MultiLoraExperts) -> list[int]:
        """How many of the layer's experts each rank holds."""
        ranks = self.share.ranks
        return [len(ExpertShare(rank, ranks).of(experts.count)) for rank in range(ranks)]

    def _slot_of_rows(self, rows: int, device: torch.device) -> Tensor:
        """int64 [rows]."""
        segments = self._active.segments
        if not segments:
            return torch.full((rows,), self._slots, device=device)
        lengths = torch.tensor([segment.stop - segment.start for segment in segments])
        return torch.tensor(self._own_slots).repeat_interleave(lengths).to(device)


def _exchanged(x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """The rows that all ranks send to this one, by rank. sent: how many rows of x go to each rank, in order."""
    rows: Tensor = _Exchange.apply(x, sent, received)  # type: ignore[no-untyped-call]
    return rows


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.sizes = sent, received
        return _all_to_all(x, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.sizes
        return _all_to_all(gradients[0], received, sent), None, None


def _all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    rows = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(rows, x.contiguous(), list(received), list(sent))
    return rows
