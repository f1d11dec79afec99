"""Helpers for tests of custom losses: functions traced as the SDK traces them, and what the SDK's client computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from tinker import types
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, run_loss_handle, trace_loss

from skyrl.base.types.custom_loss import CustomLoss
from skyrl.base.types.loss_graph import decode_loss, encode_loss
from skyrl.base.wire.requests import CustomLossBody
from skyrl.trainer.protocol import Datum

LossFn = Callable[..., Any]


def handle_of(function: LossFn, **ranks: int) -> LossHandle:
    """`ranks`: of the inputs beside logprobs, whose rank is 1 unless it is given."""
    return trace_loss(function, {"logprobs": 1, **ranks}, "session")  # type: ignore[arg-type]


def body_of(handle: LossHandle) -> dict[str, Any]:
    """What the SDK sends, without the session."""
    inputs = [{"name": each.name, "rank": each.rank} for each in handle.inputs]
    return {"name": handle.name, "inputs": inputs, "graph": encode_graph(handle).model_dump()}


def loss_of(handle: LossHandle) -> CustomLoss:
    """The loss as the engine reads it from the database."""
    return decode_loss(encode_loss(msgspec.convert(body_of(handle), CustomLossBody)))


def traced(function: LossFn, **ranks: int) -> CustomLoss:
    return loss_of(handle_of(function, **ranks))


def client_side(
    handle: LossHandle, data: Sequence[Datum], logprobs: Sequence[np.ndarray]
) -> tuple[float, Mapping[str, float], list[np.ndarray]]:
    """The loss, the metrics and the weights for cross_entropy of `forward_backward_custom` in the client."""
    sent = [
        types.Datum(
            model_input=types.ModelInput.from_ints(datum.tokens.tolist()),
            loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in datum.loss_inputs.items()},
        )
        for datum in data
    ]
    leaves = [torch.tensor(each).requires_grad_(True) for each in logprobs]
    loss, metrics = run_loss_handle(handle, sent, leaves)
    loss.backward()
    return loss.item(), metrics, [-leaf.grad.numpy() for leaf in leaves if leaf.grad is not None]
