"""The inputs of a micro-batch's losses: one copy takes all of them to the device.

Losses of one kind can be computed at once, for all passes of a micro-batch. Knows which inputs a loss has. Knows
nothing of formulas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.training.backends.torch_lora.checks import loss_config
from skyrl.training.backends.torch_lora.losses import LossFunction, LossInputs, LossValue
from skyrl.training.backends.torch_lora.picture_targets import text_entries
from skyrl.training.backends.torch_lora.running import Part, Slice
from skyrl.training.backends.torch_lora.transfers import uploaded

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
    parts: Sequence[Part]
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


def losses_of(batch: Sequence[Slice], device: torch.device, *, joined: bool) -> MicroBatchLosses:
    """The losses of the parts of some slices. With `joined`, those of one kind make a group; else each part is one."""
    parts = [(part, piece.running.joins_passes) for piece in batch for part in piece.parts]
    of_kind: dict[object, list[int]] = {}
    for number, (part, _) in enumerate(parts):
        of_kind.setdefault(_kind(part) if joined else number, []).append(number)
    found = [_Arrays.of([parts[number][0] for number in numbers]) for numbers in of_kind.values()]
    order = _order([*of_kind.values()], [part.entries for part, _ in parts])
    tensors = iter(
        uploaded([array for each in found for array in each.all()] + ([] if order is None else [order]), device)
    )
    groups = [
        each.on_device(numbers, any(parts[number][1] for number in numbers), tensors)
        for numbers, each in zip(of_kind.values(), found, strict=True)
    ]
    return MicroBatchLosses(groups, None if order is None else next(tensors))


def trained_entries(part: Part) -> npt.NDArray[np.bool_]:
    """The entries where the part's loss may have a gradient: bool [M]. At least one, so that the loss always has a
    graph. Without a backward they are the same, so that the logprobs are the same bits."""
    trained = part.loss.trained
    found = np.ones(part.entries, np.bool_) if trained is None else _entries(part, trained) != 0
    if (text := text_entries(part.data)) is not None:
        found &= text
    if not found.any():
        found[0] = True
    return found


def _kind(part: Part) -> object:
    """Equal for parts whose losses can be computed as one."""
    return part.loss.function, _names(part), tuple(sorted(_config(part).items()))


def _names(part: Part) -> tuple[str, ...]:
    return (*part.loss.required, *part.loss.optional)


def _config(part: Part) -> dict[str, float]:
    training_pass = part.running.training_pass
    return loss_config(training_pass.loss_fn, part.loss, training_pass.loss_config)


def _order(groups: Sequence[Sequence[int]], entries: Sequence[int]) -> _Ints | None:
    """`MicroBatchLosses.order`. entries: of each part of the micro-batch."""
    numbers = [number for group in groups for number in group]
    if numbers == sorted(numbers):
        return None
    places = np.split(np.arange(sum(entries)), np.cumsum(entries)[:-1])
    return np.concatenate([places[number] for number in numbers])


@dataclass(frozen=True)
class _Arrays:
    """What a group has on the device, before it is there."""

    parts: Sequence[Part]
    inputs: Mapping[str, npt.NDArray[np.float32]]
    datum: _Ints
    count: int
    entries: _Ints | None
    active: _Ints | None
    weights_of: Sequence[float | None]
    part_of_entry: _Ints | None
    part_of_active: _Ints | None

    @staticmethod
    def of(parts: Sequence[Part]) -> _Arrays:
        inputs = {name: np.concatenate([_entries(part, name) for part in parts]) for name in _names(parts[0])}
        data = [datum for part in parts for datum in part.data]
        sizes = [datum.loss_inputs["target_tokens"].size for datum in data]
        datum_of_entry = np.repeat(np.arange(len(sizes)), sizes)
        part_of_entry = np.repeat(np.arange(len(parts)), [part.entries for part in parts])
        text, part_of_text = text_entries(data), part_of_entry
        if text is not None:
            inputs = {name: array[text] for name, array in inputs.items()}
            datum_of_entry, part_of_text = datum_of_entry[text], part_of_entry[text]
        active = np.flatnonzero(inputs["advantages"]) if "advantages" in inputs else None
        several = len(parts) > 1
        return _Arrays(
            parts,
            inputs,
            datum_of_entry,
            len(sizes),
            None if text is None else np.flatnonzero(text),
            active,
            _sums(inputs.get("weights"), part_of_text, len(parts)),
            part_of_entry if several else None,
            part_of_text[active] if several and active is not None else None,
        )

    def all(self) -> Iterator[npt.NDArray[np.float32] | _Ints]:
        yield from self.inputs.values()
        optional = (self.entries, self.active, self.part_of_entry, self.part_of_active)
        yield from (self.datum, *(array for array in optional if array is not None))

    def on_device(self, numbers: Sequence[int], joins_passes: bool, tensors: Iterator[Tensor]) -> LossGroup:
        """tensors: begin with those of `all`."""
        inputs = {name: next(tensors) for name in self.inputs}
        datum = next(tensors)
        optional = (self.entries, self.active, self.part_of_entry, self.part_of_active)
        entries, active, part_of_entry, part_of_active = (
            None if array is None else next(tensors) for array in optional
        )
        return LossGroup(
            numbers,
            self.parts,
            sum(part.entries for part in self.parts),
            self.parts[0].loss.function,
            _config(self.parts[0]),
            LossInputs(inputs, datum, self.count, entries),
            active,
            self._active_of(),
            self.weights_of,
            part_of_entry,
            part_of_active,
            joins_passes,
        )

    def _active_of(self) -> list[int]:
        if self.active is None:
            return [0] * len(self.parts)
        if self.part_of_active is None:
            return [len(self.active)]
        return np.bincount(self.part_of_active, minlength=len(self.parts)).tolist()


def _sums(weights: npt.NDArray[np.float32] | None, part_of: _Ints, parts: int) -> list[float | None]:
    """`LossGroup.weights_of`. part_of: of each weight."""
    if weights is None:
        return [None] * parts
    return np.bincount(part_of, np.where(weights < 0, np.nan, weights), minlength=parts).tolist()


def _entries(part: Part, name: str) -> npt.NDArray[np.float32]:
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
