"""What runs: checked passes, the slices they are cut into, and the sums over finished slices.

How sequences are cut depends on what runs as one: a pass, or joined passes. Knows sequences and adapters. Knows nothing
of how a slice is computed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.training.backends.base import Datum, InvalidRequest, PassResult, TrainingPass
from skyrl.training.backends.torch_lora.adapter import Adapter
from skyrl.training.backends.torch_lora.device import failure_of
from skyrl.training.backends.torch_lora.losses import Loss
from skyrl.training.backends.torch_lora.metrics import Tally
from skyrl.training.backends.torch_lora.prefixes import PrefixTree, prefix_tree
from skyrl.training.backends.torch_lora.untrained import divided, is_trained


@dataclass
class Running(ABC):
    """Sequences that train one adapter, with one gradient. `gradient`: the sum over finished slices, flat, float32."""

    adapter: Adapter
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
    def parts(self, indices: Sequence[int], rows: int) -> list[Part]:
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

    def add_gradient(self) -> None:
        """After the last slice: add the gradient, if there is one, to the adapter's."""
        gradient, self.gradient = self.gradient, None
        if gradient is not None:
            self.adapter.accumulate(gradient)


@dataclass
class RunningPass(Running):
    """A checked pass and the sums over its finished slices. `logprobs`: by the index of the sequence."""

    training_pass: TrainingPass
    loss: Loss
    tally: Tally = field(default_factory=Tally)
    logprobs: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)

    @property
    def data(self) -> Sequence[Datum]:
        return self.training_pass.data

    def _find_trained(self) -> Sequence[bool]:
        return [not self.training_pass.backward or is_trained(datum, self.loss) for datum in self.data]

    def parts(self, indices: Sequence[int], rows: int) -> list[Part]:
        return [Part(self, indices, rows)]

    def outcome(self) -> PassResult | Exception:
        if self.error is not None:
            return self.error
        return result_of(self.loss, self.logprobs, self.tally)


@dataclass(frozen=True)
class Part:
    """Sequences of one pass in a slice: their `indices` in the pass, ascending. `rows`: how many count for the pass."""

    running: RunningPass
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
class Slice:
    """Sequences that run together: their `indices`, ascending. `rows`: how many rows they have, each common prefix
    once. `last`: whether no slice of `running` comes after it. `trained`: whether the loss may have a gradient at one
    of them."""

    running: Running
    indices: Sequence[int]
    rows: int
    last: bool
    trained: bool = True

    @property
    def data(self) -> list[Datum]:
        return [self.running.data[index] for index in self.indices]

    @property
    def entries(self) -> int:
        """The number of targets."""
        return sum(datum.loss_inputs["target_tokens"].size for datum in self.data)

    @cached_property
    def parts(self) -> list[Part]:
        """Of each pass that has sequences in the slice."""
        return self.running.parts(self.indices, self.rows)

    def left(self) -> Slice | None:
        """The slice without the sequences of passes that have failed."""
        indices = self.running.left(self.indices)
        if len(indices) == len(self.indices):
            return self
        return replace(self, indices=indices, rows=self.running.tree.rows(indices)) if indices else None


def slices_of(running: Running, budget: int, device: torch.device) -> list[Slice]:
    """Slices of at most `budget` rows, those that are trained last. A longer sequence has its own slice. If that
    raises, for example because memory is short, `running` fails and has no slices. DeviceFault is raised."""
    try:
        tree = running.tree
        with_backward, without = divided(tree, running.trained, device)
        kinds = (False, without), (True, with_backward)
        parts = [(part, trained) for trained, indices in kinds for part in tree.cut(budget, indices)]
        return [
            Slice(running, part, tree.rows(part), number == len(parts), trained)
            for number, (part, trained) in enumerate(parts, start=1)
        ]
    except Exception as error:  # it is this pass's outcome; others go on
        running.fail(failure_of(error, device))
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
