"""The metrics of a pass: sums over its slices in Python floats, which become `name:reduction` at the end.

Knows nothing of how a number is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Sums over the slices of one pass. `active`: the number of entries with a non-zero advantage, which ratio
    statistics are over; None for losses without advantages. `weights`: the sum of the weights of cross_entropy, NaN if
    one of them is negative; None for losses without weights. `custom`: the sums of a custom loss's metrics. `outside`:
    of the entries that are trained, those whose target is not among the tokens that it is scored over; None where
    nothing is left out of the vocabulary. `value_tokens`: the number of entries in a critic's mask; None without a
    critic."""

    loss: float = 0.0
    tokens: int = 0
    rows: int = 0
    active: int | None = None
    ratio: float = 0.0
    ratio_max: float = -math.inf
    kl: float = 0.0
    clipped: float | None = None
    weights: float | None = None
    custom: dict[str, float] = field(default_factory=dict[str, float])
    outside: int | None = None
    value_tokens: float | None = None
    value_loss: float = 0.0
    value_clipped: float = 0.0

    def add_all(self, other: Tally) -> None:
        """Add the sums of other slices of the same pass."""
        self.loss += other.loss
        self.tokens += other.tokens
        self.rows += other.rows
        if other.active is not None:
            self.active = (self.active or 0) + other.active
        self.ratio += other.ratio
        self.ratio_max = max(self.ratio_max, other.ratio_max)
        self.kl += other.kl
        if other.clipped is not None:
            self.clipped = (self.clipped or 0.0) + other.clipped
        if other.weights is not None:
            self.weights = (self.weights or 0.0) + other.weights
        for name, value in other.custom.items():
            self.custom[name] = self.custom.get(name, 0.0) + value
        if other.outside is not None:
            self.outside = (self.outside or 0) + other.outside
        if other.value_tokens is not None:
            self.value_tokens = (self.value_tokens or 0.0) + other.value_tokens
        self.value_loss += other.value_loss
        self.value_clipped += other.value_clipped

    def metrics(self) -> dict[str, float]:
        """`loss:sum`, `num_tokens:sum`, `computed_tokens:sum`; of a pass that is scored over what it was sampled from
        also `outside_tokens:sum`; with weights also `weights:sum`, unless one is negative; with advantages also
        `active_tokens:sum`, `ratio:sum`, `kl:sum`; with clipping also `clipped:sum`. Where one advantage is not 0 also
        `ratio:mean`, `ratio:max`, `kl:mean`; with clipping also `clip_fraction:mean`. With a critic those of
        `_value_metrics`.

        `kl:mean` is mean(q - lp): the sampler's divergence from the trainer, estimated on the sampled tokens. For gspo
        q - lp is the mean of its sequence. The SDK weighs the means of a request's chunks by their numbers of
        sequences; sums combine exactly.
        """
        metrics = {
            "loss:sum": self.loss,
            "num_tokens:sum": float(self.tokens),
            "computed_tokens:sum": float(self.rows),
        }
        if self.outside is not None:
            metrics["outside_tokens:sum"] = float(self.outside)
        if self.weights is not None and not math.isnan(self.weights):
            metrics["weights:sum"] = self.weights
        if self.active is not None:
            metrics |= {"active_tokens:sum": float(self.active), "ratio:sum": self.ratio, "kl:sum": self.kl}
            if self.clipped is not None:
                metrics["clipped:sum"] = self.clipped
        if self.active:
            metrics |= {
                "ratio:mean": self.ratio / self.active,
                "ratio:max": self.ratio_max,
                "kl:mean": self.kl / self.active,
            }
            if self.clipped is not None:
                metrics["clip_fraction:mean"] = self.clipped / self.active
        return metrics | self._value_metrics()

    def _value_metrics(self) -> dict[str, float]:
        """`value_tokens:sum`, `value_loss:sum` (without `value_coef`), `value_clipped:sum`; where the mask is not all
        0, also `value_loss:mean` and `value_clip_fraction:mean`."""
        if self.value_tokens is None:
            return {}
        sums = {"value_loss:sum": self.value_loss, "value_clipped:sum": self.value_clipped}
        found = {"value_tokens:sum": self.value_tokens, **sums}
        if self.value_tokens:
            found["value_loss:mean"] = self.value_loss / self.value_tokens
            found["value_clip_fraction:mean"] = self.value_clipped / self.value_tokens
        return found
