"""Custom losses: the numbers of the SDK's client, on one device and over ranks; graphs that are refused; bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from custom_losses import client_side, handle_of, loss_of, traced
from tinker.lib.public_interfaces.custom_loss import LossHandle
from torch import Tensor
from torch_lora_support import make_backend, make_full, make_ranks, ok, rl, saved, spec, train

from skyrl.base.types import custom_loss as names
from skyrl.trainer.custom_loss import graph as bounds
from skyrl.trainer.custom_loss.graph import META, LossGraph, Work
from skyrl.trainer.protocol import AdamParams, Backend, Datum, InvalidRequest, TrainingPass


def reinforce(logprobs: Any, advantages: Any) -> Any:
    loss = -(logprobs * advantages).sum()
    return loss, {"custom/tokens:sum": (advantages != 0).sum(), "custom/mean_logprob:mean": logprobs.mean()}


def preference(logprobs: Any, rejected: Any, weights: Any, beta: Any) -> Any:
    """A DPO-like loss of a pair: the chosen answer is scored here, the rejected one was."""
    chosen = (logprobs * weights).sum() / weights.sum().clamp(min=1)
    margin = beta * (chosen - rejected.mean())
    return -F.logsigmoid(margin), {"custom/margin:mean": margin, "custom/accuracy:mean": (margin > 0).float()}


def clipped(logprobs: Any, old: Any, advantages: Any) -> Any:
    """With an index by a mask, and a step between neighbours."""
    mask = advantages != 0
    ratio = torch.exp(logprobs - old)[mask]
    chosen = advantages[mask]
    objective = torch.minimum(ratio * chosen, torch.clamp(ratio, 0.8, 1.2) * chosen)
    smooth = (logprobs[1:] - logprobs[:-1]).square().mean() / logprobs.shape[0] ** 0.5
    return smooth - objective.sum(), {"custom/ratio:mean": ratio.mean(), "custom/top:sum": ratio.max(dim=0).values}


def data_of(*lengths: int) -> list[Datum]:
    rng = np.random.default_rng(3)
    data = []
    for datum in rl(1, *lengths):
        inputs: dict[str, Any] = dict(datum.loss_inputs)
        inputs["old"] = inputs.pop("logprobs")
        inputs["weights"] = (inputs["advantages"] != 0).astype(np.float32)
        inputs["rejected"] = rng.normal(-4, 1, 5).astype(np.float32)
        inputs["beta"] = np.array([0.3], np.float32)
        data.append(Datum(datum.tokens, inputs))
    return data


LOSSES = (
    handle_of(reinforce, advantages=1),
    handle_of(preference, rejected=1, weights=1, beta=0),
    handle_of(clipped, old=1, advantages=1),
)
DATA = data_of(20, 9, 31, 14)


def of_server(handle: LossHandle, data: Sequence[Datum] = DATA, model_id: str = "m") -> TrainingPass:
    return replace(train(model_id, [*data], "custom"), custom_loss=loss_of(handle))


def learned(backend: Backend) -> Backend:
    backend.create_model("m", spec(seed=4))
    ok(backend.run([train("m", rl(0, 25), "importance_sampling")]))
    backend.optim_step("m", AdamParams(learning_rate=1e-2))
    return backend


def by_client(backend: Backend, handle: LossHandle) -> tuple[float, dict[str, float], list[np.ndarray]]:
    """As the SDK: a forward, the loss in the client, and a backward of cross_entropy."""
    bare = [Datum(each.tokens, {"target_tokens": each.loss_inputs["target_tokens"]}) for each in DATA]
    (scored,) = ok(backend.run([replace(train("m", bare), backward=False)]))
    scalar = [Datum(each.tokens, {**each.loss_inputs, "beta": each.loss_inputs["beta"].reshape(())}) for each in DATA]
    loss, metrics, weights = client_side(handle, scalar, scored.logprobs)
    linear = [
        Datum(each.tokens, {**each.loss_inputs, "weights": of_datum})
        for each, of_datum in zip(bare, weights, strict=True)
    ]
    ok(backend.run([train("m", linear)]))
    return loss, dict(metrics), scored.logprobs


@pytest.mark.parametrize("handle", LOSSES, ids=lambda handle: handle.name)
def test_the_server_computes_what_the_client_does(handle: LossHandle, tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    client, server = (learned(make_backend(micro_batch_tokens=budget)) for budget in (4096, 48))
    loss, metrics, logprobs = by_client(client, handle)
    (result,) = ok(server.run([of_server(handle)]))
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert {name: result.metrics[name] for name in metrics} == pytest.approx(metrics, rel=1e-5)
    assert result.metrics["num_tokens:sum"] == sum(len(each.tokens) for each in DATA)
    for one, other in zip(result.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    one, other = (gradients(each, tmp_path / name) for each, name in ((server, "server"), (client, "client")))
    largest = max(float(each.abs().max()) for each in other.values())
    for name, gradient in one.items():
        assert float((gradient - other[name]).abs().max()) < 1e-5 * largest, name


def gradients(backend: Backend, path: Path) -> dict[str, Tensor]:
    found = {name: each for name, each in saved(backend, "m", path).items() if name.startswith("gradient.")}
    assert found
    return found
