"""The losses of a micro-batch and their gradients with respect to the model's outputs, and each part's sums.

All of it is computed on the device, and one copy takes what the host needs. The host may read that later, when it has
started other work. Knows how losses are grouped. Knows nothing of
formulas, of the model or of adapters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.critic import MASK
from skyrl.trainer.custom_loss.loss import METRIC, custom_sums
from skyrl.trainer.device import HostCopy, failure_of
from skyrl.trainer.losses import LossValue
from skyrl.trainer.passes.micro_batch import LossGroup, MicroBatchLosses, own_entries, places_of_values
from skyrl.trainer.passes.pass_run import PartScore, PassShare
from skyrl.trainer.protocol import Datum
from skyrl.trainer.tally import Tally

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
            if "value_loss" in of_part:
                tally.value_tokens = of_part["value_tokens"]
                tally.value_loss, tally.value_clipped = of_part["value_loss"], of_part["value_clipped"]
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
    """Of a micro-batch, on the device. logprobs: float32 [entries]. values: float32 [positions], of the parts whose
    adapters have a value head; None if none has. gradient, value_gradient: of all losses with respect to both; None
    without a backward. errors: of parts whose loss has raised, by number. outside: float32 [entries] as
    `Targets.outside`, or nothing. unlike: `Targets.unlike` of all segments."""

    logprobs: Tensor
    sums: Sequence[GroupSums]
    gradient: Tensor | None
    errors: Mapping[int, tuple[PassShare, Exception]] = field(default_factory=dict)
    values: Tensor | None = None
    value_gradient: Tensor | None = None
    outside: Sequence[Tensor] = ()
    unlike: Sequence[Tensor] = ()

    @staticmethod
    def of(
        losses: MicroBatchLosses,
        logprobs: Tensor,
        values: Tensor | None = None,
        *,
        backward: bool,
        apart: bool = False,
    ) -> Scores:
        """The graph of `logprobs` and `values` is left alone. With `backward`, the gradient of a part that has one
        gradient with other passes is 0 if the part's loss or its gradient is not finite. With `apart`, a loss that
        raises fails its part alone, of which each group has one; the part's gradient is 0."""
        logprobs, values = logprobs.detach(), None if values is None else values.detach()
        if not losses.groups:
            return Scores(logprobs, [], torch.zeros_like(logprobs) if backward else None)
        ordered = logprobs if losses.order is None else logprobs.index_select(0, losses.order)
        pieces = ordered.split([group.entries for group in losses.groups])
        leaves = [
            group.leaf(own, values).requires_grad_(backward) for group, own in zip(losses.groups, pieces, strict=True)
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
            return Scores(logprobs, sums, None, errors, values)
        gradients = list(torch.autograd.grad(totals, leaves))
        for number, group in enumerate(losses.groups):
            if group.joins_passes:
                sums[number], gradients[number] = _without_not_finite(sums[number], gradients[number])
        value_gradient = None if values is None else torch.zeros_like(values)
        for number, (group, both) in enumerate(zip(losses.groups, gradients, strict=True)):
            if both.ndim == 2 and value_gradient is not None and group.values is not None:
                gradients[number], of_values = both.unbind()
                value_gradient.index_copy_(0, group.values, of_values)
        gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        if losses.order is not None:
            gradient = torch.empty_like(gradient).index_copy_(0, losses.order, gradient)
        return Scores(logprobs, sums, gradient, errors, values, value_gradient)

    def sent(self) -> SentScores:
        """The same on its way to the host, which does not wait."""
        if not self.sums and not self.errors:
            return SentScores((), {}, 0, None)
        of_heads = [] if self.values is None else [self.values]
        arrays = [self.logprobs, *self.outside, *of_heads]
        copy = HostCopy([*(each.numbers for each in self.sums), *self.unlike], arrays)
        return SentScores(self.sums, self.errors, len(self.outside), copy)


@dataclass(frozen=True)
class SentScores:
    """The scores of a micro-batch that the host has not read yet. It holds what losses are computed from and the
    copied numbers, a few for each target, and nothing of the model's layers. outside: how many arrays of
    `Scores.outside`. `copy`: None for a micro-batch without parts."""

    sums: Sequence[GroupSums]
    errors: Mapping[int, tuple[PassShare, Exception]]
    outside: int
    copy: HostCopy | None

    def read(self) -> list[PartScore]:
        """Of each part, in the order of the micro-batch. Waits until the device has computed them. Raises RuntimeError
        if gradients were computed with another gradient of the losses than theirs."""
        if self.copy is None:
            return []
        numbers, (logprobs, *others) = self.copy.read()
        numbers, unlike = numbers[: len(self.sums)], numbers[len(self.sums) :]
        if any(each.any() for each in unlike):
            raise RuntimeError(
                "a loss's gradient depends on other logprobs than an entry's own, against its `by_entry`"
            )
        outside, values = others[: self.outside], others[self.outside :]
        found: list[tuple[int, PassShare, Tally, bool, Exception | None]] = [
            (number, part, tally, counts, None)
            for each, own in zip(self.sums, numbers, strict=True)
            for number, part, tally, counts in zip(
                each.group.numbers, each.group.parts, each.tallies(own), each.counts(own), strict=True
            )
        ]
        found += [(number, part, Tally(), False, error) for number, (part, error) in self.errors.items()]
        ordered = sorted(found, key=lambda each: each[0])
        places = places_of_values([part for _, part, *_ in ordered])
        scores: list[PartScore] = []
        start = 0
        for number, (_, part, tally, counts, error) in enumerate(ordered):
            stop = start + part.entries
            for marks in outside if part.restricts else ():
                tally.outside = int(marks[start:stop][own_entries(part)].sum())
            own = values[0][places[number].start : places[number].stop] if number in places else None
            of_states = None if own is None else np.split(own, np.cumsum([len(each.tokens) for each in part.data])[:-1])
            scores.append(PartScore(tally, by_datum(logprobs[start:stop], part.data), counts, error, of_states))
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
    found |= {name: each.sum() for name, each in _of_critic(group, value).items()}
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
    of_critic = {
        name: zeros.index_add(0, part_of_entry, each.double()) for name, each in _of_critic(group, value).items()
    }
    names = ("loss", *found, "ratio_max", *of_critic)
    return GroupSums(group, names, torch.cat([losses, sums.view(-1), ratio_max, *of_critic.values()]))


def _of_critic(group: LossGroup, value: LossValue) -> dict[str, Tensor]:
    """What is summed of a critic, [M] each."""
    if value.value_terms is None or value.value_clipped is None:
        return {}
    counted = group.inputs[MASK] != 0
    return {"value_tokens": counted, "value_loss": value.value_terms, "value_clipped": value.value_clipped}


def _without_not_finite(sums: GroupSums, gradient: Tensor) -> tuple[GroupSums, Tensor]:
    """The sums with `counts`, and the gradient of the group's leaf with 0 for the parts that do not count."""
    group, losses = sums.group, sums.numbers[: len(sums.group.parts)].float()
    finite = gradient.isfinite() if gradient.ndim == 1 else gradient.isfinite().all(0)
    if group.part_of_entry is None:
        counts = losses.isfinite() & finite.all()
        kept = counts
    else:
        broken = torch.zeros_like(losses).index_add_(0, group.part_of_entry, finite.logical_not().float())
        counts = losses.isfinite() & (broken == 0)
        kept = counts.index_select(0, group.part_of_entry)
    numbers = torch.cat([sums.numbers, counts.double()])
    return replace(sums, names=(*sums.names, "counts"), numbers=numbers), torch.where(kept, gradient, 0)
