"""The gradients of losses while the model still computes logprobs: for losses that need only an entry's own logprob.

Each entry's gradient is that which `Scores` computes later from all logprobs. Knows how losses are grouped. Knows
nothing of formulas, of the model or of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.device import uploaded
from skyrl.trainer.losses import Loss, LossInputs
from skyrl.trainer.model.logprobs import PairGradients, Targets
from skyrl.trainer.passes.micro_batch import LossGroup, MicroBatch, MicroBatchLosses
from skyrl.trainer.passes.pass_run import MicroBatchItem


def with_gradients(made: MicroBatch, items: Sequence[MicroBatchItem]) -> MicroBatch:
    """The micro-batch of the items, with `Targets.gradients` of each segment that can have them."""
    stops = [0, *accumulate(len(item.parts) for item in items)]
    targets = [
        replace(each, gradients=pair_gradients(made.losses, range(stops[own.start], stops[own.stop]), each))
        for own, each in zip(made.parts, made.targets, strict=True)
    ]
    return replace(made, targets=targets)


def pair_gradients(losses: MicroBatchLosses, numbers: range, targets: Targets) -> PairGradients | None:
    """Of consecutive parts of a micro-batch, by their numbers, whose targets these are. None where a loss needs other
    logprobs than an entry's own, where a part may be left out of the gradient afterwards, because it shares one with
    other passes, and where targets are tokens of pictures."""
    groups = [group for group in losses.groups if any(number in numbers for number in group.numbers)]
    if not all(group.loss.by_entry and not group.joins_passes and group.inputs.entries is None for group in groups):
        return None
    pieces = cache(lambda: _pieces(groups, numbers, targets))  # of a micro-batch with several chunks alone

    def gradients(logprobs: Tensor, pairs: slice) -> Tensor:
        found = torch.zeros_like(logprobs)
        for piece in pieces():
            piece.add(found, logprobs, pairs)
        return found

    return gradients


@dataclass(frozen=True)
class _Piece:
    """Entries of one loss, by their pairs: int64 [n], ascending; `on_host`: the same."""

    loss: Loss
    config: Mapping[str, float]
    inputs: LossInputs
    pairs: Tensor
    on_host: npt.NDArray[np.int64]

    def add(self, found: Tensor, logprobs: Tensor, pairs: slice) -> None:
        """Add the gradients of these pairs' entries to the pairs', [p]. logprobs: of the pairs, [p]."""
        own = slice(*np.searchsorted(self.on_host, [pairs.start, pairs.stop]))
        if own.start == own.stop:
            return
        places = self.pairs[own] - pairs.start
        leaf = logprobs.index_select(0, places).requires_grad_()
        with torch.enable_grad():  # without the loss of a critic, which has no gradient here
            total = self.loss.function(leaf, self.inputs.at(own), self.config).total
        found.index_add_(0, places, *torch.autograd.grad(total, leaf))


def _pieces(groups: Sequence[LossGroup], numbers: range, targets: Targets) -> list[_Piece]:
    """The entries of `targets.trained`, of each group."""
    sizes = {number: part.entries for group in groups for number, part in zip(group.numbers, group.parts, strict=True)}
    of_parts = np.split(targets.on_host, np.cumsum([sizes[number] for number in numbers])[:-1])
    arrays: list[npt.NDArray[np.int64]] = []
    for group in groups:
        pairs = np.concatenate([of_parts[numbers.index(number)] for number in group.numbers if number in numbers])
        order = np.argsort(pairs, kind="stable")[: np.count_nonzero(pairs < len(targets.trained.ids))]
        before = sum(sizes[number] for number in group.numbers if number < numbers.start)
        arrays += [pairs[order], before + order]
    there = uploaded(arrays, targets.entries.device)
    return [
        _Piece(group.loss, group.config, group.inputs.at(places), pairs, on_host)
        for group, pairs, places, on_host in zip(groups, there[::2], there[1::2], arrays[::2], strict=True)
    ]
