"""Every family with experts against torch's autograd on merged weights, and against PEFT: adapters on all layers.

`pytest -s` shows the differences, which docs/reference/architectures.md lists.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.func import functional_call
from torch_lora_support import assert_close, assert_same, grpo, make_ranks, ok, rl, saved, sft, spec, train
from transformers import AutoModelForCausalLM

from skyrl.base.config.loading import load_config
from skyrl.training.backends.base import AdamParams, Backend, Datum, PassResult, TrainingPass
from skyrl.training.backends.torch_lora.adapter import Adapter
from skyrl.training.backends.torch_lora.backend import TorchLoraBackend
from skyrl.training.backends.torch_lora.routing import Routing, own_experts, routers_of
from tests.families import MIXTURES, make_family

LENGTHS = (7, 31, 1, 18)
LOGPROB_BOUND, GRADIENT_BOUND = 2e-5, 1e-5
_directory = tempfile.TemporaryDirectory(prefix="skyrl-mixtures-")


@functools.cache
def _path(family: str) -> str:
    return make_family(family, Path(_directory.name))


def _stock(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """transformers' model with its plainest attention and experts."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(_path(family), **plain, dtype=dtype).eval()


def _backend(family: str, *, merge: bool = False, budget: int = 4096, **trainer: Any) -> TorchLoraBackend:
    settings = {"merge_passes": merge, "micro_batch_tokens": budget, **trainer}
    given = {f"trainer.{name}": value for name, value in settings.items()}
    return TorchLoraBackend(load_config({"base_model": _path(family), "backend_config": given}))


def _step(backend: Backend, model_id: str = "m") -> None:
    """So that lora_B is not 0."""
    ok(backend.run([train(model_id, sft(0, *LENGTHS))]))
    backend.optim_step(model_id, AdamParams(learning_rate=1e-2))


def _trained(family: str, **options: Any) -> TorchLoraBackend:
    backend = _backend(family, **options)
    backend.create_model("m", spec(4, 11))
    _step(backend)
    return backend


def _with_experts(backend: TorchLoraBackend, data: list[Datum], seed: int = 1) -> list[Datum]:
    """Random experts; nothing recorded for a third of the tokens. Equal prefixes have equal ones."""
    mixture = backend.limits.mixture
    assert mixture is not None
    rng = np.random.default_rng(seed)
    longest = max(len(datum.tokens) for datum in data)
    every = np.tile(np.arange(mixture.experts), (longest, mixture.layers, 1))
    experts = rng.permuted(every, axis=-1)[..., : mixture.per_token]
    experts[rng.random(longest) < 1 / 3] = -1
    return [
        Datum(datum.tokens, {**datum.loss_inputs, "routed_experts": experts[: len(datum.tokens)]}) for datum in data
    ]


def _merged(stock: Any, adapter: Adapter, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The base model's parameters with W + scale * B A for each layer, or for each expert, that the adapter trains."""
    parameters = {name: value.detach() for name, value in stock.named_parameters()}
    of_experts: dict[str, list[Tensor]] = {}
    for target in adapter.targets:
        update = adapter.scale * leaves[f"{target.name}.lora_B"] @ leaves[f"{target.name}.lora_A"]
        module, _, leaf = target.name.replace("block_sparse_moe", "mlp").rpartition(".")
        if target.experts is None:
            parameters[f"{target.name}.weight"] = parameters[f"{target.name}.weight"] + update
        else:
            parameter = "down_proj" if leaf in ("down_proj", "w2") else "gate_up_proj"
            of_experts.setdefault(f"{module}.{parameter}", []).append(update)
    for name, updates in of_experts.items():
        update = torch.cat(updates, dim=1)  # gate above up
        module = stock.get_submodule(name.rpartition(".")[0])
        parameters[name] = parameters[name] + (update.transpose(1, 2) if module.is_transposed else update)
    return parameters


def _logprobs(logits: Tensor, datum: Datum) -> Tensor:
    targets = torch.from_numpy(datum.loss_inputs["target_tokens"])
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _follow(routing: Routing, datum: Datum) -> None:
    """How routers weigh given experts is tested in test_routers.py."""
    experts = datum.loss_inputs.get("routed_experts")
    flat = None if experts is None else torch.from_numpy(experts).flatten(1).int()
    packed: Any = SimpleNamespace(tokens=datum.tokens, experts=flat)
    routing.follow([packed])


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_logprobs_and_gradients_equal_autograd_on_merged_weights(tmp_path: Path, family: str, replay: bool) -> None:
    """Samples of one prompt share its rows."""
    backend = _trained(family, budget=48)
    adapter, stock = backend._adapters["m"], _stock(family)
    data = [*rl(4, *LENGTHS), *grpo(5, 2, 4, 9)]
    if replay:
        data = [*_with_experts(backend, data[:4]), *_with_experts(backend, data[4:], 2)]
    views = adapter.views(adapter.weights)
    leaves = {name: view.double().clone().requires_grad_() for name, view in views.items()}
    parameters = _merged(stock, adapter, leaves)
    routing = Routing(routers_of(stock))
    (result,) = ok(backend.run([train("m", data, "importance_sampling")]))
    loss, largest = torch.zeros((), dtype=torch.float64), 0.0
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        _follow(routing, datum)
        given = {"input_ids": torch.from_numpy(datum.tokens)[None], "use_cache": False}
        lp = _logprobs(functional_call(stock, parameters, kwargs=given).logits[0], datum)
        np.testing.assert_allclose(logprobs, lp.detach(), atol=LOGPROB_BOUND)
        largest = max(largest, float(np.abs(logprobs - lp.detach().numpy()).max()))
        inputs = {name: torch.from_numpy(value) for name, value in datum.loss_inputs.items()}
        loss = loss - ((lp - inputs["logprobs"]).exp() * inputs["advantages"]).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    theirs = {f"gradient.{name}": value for name, value in zip(leaves, gradients, strict=True)}
    ours = {name: one for name, one in saved(backend, "m", tmp_path).items() if name.startswith("gradient.")}
    assert all(bool(tensor.any()) for tensor in ours.values())
    assert_close(ours, theirs, GRADIENT_BOUND)
    of_gradients = max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in ours)
    print(f"{family}: largest difference of a logprob {largest:.0e}, of a gradient {of_gradients:.0e}")
