"""Metrics of a pass: sums over its slices in Python floats, turned into `name:reduction` at the end.

Knows no formula of a loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Tally:
    """Sums over the slices of one pass. Ratio statistics are over entries with a non-zero advantage. `weights`: the sum
    of the weights of cross_entropy, NaN if one of them is negative; None for losses without weights."""

    loss: float = 0.0
    tokens: int = 0
    rows: int = 0
    active: int = 0
    ratio: float = 0.0
    ratio_max: float = -math.inf
    kl: float = 0.0
    clipped: float | None = None
    weights: float | None = None

    def add_all(self, other: Tally) -> None:
        """Add the sums of other slices of the same pass."""
        self.loss += other.loss
        self.tokens += other.tokens
        self.rows += other.rows
        self.active += other.active
        self.ratio += other.ratio
        self.ratio_max = max(self.ratio_max, other.ratio_max)
        self.kl += other.kl
        if other.clipped is not None:
            self.clipped = (self.clipped or 0.0) + other.clipped
        if other.weights is not None:
            self.weights = (self.weights or 0.0) + other.weights

    def metrics(self) -> dict[str, float]:
        """`loss:sum`, `num_tokens:sum`, `computed_tokens:sum`; with weights also `weights:sum`, unless one is negative;
        with advantages also `ratio:mean`, `ratio:max`, `kl:mean`; with clipping also `clip_fraction:mean`.

        `kl:mean` is mean(q - lp): the sampler's divergence from the trainer, estimated on the sampled tokens.
        """
        metrics = {
            "loss:sum": self.loss,
            "num_tokens:sum": float(self.tokens),
            "computed_tokens:sum": float(self.rows),
        }
        if self.weights is not None and not math.isnan(self.weights):
            metrics["weights:sum"] = self.weights
        if self.active:
            metrics |= {
                "ratio:mean": self.ratio / self.active,
                "ratio:max": self.ratio_max,
                "kl:mean": self.kl / self.active,
            }
            if self.clipped is not None:
                metrics["clip_fraction:mean"] = self.clipped / self.active
        return metrics
