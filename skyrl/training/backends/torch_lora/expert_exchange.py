"""Experts over ranks: each rank holds some experts of every layer, and rows travel to the ranks of their experts.

A row has an entry for each of its experts. A layer's experts make two exchanges between all ranks: the entries go to
the ranks that hold their experts, and come back computed. Their backward makes the same two exchanges the other way
round. Every rank takes part in each of them, with no entries if need be.
Knows layers of experts and segments of adapters. Knows nothing of passes, or of how experts' weights are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from skyrl.training.backends.torch_lora.expert_product import (
    ExpertsUpdate,
    counted_entries,
    sorted_entries,
    summed_entries,
)
from skyrl.training.backends.torch_lora.expert_shares import ExpertShare
from skyrl.training.backends.torch_lora.kept_weights import attach
from skyrl.training.backends.torch_lora.lora import ActiveSegments, LoraSegment
from skyrl.training.backends.torch_lora.lora_experts import MultiLoraExperts, base_experts


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
