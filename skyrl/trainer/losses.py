"""The loss functions: pure functions of target log-probabilities and a slice's inputs; and the checks of a pass before
it runs. Losses are sums, never means.

Formulas follow the Tinker documentation's pages on losses (GSPO's clip bounds follow the GSPO paper), those of DPPO its
paper. `lp` is the target's log-probability under the adapter, `q` the input `logprobs`, `A` the input `advantages`,
r = exp(lp - q). A new loss needs one function and one entry in LOSSES.

Each error of a check names the field, the datum and what is allowed. Checks read arrays and the model's limits; they
need no torch tensors and no model. Knows nothing of models, batches or the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from skyrl.base.wire.errors import whose_vocabulary
from skyrl.trainer import critic
from skyrl.trainer.protocol import Datum, InvalidRequest, ModelLimits, TrainingPass
from skyrl.trainer.rows.pictures import check_picture_targets, check_pictures
from skyrl.trainer.rows.routed_experts import FIELD, check_routed_experts
from skyrl.trainer.rows.sampled_from import KEPT_FIELDS, SAMPLING_KEYS, SampledFrom, check_kept_tokens


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

    def at(self, places: Tensor | slice) -> LossInputs:
        """Of some entries."""
        return replace(
            self, tensors={name: each[places] for name, each in self.tensors.items()}, datum=self.datum[places]
        )


@dataclass(frozen=True)
class LossValue:
    """terms: [M], the loss of each entry. log_ratio, clipped: [M], for metrics, if the loss has them. metrics: of a
    custom loss, float64 [M]. value_terms, value_clipped: [M], of a critic; `value_coef` times the first is in the
    terms."""

    terms: Tensor
    log_ratio: Tensor | None = None
    clipped: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    value_terms: Tensor | None = None
    value_clipped: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """Scalar, the sum of the loss over entries."""
        return self.terms.sum()


LossFunction = Callable[[Tensor, LossInputs, Mapping[str, float]], LossValue]


@dataclass(frozen=True)
class Loss:
    """`required`: inputs besides target_tokens. `optional`: inputs and their defaults. `config`: keys and their
    defaults.

    `per_target`: target_tokens may be [N, K], and then all inputs are. `by_entry`: the gradient with respect to an
    entry's logprob depends on that logprob alone, beside the inputs. So it is known before the other logprobs are.
    `trained`: an input; where it is 0 the loss has no gradient. None: the loss may have a gradient everywhere.
    `ratio_mask`: an input that must not be all zero for a datum with advantages. `takes_critic`: a pass may add a
    critic's inputs. `notice`: a metric, 1.0 in every pass, that names the loss computed in place of the requested loss.
    `check_inputs`: of a custom loss, in place of the check of `required` and `optional`.
    """

    function: LossFunction
    required: tuple[str, ...] = ()
    optional: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, float] = field(default_factory=dict)
    per_target: bool = False
    by_entry: bool = False
    trained: str | None = None
    ratio_mask: str | None = None
    takes_critic: bool = False
    notice: str | None = None
    check_inputs: Callable[[Datum], None] | None = None

    @property
    def has_critic(self) -> bool:
        return critic.MASK in self.required

    def of(self, data: Sequence[Datum]) -> Loss:
        """The loss of these sequences of a pass: with a critic's inputs and settings if they have such inputs."""
        if not self.takes_critic or not critic.is_sent(data):
            return self
        config = {**self.config, **critic.LOSS_CONFIG}
        if critic.is_sent(data, critic.REWARDS):
            own = tuple(name for name in self.required if name != "advantages")
            required = (*own, critic.VALUES, critic.REWARDS, critic.MASK)
            return replace(self, required=required, config={**config, **critic.GAE_CONFIG})
        return replace(self, required=(*self.required, critic.VALUES, critic.RETURNS, critic.MASK), config=config)

    def value(self, lp: Tensor, inputs: LossInputs, config: Mapping[str, float], values: Tensor | None) -> LossValue:
        """values: [M], of a critic."""
        found = self.function(lp, inputs, config)
        if values is None:
            return found
        terms, clipped = critic.value_loss(values, inputs.tensors, config)
        return replace(
            found, terms=found.terms + config["value_coef"] * terms, value_terms=terms, value_clipped=clipped
        )


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


def _masked_objective(
    log_ratio: Tensor, inputs: LossInputs, config: Mapping[str, float], divergence: Tensor
) -> LossValue:
    """M r A, where M is 0 for entries whose update would move the policy further away (A > 0 and r > 1, or A < 0 and
    r < 1) than `divergence` [M] allows: at most delta_high for A > 0, delta_low for A < 0."""
    advantages = inputs["advantages"]
    away = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    masked = away & (divergence > torch.where(advantages > 0, config["delta_high"], config["delta_low"]))
    ratio = torch.where(masked, 0, log_ratio).exp()  # so that a huge ratio gives no inf * 0 in backward
    return LossValue(-torch.where(masked, 0, ratio * advantages), log_ratio, masked)


def dppo(lp: Tensor, inputs: LossInputs, config: Mapping[str, float]) -> LossValue:
    """-sum M r A (equations 11 and 12 of "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv 2602.04879)
    with the divergence Binary-TV (equation 13): D = |exp(q) - exp(lp)|. M = 0 where sign(A) (r - 1) > 0 and D > delta:
    such an entry adds neither loss nor gradient. There is no other clipping."""
    divergence = (inputs["logprobs"].exp() - lp.detach().exp()).abs()
    return _masked_objective(_log_ratio(lp, inputs), inputs, config, divergence)


def dppo_kl(lp: Tensor, inputs: LossInputs, config: Mapping[str, float]) -> LossValue:
    """As `dppo`, with Binary-KL (equation 14): D = p log(p / p') + (1 - p) log((1 - p) / (1 - p')), where p = exp(q)
    and p' = exp(lp). It is infinite where p < 1 = p'."""
    q, own = inputs["logprobs"].clamp(max=0), lp.detach().clamp(max=0)  # rounding may leave a logprob above 0
    rest = -torch.expm1(q)
    of_rest = torch.where(rest > 0, rest * (rest.log() - (-torch.expm1(own)).log()), 0)
    return _masked_objective(_log_ratio(lp, inputs), inputs, config, q.exp() * (q - own) + of_rest)


_RL = ("logprobs", "advantages")


def _policy(function: LossFunction, **config: float) -> Loss:
    """A loss of the policy's ratios, one for each token."""
    return Loss(function, _RL, config=config, by_entry=True, trained="advantages", takes_critic=True)


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, optional={"weights": 1.0}, per_target=True, by_entry=True, trained="weights"),
    "importance_sampling": _policy(importance_sampling),
    "ppo": _policy(ppo, clip_low_threshold=0.8, clip_high_threshold=1.2),
    "cispo": _policy(cispo, clip_low_threshold=0.0, clip_high_threshold=4.0),
    "dppo": _policy(dppo, delta_low=0.2, delta_high=0.2),
    "dppo_kl": _policy(dppo_kl, delta_low=0.05, delta_high=0.05),
    "dro": Loss(dro, _RL, config={"beta": 0.05}, by_entry=True),
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
}


def served_losses(stable_reinforce: Literal["refuse", "cispo"]) -> dict[str, Loss]:
    """Losses by name. With "cispo", `stable_reinforce` computes cispo, and the metrics of its passes say so."""
    if stable_reinforce == "refuse":
        return dict(LOSSES)
    return {**LOSSES, "stable_reinforce": replace(LOSSES["cispo"], notice="stable_reinforce_is_cispo:max")}


def check_pass(
    training_pass: TrainingPass, limits: ModelLimits, losses: Mapping[str, Loss], *, value_head: bool = False
) -> None:
    """Raise InvalidRequest: unknown loss or key, wrong shape, dtype or value, tokens or lengths beyond the model.
    `value_head`: whether the model has one."""
    loss = known_loss(training_pass.loss_fn, losses).of(training_pass.data)
    if loss.has_critic and not value_head:
        raise InvalidRequest(
            f"loss_fn_inputs: {', '.join(loss.required[-3:])} need a value head, and this model has none; create it "
            'with user_metadata={"value_head": "true"}'
        )
    loss_config(training_pass.loss_fn, loss, training_pass.loss_config)
    sampled_from = SampledFrom.of(training_pass.loss_config)
    if not training_pass.data:
        raise InvalidRequest("data: must hold at least one datum")
    for index, datum in enumerate(training_pass.data):
        try:
            _check_tokens(datum, limits)
            check_pictures(datum, training_pass.files, limits.sight)
            _check_targets(datum, training_pass.loss_fn, loss, limits)
            if loss.check_inputs is None:
                _check_inputs(datum, training_pass.loss_fn, loss)
            else:
                loss.check_inputs(datum)
            if loss.has_critic:
                critic.check_inputs(datum)
            check_picture_targets(datum, zero_at_pictures(loss))
            if FIELD in datum.loss_inputs:
                check_routed_experts(datum, limits.mixture)
            check_kept_tokens(datum, sampled_from, limits.vocab_size)
        except InvalidRequest as error:
            raise InvalidRequest(f"data[{index}]: {error}") from None


def known_loss(name: str, losses: Mapping[str, Loss]) -> Loss:
    """The loss called `name`. Raises InvalidRequest listing the known ones."""
    if (loss := losses.get(name)) is not None:
        return loss
    if name in REFUSED:
        raise InvalidRequest(f"loss_fn: {name} is not available: {REFUSED[name]}")
    raise InvalidRequest(f"loss_fn: no loss {name!r}; there are: {', '.join(losses)}")


def loss_config(name: str, loss: Loss, requested: Mapping[str, float]) -> dict[str, float]:
    """The loss's configuration, completed with defaults, without what it was sampled from. Raises InvalidRequest for
    unknown keys and invalid values."""
    requested = {key: value for key, value in requested.items() if key not in SAMPLING_KEYS}
    for key, value in requested.items():
        if key not in loss.config:
            allowed = ", ".join((*loss.config, *SAMPLING_KEYS))
            raise InvalidRequest(f"loss_fn_config: {name} has no key {key!r}; allowed: {allowed}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise InvalidRequest(f"loss_fn_config.{key}: must be a finite number of at least 0, got {value!r}")
    config = {**loss.config, **requested}
    if "clip_low_threshold" in config:
        _check_clip_bounds(config["clip_low_threshold"], config["clip_high_threshold"])
    if loss.has_critic:
        critic.check_config(config)
    return config


def _check_clip_bounds(low: float, high: float) -> None:
    """Raise InvalidRequest unless low <= 1 <= high. The bounds apply to the ratio, which is 1 where the policy has not
    changed. Bounds that exclude 1 are usually an epsilon (0.2 in place of 0.8 and 1.2)."""
    meaning = "the thresholds are bounds of the ratio exp(logprob - logprobs), which is 1 before the first step"
    if high < 1:
        raise InvalidRequest(
            f"loss_fn_config.clip_high_threshold: {high:g} is below 1: {meaning}; for an epsilon of {high:g} write "
            f"clip_low_threshold {1 - high:g} and clip_high_threshold {1 + high:g}"
        )
    if low > 1:
        raise InvalidRequest(
            f"loss_fn_config.clip_low_threshold: {low:g} is above 1: {meaning}; write a number from 0 to 1, and a "
            "clip_high_threshold of 1 or more"
        )


def _check_tokens(datum: Datum, limits: ModelLimits) -> None:
    tokens = datum.tokens
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise InvalidRequest(f"model_input: must be integers [N], got {tokens.dtype} {list(tokens.shape)}")
    if len(tokens) == 0:
        raise InvalidRequest("model_input: must hold at least one token")
    if len(tokens) > limits.max_context:
        raise InvalidRequest(f"model_input: {len(tokens)} tokens, the model's context is {limits.max_context}")
    _check_ids("model_input", tokens, limits)


def _check_ids(field: str, ids: np.ndarray, limits: ModelLimits) -> None:
    wrong = ids[(ids < 0) | (ids >= limits.vocab_size)]
    if wrong.size:
        allowed = f"[0, {limits.vocab_size}){whose_vocabulary(limits.base_model)}"
        raise InvalidRequest(f"{field}: token id {wrong[0]} is outside {allowed}")


_SAMPLED = ("logprobs", critic.VALUES, critic.RETURNS)
"""The inputs of losses that may be anything where nothing is trained."""


def zero_at_pictures(loss: Loss) -> list[str]:
    """The inputs that must be 0 where the target is a token of a picture."""
    return [name for name in (*loss.required, *loss.optional) if name not in _SAMPLED]


def _check_targets(datum: Datum, name: str, loss: Loss, limits: ModelLimits) -> None:
    field = "loss_fn_inputs.target_tokens"
    targets = datum.loss_inputs.get("target_tokens")
    if targets is None:
        raise InvalidRequest(f"{field}: missing; {name} needs it")
    if not np.issubdtype(targets.dtype, np.integer):
        raise InvalidRequest(f"{field}: must be int64, got {targets.dtype}")
    dimensions, allowed = ((1, 2), "[N] or [N, K]") if loss.per_target else ((1,), "[N]")
    if targets.ndim not in dimensions or len(targets) != len(datum.tokens) or targets.size == 0:
        raise InvalidRequest(
            f"{field}: must be {allowed} with N = {len(datum.tokens)}, the length of model_input, "
            f"for {name}; got {list(targets.shape)}"
        )
    _check_ids(field, targets, limits)


def _check_inputs(datum: Datum, name: str, loss: Loss) -> None:
    inputs = datum.loss_inputs
    known = ("target_tokens", *loss.required, *loss.optional)
    for key in inputs:
        if key not in (*known, FIELD, *KEPT_FIELDS):
            raise InvalidRequest(f"loss_fn_inputs.{key}: {name} does not use it; it takes {', '.join(known)}")
    for key in (*loss.required, *loss.optional):
        values = inputs.get(key)
        if values is None:
            if key in loss.required:
                raise InvalidRequest(f"loss_fn_inputs.{key}: missing; {name} needs {', '.join(known)}")
            continue
        if not (np.issubdtype(values.dtype, np.floating) or np.issubdtype(values.dtype, np.integer)):
            raise InvalidRequest(f"loss_fn_inputs.{key}: must be float32 or int64, got {values.dtype}")
        expected = inputs["target_tokens"].shape
        if values.shape != expected:
            raise InvalidRequest(
                f"loss_fn_inputs.{key}: must have the shape of target_tokens, {list(expected)}, "
                f"got {list(values.shape)}"
            )
        if not np.isfinite(values).all():
            raise InvalidRequest(f"loss_fn_inputs.{key}: holds NaN or infinity")
    if loss.ratio_mask is not None and not inputs[loss.ratio_mask].any() and inputs["advantages"].any():
        raise InvalidRequest(f"loss_fn_inputs.{loss.ratio_mask}: is all zero although advantages are not")
