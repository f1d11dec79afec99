"""What runs: checked passes, the items of micro-batches that they are cut into, and the sums over finished items.

How sequences are cut depends on what runs as one: a pass, or joined passes. Sequences at which the loss of a pass has
no gradient run apart, without a backward. Groups of RL whose answers all have the same reward are such. Their logprobs
and metrics are computed as those of others. Where they begin as others do, those rows are computed twice; the choice
with the least work is made.

Items whose adapters are updated together lie side by side in a micro-batch, with their matrices in stacks. Knows
sequences, adapters, losses and common prefixes. Knows nothing of how an item is computed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, combinations, groupby
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.collectives import sendable
from skyrl.trainer.device import HOST, failure_of
from skyrl.trainer.lora.adapter import Adapter
from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.lora.products import AdapterStack, grouped_rank
from skyrl.trainer.losses import Loss, Tally
from skyrl.trainer.protocol import Datum, InvalidRequest, PassResult, TrainingPass
from skyrl.trainer.rows.packing import PackedItem
from skyrl.trainer.rows.prefixes import PrefixTree, prefix_tree

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
    if loss.trained is None:
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
    """Of sequences of a pass that a rank ran together: their indices `data`, their logprobs, and the sums of their
    losses. Or `error`: the pass failed there."""

    data: Sequence[int] = ()
    logprobs: Sequence[npt.NDArray[np.float32]] = ()
    tally: Tally = field(default_factory=Tally)
    error: Exception | None = None


@dataclass
class PassRun(ABC):
    """Sequences that train one model, with one gradient. `gradient`: the sum over finished slices, flat, float32.
    `model`: the Adapter or the FullParameters; None where passes are only planned."""

    model: Any
    gradient: Tensor | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)

    joins_passes: ClassVar[bool] = False
    """Whether the gradient is that of several passes. Then a pass whose loss is not finite has no part in it."""

    @property
    @abstractmethod
    def data(self) -> Sequence[Datum]:
        """The sequences, which indices count."""

    @cached_property
    def trained(self) -> Sequence[bool]:
        """Of each sequence whether the loss may have a gradient there. All are, of passes without a backward."""
        return self._find_trained()

    @abstractmethod
    def _find_trained(self) -> Sequence[bool]:
        """`trained`."""

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

    def _find_trained(self) -> Sequence[bool]:
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

    @property
    def entries(self) -> int:
        """The number of targets."""
        return sum(datum.loss_inputs["target_tokens"].size for datum in self.data)

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


def result_of(loss: Loss, logprobs: Mapping[int, npt.NDArray[np.float32]], tally: Tally) -> PassResult:
    """logprobs: of every sequence of the pass, by its index."""
    notice = {} if loss.notice is None else {loss.notice: 1.0}
    return PassResult([logprobs[index] for index in range(len(logprobs))], tally.metrics() | notice)


MOST_PADDING = 4
"""Padding makes no adapter's matrices more than this many times larger, else it is updated with others or alone. The
low-rank products of its rows grow by the same factor. Ranks below 8 count as 8."""

Kind = tuple[int, tuple[str, ...]]
"""An adapter's rank, rounded up for grouped products, and the names of its layers."""


def _kind_of(adapter: Adapter) -> Kind | None:
    """None for an adapter that trains experts: it is updated alone."""
    if any(target.experts is not None for target in adapter.targets):
        return None
    return grouped_rank(adapter.spec.rank), tuple(target.name for target in adapter.targets)


def groups_of(adapters: Sequence[Adapter]) -> list[int | None]:
    """For each adapter the number of its group, whose adapters are updated together; None for one that is updated
    alone."""
    kinds = [_kind_of(adapter) for adapter in adapters]
    targets = [target for adapter in dict(zip(kinds, adapters, strict=True)).values() for target in adapter.targets]
    widths = {target.name: target.in_features + target.out_features for target in targets}

    def numel(*stacked: Kind) -> int:
        """Elements of one adapter in a stack of adapters of these kinds."""
        layers: set[str] = set().union(*(names for _, names in stacked))
        return max(rank for rank, _ in stacked) * sum(widths[name] for name in layers)

    groups: list[list[Kind]] = []
    for kind in sorted({kind for kind in kinds if kind is not None}, key=lambda kind: (numel(kind), kind)):
        fitting = (group for group in groups if numel(*group, kind) <= MOST_PADDING * numel(group[0]))
        if (group := next(fitting, None)) is None:
            groups.append([kind])
        else:
            group.append(kind)
    number_of = {kind: number for number, group in enumerate(groups) for kind in group}
    return [None if kind is None else number_of[kind] for kind in kinds]


def side_by_side(slices: Sequence[MicroBatchItem]) -> list[MicroBatchItem]:
    """The slices, those of one group next to each other, by rank. Slices of one adapter stay in their order."""
    first: dict[int | None, int] = {}
    groups = groups_of([piece.running.model for piece in slices])
    for number, group in enumerate(groups):
        first.setdefault(group, number)

    def place(number: int) -> tuple[int, int, int]:
        adapter = slices[number].running.model
        return first[groups[number]], adapter.spec.rank, len(adapter.targets)

    return [slices[number] for number in sorted(range(len(slices)), key=place)]


def together(slices: Sequence[MicroBatchItem]) -> list[range]:
    """Consecutive slices whose adapters are updated together."""
    found: list[range] = []
    groups = groups_of([piece.running.model for piece in slices])
    for group, numbered in groupby(enumerate(groups), lambda each: each[1]):
        numbers = [number for number, _ in numbered]
        found += (
            [range(number, number + 1) for number in numbers] if group is None else [range(numbers[0], numbers[-1] + 1)]
        )
    return found


def segment_of(
    slices: Sequence[MicroBatchItem], packed: Sequence[PackedItem], dtype: torch.dtype, *, backward: bool
) -> LoraSegment:
    """The rows of consecutive slices whose adapters are updated together, with leaves of `dtype` that the backward
    reaches."""
    adapters = [piece.running.model for piece in slices]
    start, stop = packed[0].start, packed[-1].stop
    if len(slices) == 1:
        return LoraSegment(start, stop, adapters[0].scale, adapters[0].leaves(backward, dtype))
    ends = torch.tensor([*accumulate(each.stop - each.start for each in packed)], dtype=torch.int32)
    stack = AdapterStack(adapters)
    return LoraSegment(start, stop, 1.0, stack.leaves(backward, dtype), ends.to(adapters[0].device), stack)
