"""The gradients of losses while the model still computes logprobs: for losses that need only an entry's own logprob.

Each entry's gradient is that which `Scores` computes later from all logprobs. Knows how losses are grouped. Knows
nothing of formulas, of the model or of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from skyrl.trainer.losses import Loss, LossInputs
from skyrl.trainer.model.logprobs import EntryGradients
from skyrl.trainer.passes.micro_batch import LossGroup, MicroBatch, MicroBatchLosses
from skyrl.trainer.passes.pass_run import MicroBatchItem


def with_gradients(made: MicroBatch, items: Sequence[MicroBatchItem]) -> MicroBatch:
    """The micro-batch of the items, with `Targets.gradients` of each segment that can have them."""
    stops = [0, *accumulate(len(item.parts) for item in items)]
    gradients = [entry_gradients(made.losses, range(stops[own.start], stops[own.stop])) for own in made.parts]
    targets = [replace(each, gradients=own) for each, own in zip(made.targets, gradients, strict=True)]
    return replace(made, targets=targets)


@dataclass(frozen=True)
class _Piece:
    """Entries of one loss. places: of these among the entries of some parts, in the order of the inputs."""

    loss: Loss
    config: Mapping[str, float]
    inputs: LossInputs
    places: Sequence[slice]

    def leaf(self, logprobs: Tensor) -> Tensor:
        own = [logprobs[place] for place in self.places]
        return (own[0] if len(own) == 1 else torch.cat(own)).detach().requires_grad_()

    def total(self, leaf: Tensor) -> Tensor:
        """Without the loss of a critic, which has no gradient here."""
        return self.loss.function(leaf, self.inputs, self.config).total


def entry_gradients(losses: MicroBatchLosses, numbers: range) -> EntryGradients | None:
    """Of consecutive parts of a micro-batch, by their numbers: the gradient of their losses at their entries, in the
    order of the parts. None where a loss needs other logprobs than an entry's own, where a part may be left out of the
    gradient afterwards, because it shares one with other passes, and where targets are tokens of pictures."""
    groups = [group for group in losses.groups if any(number in numbers for number in group.numbers)]
    if not all(group.loss.by_entry and not group.joins_passes and group.inputs.entries is None for group in groups):
        return None
    entries = {
        number: part.entries for group in groups for number, part in zip(group.numbers, group.parts, strict=True)
    }
    stops = dict(zip(numbers, accumulate(entries[number] for number in numbers), strict=True))
    places = {number: slice(stop - entries[number], stop) for number, stop in stops.items()}
    pieces = [_piece(group, numbers, entries, places) for group in groups]

    def gradients(logprobs: Tensor) -> Tensor:
        leaves = [piece.leaf(logprobs) for piece in pieces]
        with torch.enable_grad():
            totals = [piece.total(leaf) for piece, leaf in zip(pieces, leaves, strict=True)]
        of_leaves = torch.autograd.grad(totals, leaves)
        found = torch.empty_like(logprobs)
        for piece, of_leaf in zip(pieces, of_leaves, strict=True):
            of_parts = of_leaf.split([place.stop - place.start for place in piece.places])
            for place, of_part in zip(piece.places, of_parts, strict=True):
                found[place] = of_part
        return found

    return gradients


def _piece(group: LossGroup, numbers: range, entries: Mapping[int, int], places: Mapping[int, slice]) -> _Piece:
    """The group's entries of the parts `numbers`, which lie one after the other in the group, too."""
    own = [number for number in group.numbers if number in numbers]
    start = sum(entries[number] for number in group.numbers if number < numbers.start)
    chosen = slice(start, start + sum(entries[number] for number in own))
    tensors = {name: tensor[chosen] for name, tensor in group.inputs.tensors.items()}
    inputs = LossInputs(tensors, group.inputs.datum[chosen], group.inputs.count)
    return _Piece(group.loss, group.config, inputs, [places[number] for number in own])
