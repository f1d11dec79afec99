"""Micro-batches: what the model gets of their items, and their losses with the inputs.

One copy takes the inputs of all losses to the device, and one what the model computes from. Losses of one kind are
computed at once, for all passes of a micro-batch. Knows which inputs a loss has. Knows nothing of formulas, of the
model or of adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.custom_loss.loss import DatumLosses
from skyrl.trainer.device import HOST, moved, uploaded
from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.losses import Loss, LossInputs, LossValue, loss_config
from skyrl.trainer.model.logprobs import Targets
from skyrl.trainer.passes.pass_run import MicroBatchItem, PassShare, scorings_of
from skyrl.trainer.rows import packing
from skyrl.trainer.rows.pictures import text_entries
from skyrl.trainer.rows.prefixes import lay_out
from skyrl.trainer.vision import Seen, VisionTower

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LossGroup:
    """Parts whose losses are computed as one. They have one loss function and the same settings.

    numbers: of the parts, among those of the micro-batch. entries: how many targets they have. inputs: those of one
    part after those of another, without the targets that are tokens of pictures. active: int64 [A], the places of the
    entries with an advantage, and `active_of` how many each part has; None: the loss has no advantages. weights_of: the
    sum of each part's weights, NaN if one of them is negative; None: the loss has no weights.
    part_of_entry: int64 [entries], part_of_active: int64 [A], the place of its part in `numbers`; None for one part.
    `joins_passes`: some of the parts have one gradient with parts of other passes. values: where the values of the
    entries are among those of the micro-batch, int64 [entries]; None without a critic.
    """

    numbers: Sequence[int]
    parts: Sequence[PassShare]
    entries: int
    loss: Loss
    config: Mapping[str, float]
    inputs: LossInputs
    active: Tensor | None
    active_of: Sequence[int]
    weights_of: Sequence[float | None]
    part_of_entry: Tensor | None
    part_of_active: Tensor | None
    joins_passes: bool
    values: Tensor | None

    def leaf(self, logprobs: Tensor, values: Tensor | None) -> Tensor:
        """What the loss is a function of: logprobs, float32 [entries], or with a critic logprobs and values, float32
        [2, entries]. values: of the micro-batch."""
        if self.values is None or values is None:
            return logprobs.detach()
        return torch.stack([logprobs.detach(), values.detach().index_select(0, self.values)])

    def value(self, leaf: Tensor) -> LossValue:
        """leaf: of `leaf`."""
        if self.inputs.entries is not None:
            leaf = leaf.index_select(-1, self.inputs.entries)
        logprobs, values = (leaf, None) if leaf.ndim == 1 else leaf.unbind()
        return self.loss.value(logprobs, self.inputs, self.config, values)


@dataclass(frozen=True)
class MicroBatchLosses:
    """The losses of a micro-batch. order: int64 [entries], the places of the groups' entries among those of the
    micro-batch; None: the groups have them in that order."""

    groups: Sequence[LossGroup] = ()
    order: Tensor | None = None


def losses_of(batch: Sequence[MicroBatchItem], device: torch.device, *, joined: bool) -> MicroBatchLosses:
    """The losses of the parts of some slices. With `joined`, those of one kind make a group; else each part is one."""
    parts = [(part, piece.running.joins_passes) for piece in batch for part in piece.parts]
    of_kind: dict[object, list[int]] = {}
    for number, (part, _) in enumerate(parts):
        kind = part.loss.function, _names(part), tuple(sorted(_config(part).items()))
        of_kind.setdefault(kind if joined else number, []).append(number)
    values = places_of_values([part for part, _ in parts])
    found = [
        _group(numbers, [parts[n][0] for n in numbers], values, joins_passes=any(parts[n][1] for n in numbers))
        for numbers in of_kind.values()
    ]
    order = _order([*of_kind.values()], [part.entries for part, _ in parts])
    arrays = [array for of_group, _ in found for array in of_group]
    tensors = iter(uploaded(arrays if order is None else [*arrays, order], device))
    groups = [made(tensors) for _, made in found]
    return MicroBatchLosses(groups, None if order is None else next(tensors))


def own_entries(part: PassShare) -> npt.NDArray[np.bool_]:
    """The entries where the part's loss may have a gradient by way of logprobs: bool [M]."""
    trained = part.loss.trained
    found = np.ones(part.entries, np.bool_) if trained is None else _entries(part, trained) != 0
    if (text := text_entries(part.data)) is not None:
        found &= text
    return found


def trained_entries(part: PassShare) -> npt.NDArray[np.bool_]:
    """`own_entries`, and at least one, so that the loss always has a graph. Without a backward they are the same, so
    that the logprobs are the same bits."""
    found = own_entries(part)
    if not found.any():
        found[0] = True
    return found


def _names(part: PassShare) -> tuple[str, ...]:
    return (*part.loss.required, *part.loss.optional)


def _config(part: PassShare) -> dict[str, float]:
    training_pass = part.running.training_pass
    return loss_config(training_pass.loss_fn, part.loss, training_pass.loss_config)


def _order(groups: Sequence[Sequence[int]], entries: Sequence[int]) -> _Ints | None:
    """`MicroBatchLosses.order`. entries: of each part of the micro-batch."""
    numbers = [number for group in groups for number in group]
    if numbers == sorted(numbers):
        return None
    places = np.split(np.arange(sum(entries)), np.cumsum(entries)[:-1])
    return np.concatenate([places[number] for number in numbers])


def _group(
    numbers: Sequence[int], parts: Sequence[PassShare], values: Mapping[int, range], *, joins_passes: bool
) -> tuple[list[npt.NDArray[Any]], Callable[[Iterator[Tensor]], LossGroup]]:
    """What the group needs on the device, and what makes the group of that."""
    inputs = {name: np.concatenate([_entries(part, name) for part in parts]) for name in _names(parts[0])}
    data = [datum for part in parts for datum in part.data]
    sizes = [datum.loss_inputs["target_tokens"].size for datum in data]
    datum_of_entry = np.repeat(np.arange(len(sizes)), sizes)
    part_of_entry = np.repeat(np.arange(len(parts)), [part.entries for part in parts])
    function = parts[0].loss.function
    text, part_of_text = text_entries(data), part_of_entry
    if isinstance(function, DatumLosses):
        text, function = None, function.of([(part.indices, part.data) for part in parts])
    if text is not None:
        inputs = {name: array[text] for name, array in inputs.items()}
        datum_of_entry, part_of_text = datum_of_entry[text], part_of_entry[text]
    weights_of: list[float | None] = [None] * len(parts)
    if (weights := inputs.get("weights")) is not None:
        weights_of = np.bincount(part_of_text, np.where(weights < 0, np.nan, weights), minlength=len(parts)).tolist()
    places = {"datum": datum_of_entry}
    if text is not None:
        places["entries"] = np.flatnonzero(text)
    part_of_active = part_of_text[:0]
    if "advantages" in inputs:
        places["active"] = np.flatnonzero(inputs["advantages"])
        part_of_active = part_of_text[places["active"]]
    if parts[0].loss.has_critic:
        places["values"] = np.concatenate([values[number] for number in numbers])
    if len(parts) > 1:
        places["part_of_entry"] = part_of_entry
        if "active" in places:
            places["part_of_active"] = part_of_active

    def made(tensors: Iterator[Tensor]) -> LossGroup:
        of_inputs = {name: next(tensors) for name in inputs}
        there = {name: next(tensors) for name in places}
        return LossGroup(
            numbers,
            parts,
            sum(sizes),
            replace(parts[0].loss, function=function),
            _config(parts[0]),
            LossInputs(of_inputs, there["datum"], len(sizes), there.get("entries")),
            there.get("active"),
            np.bincount(part_of_active, minlength=len(parts)).tolist(),
            weights_of,
            there.get("part_of_entry"),
            there.get("part_of_active"),
            joins_passes,
            there.get("values"),
        )

    return [*inputs.values(), *places.values()], made


def _entries(part: PassShare, name: str) -> npt.NDArray[np.float32]:
    """One input of the part, float32 [M]."""
    default = part.loss.optional.get(name, 0.0)
    return np.concatenate(
        [
            datum.loss_inputs[name].reshape(-1).astype(np.float32)
            if name in datum.loss_inputs
            else np.full(datum.loss_inputs["target_tokens"].size, default, np.float32)
            for datum in part.data
        ]
    )


def places_of_values(parts: Sequence[PassShare]) -> dict[int, range]:
    """Where the values of some parts of a micro-batch, in order, are among all values; of those, by number, whose
    adapters have a value head: one for each position."""
    heads = [number for number, part in enumerate(parts) if part.running.model.has_value_head]
    stops = [*accumulate(parts[number].tokens for number in heads)]
    return {number: range(stop - parts[number].tokens, stop) for number, stop in zip(heads, stops, strict=True)}


@dataclass(frozen=True)
class MicroBatch:
    """Slices as `PackedModel.forward` takes them: `packed` has one entry for each slice, `targets` and `segments` one
    for each part of consecutive slices whose adapters are updated together; without that, one for each slice.
    `parts`: the slices of each segment. `losses`: of the slices' parts; of one kind together where adapters are updated
    together."""

    packed: list[packing.PackedItem] = field(default_factory=list)
    targets: list[Targets] = field(default_factory=list)
    segments: list[LoraSegment] = field(default_factory=list)
    parts: Sequence[range] = ()
    losses: MicroBatchLosses = MicroBatchLosses()

    @staticmethod
    def of(
        batch: Sequence[MicroBatchItem],
        seen: Sequence[Mapping[str, Seen]],
        device: torch.device,
        parts: Sequence[range] | None = None,
    ) -> MicroBatch:
        """Without adapters' matrices. `seen`: the pictures of each slice. `parts`: consecutive slices that make a
        segment; None: each slice makes one."""
        losses = losses_of(batch, device, joined=parts is not None)
        parts = parts or [range(number, number + 1) for number in range(len(batch))]
        packed: list[packing.PackedItem] = []
        for piece, pictures in zip(batch, seen, strict=True):
            layout = lay_out(piece.running.tree, piece.indices)
            start = packed[-1].stop if packed else 0
            packed.append(packing.pack(piece.data, layout, start, HOST, pictures))
        targets: list[Targets] = []
        segments: list[LoraSegment] = []
        for part in parts:
            slices, own = batch[part.start : part.stop], packed[part.start : part.stop]
            start, stop = own[0].start, own[-1].stop
            arrays = [datum.loss_inputs["target_tokens"] for piece in slices for datum in piece.data]
            rows_of = [rows + (each.start - start) for each in own for rows in each.layout.rows_of]
            trained = np.concatenate([trained_entries(each) for piece in slices for each in piece.parts])
            targets.append(Targets.of(arrays, rows_of, trained, HOST, scorings_of(slices)))
            segments.append(LoraSegment(start, stop, 1.0))
        there: list[Any] = moved([*packed, *targets], device)
        return MicroBatch(there[: len(packed)], there[len(packed) :], segments, parts, losses)


def look_at(tower: VisionTower | None, piece: MicroBatchItem) -> Mapping[str, Seen]:
    """The pictures of a checked slice, by digest. Raises InvalidRequest as `VisionTower.look_at`."""
    found: dict[str, Seen] = {}
    if tower is not None:
        for part in piece.parts:
            numbered = zip(part.indices, part.data, strict=True)
            found |= tower.look_at(numbered, part.running.training_pass.files)
    return found
