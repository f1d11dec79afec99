"""The loss functions: pure functions of target log-probabilities and a slice's inputs. Losses are sums, never means.

Formulas follow the Tinker documentation's pages on losses (GSPO's clip bounds follow the GSPO paper). `lp` is the
target's log-probability under the adapter, `q` the input `logprobs`, `A` the input `advantages`, r = exp(lp - q). A
pass's metrics are sums over its slices in Python floats, which `Tally` turns into `name:reduction` at the end. Knows
nothing of models, batches or the wire. A new loss needs one function and one entry in LOSSES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss. tensors: name -> float [M]. datum: int64 [M], for each entry its sequence in [0, count).
    entries: int64 [M], the places of the entries among those of target_tokens; None: all. Others, whose targets are
    tokens of pictures, have no part in the loss."""

    tensors: Mapping[str, Tensor]
    datum: Tensor
    count: int
    entries: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


@dataclass(frozen=True)
class LossValue:
    """terms: [M], the loss of each entry. log_ratio, clipped: [M], for metrics, if the loss has them."""

    terms: Tensor
    log_ratio: Tensor | None = None
    clipped: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """Scalar, the sum of the loss over entries."""
        return self.terms.sum()


LossFunction = Callable[[Tensor, LossInputs, Mapping[str, float]], LossValue]


@dataclass(frozen=True)
class Loss:
    """`required`: inputs besides target_tokens. `optional`: inputs and their defaults. `config`: keys and their
    defaults.

    `per_target`: target_tokens may be [N, K], and then all inputs are. `trained`: an input; where it is 0 the loss has
    no gradient. None: the loss may have a gradient everywhere. `ratio_mask`: an input that must not be all zero
    for a datum with advantages. `notice`: a metric, 1.0 in every pass, that names the loss computed in place of the
    requested loss.
    """

    function: LossFunction
    required: tuple[str, ...] = ()
    optional: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, float] = field(default_factory=dict)
    per_target: bool = False
    trained: str | None = None
    ratio_mask: str | None = None
    notice: str | None = None


def cross_entropy(lp: Tensor, inputs: LossInputs, config: Mapping[str, float]) -> LossValue:
    """-sum w lp. Weights may be negative."""
    weights = inputs["weights"]
    return LossValue(-torch.where(weights != 0, weights * lp, 0))


def _log_ratio(lp: Tensor, inputs: LossInputs) -> Tensor:
    """lp - q, and 0 where A = 0: there r A is 0 for every r, and exp must not overflow."""
    return torch.where(inputs["advantages"] != 0, lp - inputs["logprobs"], 0)


def _clipped_objective(log_ratio: Tensor, advantages: Tensor, config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """min(r A, clamp(r, lo, hi) A), and a mask of the clipped entries.

    Clipped entries are masked before exp, so that a huge ratio gives no inf * 0 in backward.
    """
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    ratio = log_ratio.detach().exp()
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    free = torch.where(clipped, 0, log_ratio).exp()
    return torch.where(clipped, ratio.clamp(low, high), free) * advantages, clipped


def importance_sampling(lp: Tensor, inputs: LossInputs, config: Mapping[str, float]) -> LossValue:
    """-sum r A."""
    log_ratio = _log_ratio(lp, inputs)
    return LossValue(-(log_ratio.exp() * inputs["advantages"]), log_ratio)


def ppo(lp: Tensor, inputs: LossInputs, config: Mapping[str, float]) -> LossValue:
    """-sum min(r A, clamp(r, lo, hi) A); lo and hi are absolute bounds of the ratio."""
    log_ratio = _log_ratio(lp, inputs)
    objective, clipped = _clipped_objective(log_ratio, inputs["advantages"], config)
    return LossValue(-objective, log_ratio, clipped)


def cispo(lp: Tensor, inputs: LossInputs, config: Mapping[str, float]) -> LossValue:
    """-sum stopgrad(clamp(r, lo, hi)) lp A."""
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    log_ratio = _log_ratio(lp, inputs)
    ratio = log_ratio.detach().exp()
    clipped = (ratio < low) | (ratio > high)
    return LossValue(-(ratio.clamp(low, high) * lp * inputs["advantages"]), log_ratio, clipped)


def dro(lp: Tensor, inputs: LossInputs, config: Mapping[str, float]) -> LossValue:
    """-sum (lp A - beta / 2 (lp - q)^2), over all entries, also those with A = 0."""
    gap = lp - inputs["logprobs"]
    terms = -(lp * inputs["advantages"] - 0.5 * config["beta"] * gap.square())
    return LossValue(terms, _log_ratio(lp, inputs))


def gspo(lp: Tensor, inputs: LossInputs, config: Mapping[str, float]) -> LossValue:
    """Per sequence s = mean over mask != 0 of stopgrad(lp) - q; r_t = exp(s + lp_t - stopgrad(lp_t)); then as ppo."""
    mask = inputs["sequence_ratio_mask"] != 0
    gap = torch.where(mask, lp.detach() - inputs["logprobs"], 0)
    sums = torch.zeros(inputs.count, dtype=lp.dtype, device=lp.device).index_add(0, inputs.datum, gap)
    counts = torch.zeros_like(sums).index_add(0, inputs.datum, mask.to(lp.dtype))
    sequence = (sums / counts.clamp(min=1)).index_select(0, inputs.datum)
    log_ratio = torch.where(inputs["advantages"] != 0, sequence + (lp - lp.detach()), 0)
    objective, clipped = _clipped_objective(log_ratio, inputs["advantages"], config)
    return LossValue(-objective, log_ratio, clipped)


_RL = ("logprobs", "advantages")
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, optional={"weights": 1.0}, per_target=True, trained="weights"),
    "importance_sampling": Loss(importance_sampling, _RL, trained="advantages"),
    "ppo": Loss(ppo, _RL, config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, trained="advantages"),
    "cispo": Loss(cispo, _RL, config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, trained="advantages"),
    "dro": Loss(dro, _RL, config={"beta": 0.05}),
    "gspo": Loss(
        gspo,
        (*_RL, "sequence_ratio_mask"),
        config={"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        trained="advantages",
        ratio_mask="sequence_ratio_mask",
    ),
}

REFUSED: dict[str, str] = {
    "stable_reinforce": "send loss_fn=ppo (or importance_sampling, cispo), or ask the operator to set "
    'losses.stable_reinforce = "cispo", which computes cispo under this name. The formula of stable_reinforce is not '
    "published",
    "custom": "losses traced on the client and run on the server are not supported; "
    "use forward_backward_custom, which runs the loss on the client",
}


def served_losses(stable_reinforce: Literal["refuse", "cispo"]) -> dict[str, Loss]:
    """Losses by name. With "cispo", `stable_reinforce` computes cispo, and the metrics of its passes say so."""
    if stable_reinforce == "refuse":
        return dict(LOSSES)
    return {**LOSSES, "stable_reinforce": replace(LOSSES["cispo"], notice="stable_reinforce_is_cispo:max")}


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
