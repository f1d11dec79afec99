"""What runs: checked passes, the items of micro-batches that they are cut into, and the sums over finished items.

How sequences are cut depends on what runs as one: a pass, or joined passes. Sequences at which the loss of a pass has
no gradient run apart, without a backward. Groups of RL whose answers all have the same reward are such. Their logprobs
and metrics are computed as those of others. Where they begin as others do, those rows are computed twice; the choice
with the least work is made.

Passes of one adapter run as one if their sequences have prefixes in common. Their sequences have one tree, so that rows
are shared between passes; each pass keeps its own loss, metrics and failures. A row that several passes share counts
for the first of them. Their gradients come as one sum. So if a pass is found to be at fault after the sum has a part of
it, the sum is dropped and the passes run again apart. If the first of them fails without that, none counts the row.
Knows sequences, losses and common prefixes. Knows nothing of how an item is computed.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, combinations, groupby, pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.collectives import sendable
from skyrl.trainer.critic import MASK
from skyrl.trainer.device import HOST, failure_of
from skyrl.trainer.losses import Loss
from skyrl.trainer.protocol import Datum, InvalidRequest, OutOfMemory, PassResult, TrainingPass
from skyrl.trainer.rows.prefixes import PrefixTree, prefix_tree
from skyrl.trainer.rows.sampled_from import SampledFrom, Scorings, restricts
from skyrl.trainer.tally import Tally

BACKWARD = 1.0
"""What the backward of a row costs beside its forward: the gradient of each product's input, as many operations. Layers
that are recomputed, and weights that are trained, cost more."""
SAVED_ON_CPU, SAVED_ON_CUDA = 64, 4096
"""Sequences run apart if that saves as much as so many rows' forward: a micro-batch more has costs of its own. A GPU's
are those of starting its operations (`row_budget`)."""

Ways = frozenset[float]
"""Where rows are computed, as the costs of a row there: `WITH`, `WITHOUT` a backward, or both."""
WITH, WITHOUT = 1 + BACKWARD, 1.0
_WAYS: list[Ways] = [frozenset(each) for size in (1, 2) for each in combinations((WITH, WITHOUT), size)]


def is_trained(datum: Datum, loss: Loss) -> bool:
    """Whether the loss may have a gradient at a sequence."""
    if loss.trained is None or (loss.has_critic and datum.loss_inputs[MASK].any()):
        return True
    given = datum.loss_inputs.get(loss.trained)
    return bool(loss.optional.get(loss.trained, 0.0)) if given is None else bool(given.any())


def divided(tree: PrefixTree, trained: Sequence[bool], device_type: str) -> tuple[Sequence[int], Sequence[int]]:
    """The indices of sequences that run with a backward, and of those that run without. trained: of each sequence."""
    every = range(len(trained))
    if all(trained):
        return every, []
    ways = _cheapest(tree, {tree.ends[index] for index in every if trained[index]})
    without = [index for index in every if not trained[index] and WITHOUT in ways[tree.ends[index]]]
    with_backward = sorted({*every} - {*without})
    saved = WITH * (tree.rows(every) - tree.rows(with_backward)) - WITHOUT * tree.rows(without)
    least = SAVED_ON_CUDA if device_type == "cuda" else SAVED_ON_CPU
    return (with_backward, without) if saved >= least else (every, [])


def _cheapest(tree: PrefixTree, trained_ends: set[int]) -> list[Ways]:
    """For each node of the tree where its rows are computed: where all of its sequences are. Costs come from the leaves
    up, as nodes come after their parents; then each node takes the cheapest of what its parent has."""
    own = [
        {ways: math.inf if node in trained_ends and WITH not in ways else rows.rows * sum(ways) for ways in _WAYS}
        for node, rows in enumerate(tree.nodes)
    ]

    def best(node: int, among: Ways) -> Ways:
        return min((ways for ways in _WAYS if ways <= among), key=own[node].__getitem__)

    for node in reversed(range(len(tree.nodes))):
        if (parent := tree.nodes[node].parent) >= 0:
            for ways in _WAYS:
                own[parent][ways] += own[node][best(node, ways)]
    chosen: list[Ways] = []
    for node, rows in enumerate(tree.nodes):
        chosen.append(best(node, chosen[rows.parent] if rows.parent >= 0 else frozenset((WITH, WITHOUT))))
    return chosen


@dataclass(frozen=True)
class ShareResult:
    """Of sequences of a pass that a rank ran together: their indices `data`, their logprobs, with a value head their
    values, and the sums of their losses. Or `error`: the pass failed there."""

    data: Sequence[int] = ()
    logprobs: Sequence[npt.NDArray[np.float32]] = ()
    tally: Tally = field(default_factory=Tally)
    error: Exception | None = None
    values: Sequence[npt.NDArray[np.float32]] | None = None


@dataclass
class PassRun(ABC):
    """Sequences that train one model, with one gradient. `gradient`: the sum over slices so far, flat, float32.
    `has_finite_norm`: of the whole gradient; None: not known yet. `model`: the Adapter or the FullParameters; None
    where passes are only planned."""

    model: Any
    gradient: Tensor | None = field(default=None, init=False)
    has_finite_norm: bool | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)

    joins_passes: ClassVar[bool] = False
    """Whether the gradient is that of several passes. Then a pass whose loss is not finite has no part in it."""

    @property
    @abstractmethod
    def data(self) -> Sequence[Datum]:
        """The sequences, which indices count."""

    @cached_property
    @abstractmethod
    def trained(self) -> Sequence[bool]:
        """Of each sequence whether the loss may have a gradient there. All are, of passes without a backward."""

    @abstractmethod
    def parts(self, indices: Sequence[int], rows: int) -> list[PassShare]:
        """The passes' parts of a slice with these sequences and so many rows, in the order of `indices`."""

    def left(self, indices: Sequence[int]) -> Sequence[int]:
        """Those of some sequences that are still to be run."""
        return indices if self.error is None else []

    @cached_property
    def tree(self) -> PrefixTree:
        """The common prefixes of the sequences."""
        return prefix_tree(self.data)

    def fail(self, error: Exception) -> None:
        """Fail, and drop the gradient of finished slices."""
        self.error, self.gradient = error, None


@dataclass
class SinglePassRun(PassRun):
    """A checked pass, and what its finished slices have given: one by one, and the sums."""

    training_pass: TrainingPass
    loss: Loss
    tally: Tally = field(default_factory=Tally)
    results: list[ShareResult] = field(default_factory=list)

    @property
    def data(self) -> Sequence[Datum]:
        return self.training_pass.data

    @cached_property
    def trained(self) -> Sequence[bool]:
        return [not self.training_pass.backward or is_trained(datum, self.loss) for datum in self.data]

    def parts(self, indices: Sequence[int], rows: int) -> list[PassShare]:
        return [PassShare(self, indices, rows)]

    def sent(self) -> list[ShareResult]:
        """The results for the engine, which may be another process; the error comes last."""
        return self.results if self.error is None else [*self.results, ShareResult(error=sendable(self.error))]


@dataclass(frozen=True)
class PassShare:
    """Sequences of one pass in a slice: their `indices` in the pass, ascending. `rows`: how many count for the pass."""

    running: SinglePassRun
    indices: Sequence[int]
    rows: int

    @property
    def loss(self) -> Loss:
        return self.running.loss

    @property
    def data(self) -> list[Datum]:
        return [self.running.data[index] for index in self.indices]

    @property
    def tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)

    @property
    def entries(self) -> int:
        """The number of targets."""
        return sum(datum.loss_inputs["target_tokens"].size for datum in self.data)

    @property
    def restricts(self) -> bool:
        """Whether targets of the pass are scored in another way than at temperature 1 over the whole vocabulary."""
        return restricts(self.running.training_pass)


@dataclass(frozen=True)
class MicroBatchItem:
    """Sequences that run together: their `indices`, ascending. `rows`: how many rows they have, each common prefix
    once. `trained`: whether the loss may have a gradient at one of them."""

    running: PassRun
    indices: Sequence[int]
    rows: int
    trained: bool = True

    @property
    def data(self) -> list[Datum]:
        return [self.running.data[index] for index in self.indices]

    @cached_property
    def parts(self) -> list[PassShare]:
        """Of each pass that has sequences in the slice."""
        return self.running.parts(self.indices, self.rows)

    def left(self) -> MicroBatchItem | None:
        """The slice without the sequences of passes that have failed."""
        indices = self.running.left(self.indices)
        if len(indices) == len(self.indices):
            return self
        return replace(self, indices=indices, rows=self.running.tree.rows(indices)) if indices else None


def scorings_of(items: Sequence[MicroBatchItem]) -> Scorings | None:
    """How the targets of the items' sequences are scored; None if no pass restricts that."""
    parts = [part for item in items for part in item.parts]
    if not any(part.restricts for part in parts):
        return None
    return Scorings.of(
        (SampledFrom.of(part.running.training_pass.loss_config), datum) for part in parts for datum in part.data
    )


def items_of(running: PassRun, budget: int, device_type: str) -> list[MicroBatchItem]:
    """Slices of at most `budget` rows, those that are trained last. A longer sequence has its own slice. If that
    raises, for example because memory is short, `running` fails and has no slices."""
    try:
        tree = running.tree
        with_backward, without = divided(tree, running.trained, device_type)
        kinds = (False, without), (True, with_backward)
        return [
            MicroBatchItem(running, part, tree.rows(part), trained)
            for trained, indices in kinds
            for part in tree.cut(budget, indices)
        ]
    except Exception as error:  # it is this pass's outcome; others go on
        running.fail(failure_of(error, HOST))
        return []


def not_finite(training_pass: TrainingPass, loss: float) -> InvalidRequest:
    """The failure of a pass whose loss is NaN or infinite, or whose gradient is."""
    what = "gradient" if math.isfinite(loss) else "sum"
    value = "not finite" if math.isfinite(loss) else str(loss)
    return InvalidRequest(
        f"loss_fn: the {what} of {training_pass.loss_fn} is {value}, no gradient was kept; check loss_fn_inputs "
        "(logprobs far from the model's own overflow the ratio) and the learning rate of earlier steps"
    )


def result_of(
    loss: Loss,
    logprobs: Mapping[int, npt.NDArray[np.float32]],
    tally: Tally,
    values: Mapping[int, npt.NDArray[np.float32]],
) -> PassResult:
    """logprobs: of every sequence of the pass, by its index. values: the same; empty without a value head."""
    notice = {} if loss.notice is None else {loss.notice: 1.0}
    count = len(logprobs)
    custom = {name: value / count if name.endswith(":mean") else value for name, value in tally.custom.items()}
    of_states = [values[index] for index in range(count)] if values else None
    return PassResult([logprobs[index] for index in range(count)], tally.metrics() | notice | custom, of_states)


@dataclass(frozen=True)
class PartScore:
    """Of a part, on the host. `tally`: the sums of its loss. `logprobs`: of its sequences, and `values` if there is a
    value head. `counts`: whether the gradient of the slice has that of the part. Or `error`: its loss has raised it."""

    tally: Tally
    logprobs: list[npt.NDArray[np.float32]]
    counts: bool = True
    error: Exception | None = None
    values: list[npt.NDArray[np.float32]] | None = None


@dataclass(frozen=True)
class ItemResult:
    """`parts`: of each pass that has sequences in the slice."""

    parts: Sequence[PartScore]
    gradient: Tensor | None


def added(total: Tensor | None, gradient: Tensor) -> Tensor:
    """The sum of two flat gradients, in the memory of the first one, if there is one. Takes `gradient` over."""
    return gradient if total is None else total.add_(gradient)


def record(piece: MicroBatchItem, result: ItemResult) -> None:
    """Add what a slice has given to its passes, and its gradient to that of what it belongs to."""
    running = piece.running
    for part, of_part in zip(piece.parts, result.parts, strict=True):
        of_pass = part.running
        of_pass.tally.add_all(of_part.tally)
        if of_part.counts and of_pass.error is None and math.isfinite(of_pass.tally.loss):
            of_pass.results.append(ShareResult(part.indices, of_part.logprobs, of_part.tally, None, of_part.values))
            continue
        error = of_pass.error or of_part.error or not_finite(of_pass.training_pass, of_pass.tally.loss)
        of_pass.fail(error)
        # Then the gradient of this slice, or of an earlier one, has a part of it.
        if of_pass.training_pass.backward and (of_part.counts or of_pass.results):
            running.fail(error)
    if running.error is None and result.gradient is not None:
        running.gradient = added(running.gradient, result.gradient)


logger = logging.getLogger(__name__)


@dataclass
class JoinedPasses(PassRun):
    """Passes of one adapter. `data`: the sequences of the first pass, then those of the second, and so on."""

    members: Sequence[SinglePassRun]

    joins_passes = True

    def __post_init__(self) -> None:
        self._data = [datum for member in self.members for datum in member.data]
        self._starts = [0, *accumulate(len(member.data) for member in self.members)]

    @property
    def data(self) -> Sequence[Datum]:
        return self._data

    @cached_property
    def trained(self) -> Sequence[bool]:
        return [trained for member in self.members for trained in member.trained]

    def parts(self, indices: Sequence[int], rows: int) -> list[PassShare]:
        found: list[PassShare] = []
        stop, counted = 0, 0
        for number, group in groupby(indices, self._member):
            own = [index - self._starts[number] for index in group]
            stop += len(own)
            together = rows if stop == len(indices) else self.tree.rows(indices[:stop])
            found.append(PassShare(self.members[number], own, together - counted))
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

    def begin_again(self) -> list[SinglePassRun]:
        """The passes that have not failed themselves, without results."""
        left = [member for member in self.members if member.error is None]
        for member in left:
            member.tally, member.results = Tally(), []
        return left

    def _member(self, index: int) -> int:
        return bisect_right(self._starts, index) - 1


def join_passes(passes: Sequence[SinglePassRun]) -> list[PassRun]:
    """What runs: the passes of an adapter as one if they have prefixes in common, other passes as they are. Adapters
    come in the order of their first passes."""
    of_adapter: dict[str, list[SinglePassRun]] = {}
    for each in passes:
        of_adapter.setdefault(each.training_pass.model_id, []).append(each)
    found: list[PassRun] = []
    for members in of_adapter.values():
        together = _joined(members) if len(members) > 1 else None
        found += members if together is None else [together]
    return found


def _joined(members: Sequence[SinglePassRun]) -> JoinedPasses | None:
    """None if the passes share no rows, or if there is no memory to find that out."""
    try:
        together = JoinedPasses(members[0].model, members)
        if together.share_rows:
            return together
        together.divide_tree()
        return None
    except Exception as error:  # passes that run apart are right, too; one that cannot be divided fails by itself
        if not isinstance(failure_of(error, HOST), OutOfMemory):
            logger.exception("the rows that passes share could not be found: they run apart")
        return None


def have_finite_norms(finished: Sequence[PassRun], device: torch.device) -> list[bool]:
    """Whether the norm of each gradient is finite, as the optimizer's step asks; True without a gradient. One whose
    norm cannot be computed fails. Waits for the device only for norms that are not known."""
    unknown = [each for each in finished if each.gradient is not None and each.has_finite_norm is None]
    try:
        if unknown:
            of_each = torch._foreach_norm([each.gradient for each in unknown])  # type: ignore[attr-defined]
            for each, norm in zip(unknown, torch.stack(of_each).tolist(), strict=True):
                each.has_finite_norm = math.isfinite(norm)
    except Exception as error:  # the outcome of one pass; others go on
        failure = failure_of(error, device)
    else:
        return [each.gradient is None or each.has_finite_norm is not False for each in finished]
    if len(finished) > 1:
        return [is_finite for each in finished for is_finite in have_finite_norms([each], device)]
    finished[0].fail(failure)
    return [True]
