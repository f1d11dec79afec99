"""Routed experts that a datum brings with it: which experts the sampler used for each token and layer.

The loss input `routed_experts` is int64 [N, layers, k]: for each token of `model_input` and each layer with experts,
the k experts that the sampler has used. k times -1 means that nothing was recorded there: the trainer's router chooses.
Knows arrays. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from skyrl.backends.base import Datum, InvalidRequest, Mixture

FIELD = "routed_experts"
UNRECORDED = -1


def check_routed_experts(datum: Datum, mixture: Mixture | None) -> None:
    """Raise InvalidRequest unless the datum has no routed experts, or such that the base model can use."""
    field = f"loss_fn_inputs.{FIELD}"
    experts = datum.loss_inputs.get(FIELD)
    if experts is None:
        return
    if mixture is None:
        raise InvalidRequest(f"{field}: the base model is no mixture of experts")
    if not np.issubdtype(experts.dtype, np.integer):
        raise InvalidRequest(f"{field}: must be int64, got {experts.dtype}")
    expected = [len(datum.tokens), mixture.layers, mixture.per_token]
    if list(experts.shape) != expected:
        raise InvalidRequest(
            f"{field}: must be [N, layers, k] = {expected}, with N the length of model_input, the base model's "
            f"{mixture.layers} layers with experts, and k experts per token; got {list(experts.shape)}"
        )
    ordered = np.sort(experts, axis=-1)
    recorded = ordered[..., -1] != UNRECORDED
    wrong = recorded & ((ordered[..., 0] < 0) | (ordered[..., -1] >= mixture.experts))
    wrong |= ~recorded & (ordered[..., 0] != UNRECORDED)
    twice = recorded & (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if wrong.any():
        token, layer = _first(wrong)
        raise InvalidRequest(
            f"{field}: [{token}, {layer}] holds {experts[token, layer].tolist()}; experts are in "
            f"[0, {mixture.experts}), or all -1 where nothing was recorded"
        )
    if twice.any():
        token, layer = _first(twice)
        raise InvalidRequest(f"{field}: [{token}, {layer}] names an expert twice: {experts[token, layer].tolist()}")


def _first(marked: npt.NDArray[np.bool_]) -> tuple[int, int]:
    token, layer = np.argwhere(marked)[0]
    return int(token), int(layer)


def experts_of_rows(data: Sequence[Datum]) -> npt.NDArray[np.int32] | None:
    """The routed experts of sequences laid end to end, int32 [tokens, layers, k]. Sequences without them have -1. None
    if no sequence has them."""
    given = [datum.loss_inputs.get(FIELD) for datum in data]
    shapes = {experts.shape[1:] for experts in given if experts is not None}
    if not shapes:
        return None
    (shape,) = shapes
    return np.concatenate(
        [
            np.full((len(datum.tokens), *shape), UNRECORDED, np.int32) if experts is None else experts.astype(np.int32)
            for datum, experts in zip(data, given, strict=True)
        ]
    )
