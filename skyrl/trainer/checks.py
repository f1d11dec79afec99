"""Checks of passes, adapters and steps before they run: each error names the field, the datum and what is allowed.

Reads arrays and the model's limits; needs no torch tensors and no model. Pictures have checks of their own: where they
may stand among a datum's tokens, and that no loss is computed at their places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from skyrl.base.model_files import TRAIN_MLP_REFUSED, TrainMlpOfMixtures
from skyrl.base.pictures.vision import VisionConfig
from skyrl.base.types.weights import LoraSpec
from skyrl.base.wire.errors import whose_vocabulary
from skyrl.trainer.losses import REFUSED, Loss
from skyrl.trainer.protocol import AdamParams, Datum, InvalidRequest, Mixture, ModelLimits, TrainingPass
from skyrl.trainer.rows.routed_experts import FIELD, check_routed_experts


def check_pass(training_pass: TrainingPass, limits: ModelLimits, losses: Mapping[str, Loss]) -> None:
    """Raise InvalidRequest: unknown loss or key, wrong shape, dtype or value, tokens or lengths beyond the model."""
    loss = known_loss(training_pass.loss_fn, losses)
    loss_config(training_pass.loss_fn, loss, training_pass.loss_config)
    if not training_pass.data:
        raise InvalidRequest("data: must hold at least one datum")
    for index, datum in enumerate(training_pass.data):
        try:
            _check_tokens(datum, limits)
            check_pictures(datum, training_pass.files, limits.sight)
            _check_targets(datum, training_pass.loss_fn, loss, limits)
            _check_inputs(datum, training_pass.loss_fn, loss)
            check_picture_targets(datum, loss)
            if FIELD in datum.loss_inputs:
                check_routed_experts(datum, limits.mixture)
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
    """The loss's configuration, completed with defaults. Raises InvalidRequest for unknown keys and invalid values."""
    for key, value in requested.items():
        if key not in loss.config:
            allowed = ", ".join(loss.config) or "no keys"
            raise InvalidRequest(f"loss_fn_config: {name} has no key {key!r}; allowed: {allowed}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise InvalidRequest(f"loss_fn_config.{key}: must be a finite number of at least 0, got {value!r}")
    config = {**loss.config, **requested}
    if "clip_low_threshold" in config:
        _check_clip_bounds(config["clip_low_threshold"], config["clip_high_threshold"])
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
        if key not in (*known, FIELD):
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


def check_spec(
    spec: LoraSpec, max_rank: int, mixture: Mixture | None, train_mlp_of_mixtures: TrainMlpOfMixtures
) -> None:
    """Raise InvalidRequest for an adapter that this backend cannot train."""
    if spec.rank == 0:
        raise InvalidRequest(
            "lora_config.rank: 0 asks for full fine-tuning, which needs a server started with trainer.full_finetuning; "
            f"give 1 to {max_rank}"
        )
    if not 1 <= spec.rank <= max_rank:
        raise InvalidRequest(f"lora_config.rank: must be 1 to {max_rank}, got {spec.rank}")
    if not (math.isfinite(spec.alpha) and spec.alpha > 0):
        raise InvalidRequest(f"lora_config.alpha: must be a finite number above 0, got {spec.alpha}")
    if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
        raise InvalidRequest("lora_config: at least one of train_attn, train_mlp and train_unembed must be true")
    if mixture is not None and spec.train_mlp and train_mlp_of_mixtures == "refuse":
        raise InvalidRequest(f"lora_config.train_mlp: {TRAIN_MLP_REFUSED}")
    if mixture is not None and train_mlp_of_mixtures != "train" and not (spec.train_attn or spec.train_unembed):
        raise InvalidRequest(
            "lora_config: train_attn or train_unembed must be true, because the experts of the base model are not "
            "trained"
        )


LARGEST = 1e16
"""Larger learning rates, decays and eps are refused: the factors of a step would not fit into float32, and torch would
raise in the middle of a step that works in place."""


def check_adam(params: AdamParams) -> None:
    """Raise InvalidRequest for invalid hyper-parameters. eps 0 is invalid: it gives 0 / 0 where a gradient is zero."""
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(params, name) < 1:
            raise InvalidRequest(f"adam_params.{name}: must be in [0, 1), got {getattr(params, name)}")
    for name in ("learning_rate", "weight_decay"):
        value = getattr(params, name)
        if not 0 <= value <= LARGEST:
            raise InvalidRequest(f"adam_params.{name}: must be in [0, {LARGEST:g}], got {value}")
    if not (math.isfinite(params.grad_clip_norm) and params.grad_clip_norm >= 0):
        raise InvalidRequest(
            f"adam_params.grad_clip_norm: must be a finite number of at least 0, got {params.grad_clip_norm}"
        )
    if not 0 < params.eps <= LARGEST:
        raise InvalidRequest(f"adam_params.eps: must be above 0 and at most {LARGEST:g}, got {params.eps}")


def check_pictures(datum: Datum, files: Mapping[str, bytes], sight: VisionConfig | None) -> None:
    """Raise InvalidRequest for pictures of a model that takes text only, without a file, or in another place than among
    the tokens that stand for them."""
    done = 0
    for picture in datum.pictures:
        if sight is None:
            raise InvalidRequest("model_input: the base model takes text only")
        if picture.digest not in files:
            raise InvalidRequest(f"model_input: the file of the picture at position {picture.start} is missing")
        if not done <= picture.start < picture.stop <= len(datum.tokens):
            raise InvalidRequest(
                f"model_input: a picture at positions {picture.start} to {picture.stop - 1} does not fit between "
                f"position {done} and the end at {len(datum.tokens)}"
            )
        if (datum.tokens[picture.start : picture.stop] != sight.image_token_id).any():
            raise InvalidRequest(
                f"model_input: the picture at position {picture.start} needs token {sight.image_token_id} at all of "
                f"its {picture.tokens} positions"
            )
        done = picture.stop


_SAMPLED = "logprobs"
"""The one input of losses that may be anything where nothing is trained."""


def text_targets(datum: Datum) -> npt.NDArray[np.bool_]:
    """Whether the target at each position is text: bool [N]."""
    text = np.ones(len(datum.tokens), np.bool_)
    for picture in datum.pictures:
        text[max(0, picture.start - 1) : picture.stop - 1] = False
    return text


def text_entries(data: Sequence[Datum]) -> npt.NDArray[np.bool_] | None:
    """The same for all entries of the sequences' target_tokens, [N] or [N, K], flat. None if there are no pictures."""
    if not any(datum.pictures for datum in data):
        return None
    widths = (datum.loss_inputs["target_tokens"].size // len(datum.tokens) for datum in data)
    return np.concatenate([np.repeat(text_targets(datum), width) for datum, width in zip(data, widths, strict=True)])


def check_picture_targets(datum: Datum, loss: Loss) -> None:
    """Raise InvalidRequest for a weight, an advantage or a mask that is not 0 where the target is a picture's token."""
    if not datum.pictures:
        return
    pictured = ~text_targets(datum)
    for name in (*loss.required, *loss.optional):
        values = datum.loss_inputs.get(name)
        if values is None or name == _SAMPLED:
            continue
        asked = pictured & (values.reshape(len(values), -1) != 0).any(axis=1)
        if asked.any():
            position = int(asked.argmax())
            raise InvalidRequest(
                f"loss_fn_inputs.{name}: must be 0 at position {position}, whose target is a token of a picture: "
                "pictures are never trained on"
            )
