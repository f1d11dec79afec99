"""Passes of one adapter that run as one, because their sequences have prefixes in common.

Their sequences have one tree, so that rows are shared between passes; each pass keeps its own loss, metrics and
failures. A row that several passes share counts for the first of them. Their gradients come as one sum. So if a pass is
found to be at fault after the sum has a part of it, the sum is dropped and the passes run again apart. If the first of
them fails without that, none counts the row.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch

from skyrl.training.backends.base import Datum, OutOfMemory
from skyrl.training.backends.torch_lora.device import failure_of
from skyrl.training.backends.torch_lora.metrics import Tally
from skyrl.training.backends.torch_lora.model import BaseModel
from skyrl.training.backends.torch_lora.passes import run_micro_batch
from skyrl.training.backends.torch_lora.running import Part, Running, RunningPass, not_finite, slices_of

logger = logging.getLogger(__name__)


@dataclass
class JoinedPasses(Running):
    """Passes of one adapter. `data`: the sequences of the first pass, then those of the second, and so on."""

    members: Sequence[RunningPass]

    joins_passes = True

    def __post_init__(self) -> None:
        self._data = [datum for member in self.members for datum in member.data]
        self._starts = [0, *accumulate(len(member.data) for member in self.members)]

    @property
    def data(self) -> Sequence[Datum]:
        return self._data

    def _find_trained(self) -> Sequence[bool]:
        return [trained for member in self.members for trained in member.trained]

    def parts(self, indices: Sequence[int], rows: int) -> list[Part]:
        found: list[Part] = []
        stop, counted = 0, 0
        for number, group in groupby(indices, self._member):
            own = [index - self._starts[number] for index in group]
            stop += len(own)
            together = rows if stop == len(indices) else self.tree.rows(indices[:stop])
            found.append(Part(self.members[number], own, together - counted))
            counted = together
        return found

    def left(self, indices: Sequence[int]) -> Sequence[int]:
        if self.error is not None:
            return []
        return [index for index in indices if self.members[self._member(index)].error is None]

    @property
    def share_rows(self) -> bool:
        """Whether sequences of different passes have rows in common."""
        return any(len(set(map(self._member, family))) > 1 for family in self.tree.families)

    def divide_tree(self) -> None:
        """Give each pass its part of the tree, if passes share no rows."""
        for member, (start, stop) in zip(self.members, pairwise(self._starts), strict=True):
            member.tree = self.tree.of_range(start, stop)

    def begin_again(self) -> list[RunningPass]:
        """The passes that have not failed themselves, without results."""
        left = [member for member in self.members if member.error is None]
        for member in left:
            member.tally, member.logprobs = Tally(), {}
        return left

    def _member(self, index: int) -> int:
        return bisect_right(self._starts, index) - 1


def joined(passes: Sequence[RunningPass], device: torch.device) -> list[Running]:
    """What runs: the passes of an adapter as one if they have prefixes in common, other passes as they are. Adapters
    come in the order of their first passes. DeviceFault is raised."""
    of_adapter: dict[int, list[RunningPass]] = {}
    for each in passes:
        of_adapter.setdefault(id(each.adapter), []).append(each)
    found: list[Running] = []
    for members in of_adapter.values():
        together = _joined(members, device) if len(members) > 1 else None
        found += members if together is None else [together]
    return found


def _joined(members: Sequence[RunningPass], device: torch.device) -> JoinedPasses | None:
    """None if the passes share no rows, or if there is no memory to find that out."""
    try:
        together = JoinedPasses(members[0].adapter, members)
        if together.share_rows:
            return together
        together.divide_tree()
        return None
    except Exception as error:  # passes that run apart are right, too; one that cannot be divided fails by itself
        if not isinstance(failure_of(error, device), OutOfMemory):
            logger.exception("the rows that passes share could not be found: they run apart")
        return None


def finish(base: BaseModel, finished: Sequence[Running], budget: int, *, backward: bool) -> None:
    """After the last slice of each: add its gradient to the adapter's. A pass whose gradient has no finite norm fails.
    Joined passes that have failed as one, or whose gradient has no finite norm, run again apart; then each fails or
    adds its gradient alone. Waits for the device once, unless some run again. DeviceFault is raised."""
    for running, is_finite in zip(finished, _have_finite_norms(finished, base.device), strict=True):
        if running.error is None and is_finite:
            running.add_gradient()
            continue
        running.gradient = None
        if isinstance(running, JoinedPasses):
            for member in running.begin_again():
                for piece in slices_of(member, budget, base.device):
                    run_micro_batch(base, [piece], backward=backward)
                finish(base, [member], budget, backward=backward)
        elif isinstance(running, RunningPass) and running.error is None:
            running.fail(not_finite(running.training_pass, running.tally.loss))


def _have_finite_norms(finished: Sequence[Running], device: torch.device) -> list[bool]:
    """Whether the norm of each gradient is finite, as the optimizer's step asks; True without a gradient. One whose
    norm cannot be computed fails."""
    gradients = [each.gradient for each in finished if each.gradient is not None]
    if not gradients:
        return [True] * len(finished)
    try:
        of_each = torch._foreach_norm(gradients)  # type: ignore[attr-defined]
        norms = iter(torch.stack(of_each).tolist())
    except Exception as error:  # the outcome of one pass; others go on
        failure = failure_of(error, device)
    else:
        return [each.gradient is None or math.isfinite(next(norms)) for each in finished]
    if len(finished) > 1:
        return [is_finite for each in finished for is_finite in _have_finite_norms([each], device)]
    finished[0].fail(failure)
    return [True]
