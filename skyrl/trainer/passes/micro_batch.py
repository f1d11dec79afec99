"""Micro-batches: what the model gets of their items, their losses, and the gradients of these with respect to logprobs.

One copy takes the inputs of all losses to the device, where all stay until one copy takes what the host needs. Losses
of one kind are computed at once, for all passes of a micro-batch. Knows which inputs a loss has. Knows nothing of
formulas, of the model or of adapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.custom_loss.loss import METRIC, DatumLosses, custom_sums
from skyrl.trainer.device import failure_of, read_back, uploaded
from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.losses import LossFunction, LossInputs, LossValue, Tally, loss_config
from skyrl.trainer.model.logprobs import Targets
from skyrl.trainer.passes.pass_run import MicroBatchItem, PartScore, PassShare, is_trained, scorings_of
from skyrl.trainer.protocol import Datum
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
    `joins_passes`: some of the parts have one gradient with parts of other passes.
    """

    numbers: Sequence[int]
    parts: Sequence[PassShare]
    entries: int
    function: LossFunction
    config: Mapping[str, float]
    inputs: LossInputs
    active: Tensor | None
    active_of: Sequence[int]
    weights_of: Sequence[float | None]
    part_of_entry: Tensor | None
    part_of_active: Tensor | None
    joins_passes: bool

    def value(self, logprobs: Tensor) -> LossValue:
        """logprobs: float32 [entries]."""
        if self.inputs.entries is not None:
            logprobs = logprobs.index_select(0, self.inputs.entries)
        return self.function(logprobs, self.inputs, self.config)


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
    found = [
        _group(numbers, [parts[number][0] for number in numbers], joins_passes=any(parts[n][1] for n in numbers))
        for numbers in of_kind.values()
    ]
    order = _order([*of_kind.values()], [part.entries for part, _ in parts])
    arrays = [array for of_group, _ in found for array in of_group]
    tensors = iter(uploaded(arrays if order is None else [*arrays, order], device))
    groups = [made(tensors) for _, made in found]
    return MicroBatchLosses(groups, None if order is None else next(tensors))


def trained_entries(part: PassShare) -> npt.NDArray[np.bool_]:
    """The entries where the part's loss may have a gradient: bool [M]. At least one, so that the loss always has a
    graph. Without a backward they are the same, so that the logprobs are the same bits."""
    trained = part.loss.trained
    found = np.ones(part.entries, np.bool_) if trained is None else _entries(part, trained) != 0
    if (text := text_entries(part.data)) is not None:
        found &= text
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
    numbers: Sequence[int], parts: Sequence[PassShare], *, joins_passes: bool
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
            function,
            _config(parts[0]),
            LossInputs(of_inputs, there["datum"], len(sizes), there.get("entries")),
            there.get("active"),
            np.bincount(part_of_active, minlength=len(parts)).tolist(),
            weights_of,
            there.get("part_of_entry"),
            there.get("part_of_active"),
            joins_passes,
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


_MAX_LOG_RATIO = 20.0
"""In metrics (never in losses) ratios are capped at e^20, so that an outlier leaves the mean finite."""


@dataclass(frozen=True)
class GroupSums:
    """Sums of the losses of a group's parts, on the device. numbers: float64, flat: for each of `names` one number of
    each part. The sums of ratios are over entries with an advantage. `counts`, if it is there, is 0 for a part whose
    gradient was left out."""

    group: LossGroup
    names: tuple[str, ...]
    numbers: Tensor

    @staticmethod
    @torch.no_grad()
    def of(group: LossGroup, value: LossValue, total: Tensor) -> GroupSums:
        """total: `value.total`."""
        if value.metrics:
            return GroupSums(group, ("loss", *value.metrics), custom_sums(value, group.part_of_entry, len(group.parts)))
        if group.part_of_entry is None:
            return _sums_of_one(group, value, total)
        return _sums_of_each(group, value, group.part_of_entry)

    def tallies(self, found: npt.NDArray[np.float64]) -> list[Tally]:
        """Of each part. found: `numbers` on the host."""
        tallies: list[Tally] = []
        group = self.group
        for part, active, weights, numbers in zip(
            group.parts, group.active_of, group.weights_of, self._by_part(found), strict=True
        ):
            of_part = dict(zip(self.names, numbers, strict=True))
            with np.errstate(over="ignore"):  # a sum beyond float32 is infinite, however it was computed
                loss = float(np.float32(of_part["loss"]))
            custom = {name: number for name, number in of_part.items() if name.startswith(METRIC)}
            tally = Tally(loss, part.tokens, part.rows, clipped=of_part.get("clipped"), weights=weights, custom=custom)
            if "ratio" in of_part:
                tally.active = active
            if tally.active:
                tally.kl, tally.ratio, tally.ratio_max = -of_part["log_ratio"], of_part["ratio"], of_part["ratio_max"]
            tallies.append(tally)
        return tallies

    def counts(self, found: npt.NDArray[np.float64]) -> list[bool]:
        """Whether each part counts. found: `numbers` on the host."""
        if "counts" not in self.names:
            return [True] * len(self.group.parts)
        place = self.names.index("counts")
        return [numbers[place] != 0 for numbers in self._by_part(found)]

    def _by_part(self, found: npt.NDArray[np.float64]) -> list[list[float]]:
        return found.reshape(len(self.names), -1).T.tolist()


@dataclass(frozen=True)
class Scores:
    """Of a micro-batch, on the device. logprobs: float32 [entries]. gradient: of all losses with respect to logprobs,
    float32 [entries]; None without a backward. errors: of parts whose loss has raised, by number. outside: float32
    [entries] as `Targets.outside`, or nothing."""

    logprobs: Tensor
    sums: Sequence[GroupSums]
    gradient: Tensor | None
    errors: Mapping[int, tuple[PassShare, Exception]] = field(default_factory=dict)
    outside: Sequence[Tensor] = ()

    @staticmethod
    def of(losses: MicroBatchLosses, logprobs: Tensor, *, backward: bool, apart: bool = False) -> Scores:
        """The graph of `logprobs` is left alone. With `backward`, the gradient of a part that has one gradient with
        other passes is 0 if the part's loss or its gradient is not finite. With `apart`, a loss that raises fails its
        part alone, of which each group has one; the part's gradient is 0."""
        logprobs = logprobs.detach()
        if not losses.groups:
            return Scores(logprobs, [], torch.zeros_like(logprobs) if backward else None)
        ordered = logprobs if losses.order is None else logprobs.index_select(0, losses.order)
        leaves = [
            own.detach().requires_grad_(backward) for own in ordered.split([group.entries for group in losses.groups])
        ]
        totals: list[Tensor] = []
        sums: list[GroupSums] = []
        errors: dict[int, tuple[PassShare, Exception]] = {}
        for group, own in zip(losses.groups, leaves, strict=True):
            try:
                value = group.value(own)
                total = value.total
                sums.append(GroupSums.of(group, value, total))
            except Exception as error:
                if not apart:
                    raise
                total = own.sum() * 0
                errors[group.numbers[0]] = group.parts[0], failure_of(error, logprobs.device)
            totals.append(total)
        if not backward:
            return Scores(logprobs, sums, None, errors)
        gradients = list(torch.autograd.grad(totals, leaves))
        for number, group in enumerate(losses.groups):
            if group.joins_passes:
                sums[number], gradients[number] = _without_not_finite(sums[number], gradients[number])
        gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        if losses.order is not None:
            gradient = torch.empty_like(gradient).index_copy_(0, losses.order, gradient)
        return Scores(logprobs, sums, gradient, errors)

    def read(self) -> list[PartScore]:
        """Of each part, in the order of the micro-batch. Waits for the device once."""
        if not self.sums and not self.errors:
            return []
        numbers, (logprobs, *outside) = read_back([each.numbers for each in self.sums], [self.logprobs, *self.outside])
        found: list[tuple[int, PassShare, Tally, bool, Exception | None]] = [
            (number, part, tally, counts, None)
            for each, own in zip(self.sums, numbers, strict=True)
            for number, part, tally, counts in zip(
                each.group.numbers, each.group.parts, each.tallies(own), each.counts(own), strict=True
            )
        ]
        found += [(number, part, Tally(), False, error) for number, (part, error) in self.errors.items()]
        scores: list[PartScore] = []
        start = 0
        for _, part, tally, counts, error in sorted(found, key=lambda each: each[0]):
            stop = start + part.entries
            for marks in outside if part.restricts else ():
                trains = any(is_trained(datum, part.loss) for datum in part.data)
                tally.outside = int(marks[start:stop][trained_entries(part)].sum()) if trains else 0
            scores.append(PartScore(tally, by_datum(logprobs[start:stop], part.data), counts, error))
            start = stop
        return scores


def by_datum(logprobs: npt.NDArray[np.float32], data: Sequence[Datum]) -> list[npt.NDArray[np.float32]]:
    """Logprobs [entries] of some sequences, for each in the shape of its target_tokens."""
    shapes = [datum.loss_inputs["target_tokens"].shape for datum in data]
    flat = np.split(logprobs, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return [part.reshape(shape) for part, shape in zip(flat, shapes, strict=True)]


def _sums_of_one(group: LossGroup, value: LossValue, total: Tensor) -> GroupSums:
    if value.log_ratio is None or group.active is None:
        return GroupSums(group, ("loss",), total.double().reshape(1))
    log_ratio = value.log_ratio.index_select(0, group.active)
    ratio = log_ratio.clamp(max=_MAX_LOG_RATIO).exp()
    found = {
        "loss": total,
        "ratio": ratio.sum(),
        "log_ratio": log_ratio.sum(),
        "ratio_max": ratio.max() if len(ratio) else total,
    }
    if value.clipped is not None:
        found["clipped"] = value.clipped.index_select(0, group.active).sum()
    return GroupSums(group, tuple(found), torch.stack([each.double() for each in found.values()]))


def _sums_of_each(group: LossGroup, value: LossValue, part_of_entry: Tensor) -> GroupSums:
    """As many operations as for one part. No part's numbers change those of another part."""
    if group.inputs.entries is not None:
        part_of_entry = part_of_entry.index_select(0, group.inputs.entries)
    zeros = value.terms.new_zeros(len(group.parts), dtype=torch.float64)
    losses = zeros.index_add(0, part_of_entry, value.terms.double())
    if value.log_ratio is None or group.active is None or group.part_of_active is None:
        return GroupSums(group, ("loss",), losses)
    log_ratio = value.log_ratio.index_select(0, group.active)
    ratio = log_ratio.clamp(max=_MAX_LOG_RATIO).exp()
    found = {"ratio": ratio, "log_ratio": log_ratio}
    if value.clipped is not None:
        found["clipped"] = value.clipped.index_select(0, group.active).to(ratio.dtype)
    columns = torch.stack([*found.values()]).double()
    sums = columns.new_zeros(len(found), len(group.parts)).index_add_(1, group.part_of_active, columns)
    ratio_max = zeros.scatter_reduce(0, group.part_of_active, columns[0], "amax")  # no ratio is below 0
    return GroupSums(group, ("loss", *found, "ratio_max"), torch.cat([losses, sums.view(-1), ratio_max]))


def _without_not_finite(sums: GroupSums, gradient: Tensor) -> tuple[GroupSums, Tensor]:
    """The sums with `counts`, and the gradient [entries] of the group with 0 for the parts that do not count."""
    group, losses = sums.group, sums.numbers[: len(sums.group.parts)].float()
    finite = gradient.isfinite()
    if group.part_of_entry is None:
        counts = losses.isfinite() & finite.all()
        kept = counts
    else:
        broken = torch.zeros_like(losses).index_add_(0, group.part_of_entry, finite.logical_not().float())
        counts = losses.isfinite() & (broken == 0)
        kept = counts.index_select(0, group.part_of_entry)
    numbers = torch.cat([sums.numbers, counts.double()])
    return replace(sums, names=(*sums.names, "counts"), numbers=numbers), torch.where(kept, gradient, 0)


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
        made = MicroBatch(parts=parts or [range(number, number + 1) for number in range(len(batch))], losses=losses)
        for piece, pictures in zip(batch, seen, strict=True):
            layout = lay_out(piece.running.tree, piece.indices)
            start = made.packed[-1].stop if made.packed else 0
            made.packed.append(packing.pack(piece.data, layout, start, device, pictures))
        for part in made.parts:
            slices, packed = batch[part.start : part.stop], made.packed[part.start : part.stop]
            start, stop = packed[0].start, packed[-1].stop
            arrays = [datum.loss_inputs["target_tokens"] for piece in slices for datum in piece.data]
            rows_of = [rows + (each.start - start) for each in packed for rows in each.layout.rows_of]
            trained = np.concatenate([trained_entries(each) for piece in slices for each in piece.parts])
            made.targets.append(Targets.of(arrays, rows_of, trained, device, scorings_of(slices)))
            made.segments.append(LoraSegment(start, stop, 1.0))
        return made


def look_at(tower: VisionTower | None, piece: MicroBatchItem) -> Mapping[str, Seen]:
    """The pictures of a checked slice, by digest. Raises InvalidRequest as `VisionTower.look_at`."""
    found: dict[str, Seen] = {}
    if tower is not None:
        for part in piece.parts:
            numbered = zip(part.indices, part.data, strict=True)
            found |= tower.look_at(numbered, part.running.training_pass.files)
    return found
