"""The losses of a micro-batch, their gradients with respect to logprobs, and the sums for metrics.

All stay on the device until one copy takes what the host needs. Knows groups of losses. Knows nothing of the model or
of adapters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.training.backends.base import Datum
from skyrl.training.backends.torch_lora.loss_inputs import LossGroup, MicroBatchLosses
from skyrl.training.backends.torch_lora.losses import LossValue
from skyrl.training.backends.torch_lora.metrics import Tally
from skyrl.training.backends.torch_lora.transfers import read_back

_MAX_LOG_RATIO = 20.0
"""In metrics (never in losses) ratios are capped at e^20, so that an outlier leaves the mean finite."""


@dataclass(frozen=True)
class PartScore:
    """Of a part, on the host. `tally`: the sums of its loss. `logprobs`: of its sequences. `counts`: whether the
    gradient of the slice has that of the part."""

    tally: Tally
    logprobs: list[npt.NDArray[np.float32]]
    counts: bool = True


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
            tally = Tally(loss, part.tokens, part.rows, clipped=of_part.get("clipped"), weights=weights)
            if "ratio" in of_part and active:
                tally.active, tally.kl = active, -of_part["log_ratio"]
                tally.ratio, tally.ratio_max = of_part["ratio"], of_part["ratio_max"]
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
    float32 [entries]; None without a backward."""

    logprobs: Tensor
    sums: Sequence[GroupSums]
    gradient: Tensor | None

    @staticmethod
    def of(losses: MicroBatchLosses, logprobs: Tensor, *, backward: bool) -> Scores:
        """The graph of `logprobs` is left alone. With `backward`, the gradient of a part that has one gradient with
        other passes is 0 if the part's loss or its gradient is not finite."""
        logprobs = logprobs.detach()
        ordered = logprobs if losses.order is None else logprobs.index_select(0, losses.order)
        leaves = [
            own.detach().requires_grad_(backward) for own in ordered.split([group.entries for group in losses.groups])
        ]
        values = [group.value(own) for group, own in zip(losses.groups, leaves, strict=True)]
        totals = [value.total for value in values]
        sums = [GroupSums.of(*each) for each in zip(losses.groups, values, totals, strict=True)]
        if not backward:
            return Scores(logprobs, sums, None)
        gradients = list(torch.autograd.grad(totals, leaves))
        for number, group in enumerate(losses.groups):
            if group.joins_passes:
                sums[number], gradients[number] = _without_not_finite(sums[number], gradients[number])
        gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        if losses.order is not None:
            gradient = torch.empty_like(gradient).index_copy_(0, losses.order, gradient)
        return Scores(logprobs, sums, gradient)

    def read(self) -> list[PartScore]:
        """Of each part, in the order of the micro-batch. Waits for the device once."""
        numbers, (logprobs,) = read_back([each.numbers for each in self.sums], [self.logprobs])
        found = [
            (number, part, tally, counts)
            for each, own in zip(self.sums, numbers, strict=True)
            for number, part, tally, counts in zip(
                each.group.numbers, each.group.parts, each.tallies(own), each.counts(own), strict=True
            )
        ]
        scores: list[PartScore] = []
        start = 0
        for _, part, tally, counts in sorted(found, key=lambda each: each[0]):
            stop = start + part.entries
            scores.append(PartScore(tally, by_datum(logprobs[start:stop], part.data), counts))
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
