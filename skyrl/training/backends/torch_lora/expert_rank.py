"""A rank of the trainer that holds some experts of each layer, with all that adapters have of these experts.

Rows of its micro-batches travel to the ranks of their experts (`ExpertExchange`), and rows of all ranks come here: so
this rank computes the gradients of its experts for every pass. What an adapter has besides experts is whole on each
rank, the same bits on all of them; of the experts' matrices, gradients and moments each rank has its own alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.base.types.weights import LoraSpec
from skyrl.training.backends.base import TrainingPass
from skyrl.training.backends.torch_lora.adapter import Adapter, Target, whole_shapes
from skyrl.training.backends.torch_lora.collectives import summed_in_rank_order, total_norm
from skyrl.training.backends.torch_lora.expert_exchange import ExpertExchange
from skyrl.training.backends.torch_lora.expert_shares import ExpertShare, common_numel
from skyrl.training.backends.torch_lora.lora import LoraSegment
from skyrl.training.backends.torch_lora.passes import slice_gradients
from skyrl.training.backends.torch_lora.plan import Piece, Plan
from skyrl.training.backends.torch_lora.rank import Rank
from skyrl.training.backends.torch_lora.rank_base import PieceResult, RankSettings
from skyrl.training.backends.torch_lora.running import RunningPass, Slice
from skyrl.training.backends.torch_lora.sequence_part import SequencePart
from skyrl.training.backends.torch_lora.sharding import ModelForm
from skyrl.training.backends.torch_lora.vision import Seen


class ExpertRank(Rank):
    """`export` gives what this rank has of an adapter; `replace` takes the whole adapter."""

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        super().__init__(rank, ranks, settings)
        self._share = ExpertShare(rank, ranks)
        self._batches: Sequence[Sequence[Piece]] = ()
        self._others: Sequence[Sequence[LoraSegment]] = ()
        """Of the running micro-batches of other ranks, by rank: segments with the matrices of this rank's experts."""
        self._pieces: Sequence[Slice] = ()
        self._of_others: dict[tuple[int, int], Tensor] = {}
        """The gradient of this rank's experts, flat, by the pass's number and the rank whose rows it comes from. Not
        this rank's own rows: that one is in the gradient of the running pass."""

    def run(self, passes: Sequence[TrainingPass], forwards: Plan, backwards: Plan) -> dict[int, list[PieceResult]]:
        try:
            return super().run(passes, forwards, backwards)
        finally:
            self._of_others.clear()

    def _form(self) -> ModelForm:
        return replace(super()._form(), whole_experts=True)

    @property
    def _exchange(self) -> ExpertExchange:
        exchange = self._model.exchange
        assert exchange is not None
        return exchange

    def _adapter(self, spec: LoraSpec, targets: Sequence[Target], *, drawn: bool) -> Adapter:
        return Adapter(spec, targets, self._device, drawn=drawn, share=self._share)

    def _copied(self, part: npt.NDArray[np.float32] | None, spec: LoraSpec, targets: Sequence[Target]) -> Tensor | None:
        if part is None:
            return None
        held = [part[place] for place in self._share.slices(whole_shapes(spec, targets))]
        return super()._copied(np.concatenate(held), spec, targets)

    def _run_round(
        self, running: Sequence[RunningPass], batches: Sequence[Sequence[Piece]], *, backward: bool
    ) -> list[PieceResult]:
        self._batches = batches
        self._others = [
            [] if rank == self._rank else [_experts_of(running[piece.number].adapter, backward) for piece in batch]
            for rank, batch in enumerate(batches)
        ]
        try:
            return super()._run_round(running, batches, backward=backward)
        finally:
            self._others = ()

    def _divided(self, piece: Slice, part: SequencePart, *, backward: bool) -> PieceResult:
        """The rows of each rank's part travel as those of its other micro-batches do: the piece is in slot 0 of all."""
        with self._exchange.use(self._others, 1, [0]):
            return super()._divided(piece, part, backward=backward)

    def _micro_batch(self, pieces: Sequence[Slice], *, backward: bool) -> list[PieceResult]:
        self._pieces = pieces
        return super()._micro_batch(pieces, backward=backward)

    def _together(
        self, pieces: Sequence[Slice], seen: Sequence[Mapping[str, Seen]], *, backward: bool
    ) -> list[PieceResult]:
        """A piece's slot is its place in the plan: the other ranks know whose rows these are. `pieces` may lack some of
        the plan's."""
        slots = max(map(len, self._batches))
        own = [slot for slot, piece in enumerate(self._pieces) if any(piece is each for each in pieces)] or [slots]
        with self._exchange.use(self._others, slots, own):
            return super()._together(pieces, seen, backward=backward)

    def _gradients(
        self, totals: Sequence[Tensor], segments: Sequence[LoraSegment], embeddings: Sequence[Tensor]
    ) -> list[Tensor]:
        """Of this rank's segments. Those of other ranks, whose backward sends rows here, are kept in `_of_others`."""
        others = {
            (piece.number, rank, slot): segment
            for rank, of_rank in enumerate(self._others)
            for slot, (segment, piece) in enumerate(zip(of_rank, self._batches[rank], strict=False))
            if segment.pairs
        }
        found = slice_gradients(totals, [*segments, *others.values()], embeddings, unused=True)
        own = len(found) - len(others)
        for (number, rank, _), gradient in zip(others, found[own:], strict=True):
            total = self._of_others.get((number, rank))
            self._of_others[number, rank] = gradient if total is None else total.add_(gradient)
        return found[:own]

    def _summed(self, number: int, running: RunningPass, holders: Sequence[int]) -> Tensor:
        """Of the experts the parts that the ranks' rows have given are summed here, in the order of the ranks, too."""
        gradient = running.gradient
        if gradient is None:
            gradient = torch.zeros_like(running.adapter.weights)
        common, experts = gradient.tensor_split([common_numel(running.adapter.shapes)])
        if len(common):
            summed_in_rank_order(common, holders, len(common), self._device)
        if len(experts):
            parts = [experts if rank == self._rank else self._of_others.pop((number, rank)) for rank in holders]
            total = parts[0].clone()
            for part in parts[1:]:
                total.add_(part)
            experts.copy_(total)
        return gradient

    def _norm(self, adapter: Adapter) -> float | None:
        if adapter.gradient is None or self._share.ranks == 1:
            return None
        common, experts = adapter.gradient.tensor_split([common_numel(adapter.shapes)])
        norms = [float(torch.linalg.vector_norm(part)) for part in (common, experts)]
        return math.hypot(norms[0], total_norm(norms[1]))

    def _common(self, adapter: Adapter, flat: Tensor) -> Tensor:
        return flat[: common_numel(adapter.shapes)]


def _experts_of(adapter: Adapter, requires_grad: bool) -> LoraSegment:
    """A segment with new leaves of an adapter's experts. Where its rows are does not matter."""
    leaves = adapter.leaves(requires_grad)
    pairs = {target.name: leaves[target.name] for target in adapter.targets if target.experts is not None}
    return LoraSegment(0, 0, adapter.scale, pairs)
