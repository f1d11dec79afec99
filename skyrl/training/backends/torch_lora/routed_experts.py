"""Routed experts that a datum brings with it: which experts the sampler used for each token and layer.

The loss input `routed_experts` is int64 [N, layers, k]: for each token of `model_input` and each layer with experts,
the k experts that the sampler has used, in any order. k times -1 means that nothing was recorded there: the trainer's
router chooses.

Packed it is int64 [N, ceil(layers * k / 8)], an eighth of the bytes: a token's experts as bytes in the same order,
eight in each int64, the first one lowest. A byte of 255 is -1. The bytes after the last expert may be anything.

Knows arrays. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl.training.backends.base import Datum, InvalidRequest, Mixture, TrainingPass

FIELD = "routed_experts"
UNRECORDED = -1
_PACKED_UNRECORDED = 255


def check_routed_experts(datum: Datum, mixture: Mixture | None) -> None:
    """Raise InvalidRequest unless the datum has no routed experts, or such that the base model can use."""
    field = f"loss_fn_inputs.{FIELD}"
    given = datum.loss_inputs.get(FIELD)
    if given is None:
        return
    if mixture is None:
        raise InvalidRequest(f"{field}: the base model is no mixture of experts")
    if not np.issubdtype(given.dtype, np.integer):
        raise InvalidRequest(f"{field}: must be int64, got {given.dtype}")
    width = mixture.layers * mixture.per_token
    expected = (len(datum.tokens), mixture.layers, mixture.per_token)
    packed = (len(datum.tokens), -(-width // 8))
    if given.shape not in (expected, packed):
        raise InvalidRequest(
            f"{field}: must be [N, layers, k] = {list(expected)}, or packed {list(packed)}, with N the length of "
            f"model_input, the base model's {mixture.layers} layers with experts, and k experts per token; got "
            f"{list(given.shape)}"
        )
    if given.shape == packed and mixture.experts > _PACKED_UNRECORDED:
        raise InvalidRequest(
            f"{field}: the base model has {mixture.experts} experts, too many for bytes; send {list(expected)}"
        )
    experts = _flat(given)[:, :width].reshape(expected)
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


def with_sorted_experts(training_pass: TrainingPass, mixture: Mixture | None) -> TrainingPass:
    """The checked pass with the experts of each token and layer in ascending order, and the bytes after packed ones
    set to 255: so rows with the same experts are equal, and may be shared. The order has no meaning, because a router's
    weights are looked up by the expert's number. It may change the last bits of a sum over k experts."""
    if mixture is None or all(FIELD not in datum.loss_inputs for datum in training_pass.data):
        return training_pass
    return replace(training_pass, data=[_sorted(datum, mixture) for datum in training_pass.data])


def _sorted(datum: Datum, mixture: Mixture) -> Datum:
    given = datum.loss_inputs.get(FIELD)
    if given is None:
        return datum
    if given.ndim == 3:
        return replace(datum, loss_inputs=datum.loss_inputs | {FIELD: np.sort(given, axis=-1)})
    count, width = len(given), mixture.layers * mixture.per_token
    of_bytes = np.ascontiguousarray(given, "<i8").view(np.uint8)
    experts = of_bytes[:, :width].reshape(count, mixture.layers, mixture.per_token)
    result = np.full_like(of_bytes, _PACKED_UNRECORDED)
    result[:, :width] = np.sort(experts, axis=-1).reshape(count, width)
    return replace(datum, loss_inputs=datum.loss_inputs | {FIELD: result.view("<i8")})


def experts_of(data: Sequence[Datum]) -> Iterator[npt.NDArray[np.int32]] | None:
    """The checked routed experts of one sequence after the other, int32 [N, at least layers * k], all of one width; -1
    for sequences without. None if no sequence has them. They are unpacked one at a time: together they need four times
    the memory of packed ones."""
    given = [datum.loss_inputs.get(FIELD) for datum in data]
    width = max((_width(experts) for experts in given if experts is not None), default=None)
    if width is None:
        return None
    return (_rows(len(datum.tokens), experts, width) for datum, experts in zip(data, given, strict=True))


def _rows(count: int, given: npt.NDArray[Any] | None, width: int) -> npt.NDArray[np.int32]:
    if given is not None and _width(given) == width:
        return np.ascontiguousarray(_flat(given), np.int32)
    rows = np.full((count, width), UNRECORDED, np.int32)
    if given is not None:
        rows[:, : _width(given)] = _flat(given)
    return rows


def _width(given: npt.NDArray[Any]) -> int:
    """The columns of `_flat`."""
    return given.shape[1] * (given.shape[2] if given.ndim == 3 else 8)


def _flat(given: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[N, layers * k], of packed ones with the bytes that follow."""
    if given.ndim == 3:
        return given.reshape(len(given), -1)
    unpacked = np.ascontiguousarray(given, "<i8").view(np.uint8).astype(np.int32)
    unpacked[unpacked == _PACKED_UNRECORDED] = UNRECORDED
    return unpacked


def _first(marked: npt.NDArray[np.bool_]) -> tuple[int, int]:
    token, layer = np.argwhere(marked)[0]
    return int(token), int(layer)
