"""A micro-batch whose work has been started on the device, and whose results the host has not read yet.

What waits is small: scores, a few numbers for each target, and the gradients of joined passes. The layers' tensors are
free when a micro-batch has been started. Knows what is added when. Knows nothing of how an item is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl.trainer.device import HostCopy, failure_of
from skyrl.trainer.passes.pass_run import ItemResult, MicroBatchItem, PassRun, added
from skyrl.trainer.passes.scores import SentScores


@dataclass(frozen=True)
class StartedBatch:
    """Items that have been started together. `gradients`: of each item; None where there is none, or where it has been
    added."""

    items: Sequence[MicroBatchItem]
    scores: SentScores
    gradients: list[Tensor | None]

    def add_gradients(self, device: torch.device) -> None:
        """Add those of single passes to the gradients of their passes. A pass that is found to have failed drops its
        gradient as a whole, so that they need not wait for the scores. Of joined passes an item counts or does not: the
        scores say."""
        for number, item in enumerate(self.items):
            gradient, running = self.gradients[number], item.running
            if gradient is None or running.joins_passes:
                continue
            self.gradients[number] = None
            try:
                if running.error is None:
                    running.gradient = added(running.gradient, gradient)
            except Exception as error:  # it is this pass's outcome; others go on
                running.fail(failure_of(error, device))

    def results(self) -> list[ItemResult]:
        """Of each item. Waits until the device has computed them."""
        of_parts = iter(self.scores.read())
        found: list[ItemResult] = []
        for item, gradient in zip(self.items, self.gradients, strict=True):
            parts = [next(of_parts) for _ in item.parts]
            found.append(ItemResult(parts, gradient if any(each.counts for each in parts) else None))
        return found


@dataclass(frozen=True)
class SentNorms:
    """The norms of complete gradients on their way to the host. `passes`: whose they are."""

    passes: Sequence[PassRun]
    copy: HostCopy

    @staticmethod
    def of(finished: Sequence[PassRun]) -> SentNorms | None:
        """Of the single passes among some whose items have been started; None if no one has a gradient."""
        passes = [each for each in finished if each.gradient is not None and not each.joins_passes]
        if not passes:
            return None
        norms = torch._foreach_norm([each.gradient for each in passes])  # type: ignore[attr-defined]
        return SentNorms(passes, HostCopy([], [torch.stack(norms)]))

    def read(self) -> None:
        """Tell each pass whether its norm is finite. Waits until the device has computed them."""
        _, (norms,) = self.copy.read()
        for each, norm in zip(self.passes, norms, strict=True):
            each.has_finite_norm = math.isfinite(norm)
