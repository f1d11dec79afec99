"""Routed experts that a datum brings with it: which experts the sampler used for each token and layer.

The loss input `routed_experts` is int64 [N, layers, k]: for each token of `model_input` and each layer with experts,
the k experts that the sampler has used, in any order. k times -1 means that nothing was recorded there: the trainer's
router chooses.

Packed it is int64 [N, ceil(layers * k / 8)], an eighth of the bytes: a token's experts as bytes in the same order,
eight in each int64, the first one lowest. A byte of 255 is -1. The bytes after the last expert may be anything. If the
model has more than 255 experts, two bytes, the low one first, hold each expert, and 65,535 is -1: int64 [N, ceil(layers
* k / 4)].

Knows arrays. Knows no model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl.base.wire.routed_experts import IN_BYTES, UNRECORDED
from skyrl.trainer.protocol import Datum, InvalidRequest, Mixture, TrainingPass

FIELD = "routed_experts"


def check_routed_experts(datum: Datum, mixture: Mixture | None) -> None:
    """Raise InvalidRequest unless the base model can use the datum's routed experts."""
    field = f"loss_fn_inputs.{FIELD}"
    given = datum.loss_inputs[FIELD]
    if mixture is None:
        raise InvalidRequest(f"{field}: the base model is no mixture of experts")
    if not np.issubdtype(given.dtype, np.integer):
        raise InvalidRequest(f"{field}: must be int64, got {given.dtype}")
    width = mixture.layers * mixture.per_token
    expected = (len(datum.tokens), mixture.layers, mixture.per_token)
    packed = (len(datum.tokens), -(-width * np.dtype(_packed_type(mixture)).itemsize // 8))
    if given.shape not in (expected, packed):
        raise InvalidRequest(
            f"{field}: must be [N, layers, k] = {list(expected)}, or packed {list(packed)}, with N the length of "
            f"model_input, the base model's {mixture.layers} layers with experts, and k experts per token; got "
            f"{list(given.shape)}"
        )
    experts = signed(_unpacked(given, mixture))
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


def with_sorted_experts(training_pass: TrainingPass, mixture: Mixture) -> TrainingPass:
    """The checked pass with [N, layers, k] experts, those of each token and layer in ascending order; packed ones have
    the type of `_unpacked`. So rows with the same experts are equal, and may be shared. The order has no meaning,
    because a router's weights are looked up by the expert's number. It may change the last bits of a sum over k
    experts."""
    if all(FIELD not in datum.loss_inputs for datum in training_pass.data):
        return training_pass
    return replace(training_pass, data=[_sorted(datum, mixture) for datum in training_pass.data])


def _sorted(datum: Datum, mixture: Mixture) -> Datum:
    given = datum.loss_inputs.get(FIELD)
    if given is None:
        return datum
    return replace(datum, loss_inputs=datum.loss_inputs | {FIELD: np.sort(_unpacked(given, mixture), axis=-1)})


def _packed_type(mixture: Mixture) -> type[np.uint8] | type[np.uint16]:
    """Its largest number is `UNRECORDED`."""
    return np.uint8 if mixture.experts <= IN_BYTES else np.uint16


def _unpacked(given: npt.NDArray[Any], mixture: Mixture) -> npt.NDArray[Any]:
    """[N, layers, k], of packed ones unsigned integers."""
    if given.ndim == 3:
        return given
    width = mixture.layers * mixture.per_token
    packed = np.ascontiguousarray(given, "<i8").view(np.dtype(_packed_type(mixture)).newbyteorder("<"))
    return packed[:, :width].reshape(len(given), mixture.layers, mixture.per_token)


def signed(experts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """With -1 where nothing was recorded: of unsigned integers int32."""
    if not np.issubdtype(experts.dtype, np.unsignedinteger):
        return experts
    numbers = experts.astype(np.int32)
    numbers[experts == np.iinfo(experts.dtype).max] = UNRECORDED
    return numbers


def _first(marked: npt.NDArray[np.bool_]) -> tuple[int, int]:
    token, layer = np.argwhere(marked)[0]
    return int(token), int(layer)
