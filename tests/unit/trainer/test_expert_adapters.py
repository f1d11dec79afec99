"""Adapters on the experts of a mixture, against torch's autograd on merged weights, and against PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from torch_lora_support import (
    assert_close,
    assert_same,
    base_path,
    grpo,
    make_backend,
    make_ranks,
    ok,
    rl,
    saved,
    sft,
    spec,
    train,
    with_experts,
)
from transformers import AutoModelForCausalLM

from skyrl.base.model_files import FROZEN_EXPERTS
from skyrl.trainer.lora.adapter import Adapter
from skyrl.trainer.protocol import AdamParams, Backend, Datum, InvalidRequest, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.local_ranks import rank_of

LENGTHS = (7, 31, 1, 18, 30)
LEAVE_OUT: dict[str, Any] = {"policy.model.lora.train_mlp_of_mixtures": "leave_out"}
REFUSE: dict[str, Any] = {"policy.model.lora.train_mlp_of_mixtures": "refuse"}
EXPERT = "model.layers.1.mlp.experts"
LAYER = "model.layers.0"


def _stock(architecture: str) -> Any:
    """transformers' model in float64, with its plainest attention and experts."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(base_path(architecture), **plain, dtype=torch.float64).eval()


def _two_steps(backend: Backend, model_id: str = "m", first: int = 0) -> None:
    for step in range(2):
        ok(backend.run([train(model_id, sft(first + step, *LENGTHS))]))
        backend.optim_step(model_id, AdamParams(learning_rate=1e-2))


def _trained(architecture: str = "mixture", rank: int = 8, **options: Any) -> LoraBackend:
    backend = make_backend(architecture, micro_batch_tokens=48, **options)
    backend.create_model("m", spec(rank, 5))
    _two_steps(backend)
    return backend


def _leaves(adapter: Adapter) -> dict[str, Tensor]:
    views = adapter.views(adapter.weights)
    return {name: view.double().clone().requires_grad_() for name, view in views.items()}


def _merged(stock: Any, adapter: Adapter, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The base model's parameters with W + scale * B A for each layer, or for each expert, that the adapter trains."""
    parameters = {name: value.detach() for name, value in stock.named_parameters()}

    def update(name: str) -> Tensor:
        return adapter.scale * leaves[f"{name}.lora_B"] @ leaves[f"{name}.lora_A"]

    for target in adapter.targets:
        prefix, _, leaf = target.name.rpartition(".")
        if target.experts is None:
            parameters[f"{target.name}.weight"] = parameters[f"{target.name}.weight"] + update(target.name)
        elif leaf == "down_proj":
            parameters[target.name] = parameters[target.name] + update(target.name)
        elif leaf == "gate_proj":
            both = torch.cat([update(target.name), update(f"{prefix}.up_proj")], dim=1)
            parameters[f"{prefix}.gate_up_proj"] = parameters[f"{prefix}.gate_up_proj"] + both
    return parameters


def _logprobs(logits: Tensor, datum: Datum) -> Tensor:
    targets = torch.from_numpy(datum.loss_inputs["target_tokens"])
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _gradients(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("gradient."): value for name, value in state.items() if name.startswith("gradient.")}


@pytest.mark.parametrize(("architecture", "rank"), [("mixture", 8), ("mixture", 3), ("mixture-with-dense-layer", 1)])
def test_logprobs_and_gradients_equal_autograd_on_merged_weights(tmp_path: Path, architecture: str, rank: int) -> None:
    """Ranks 3 and 1 are no multiples of what the grouped product takes. Samples of one prompt share its rows."""
    backend = _trained(architecture, rank)
    adapter, stock = rank_of(backend).adapters["m"], _stock(architecture)
    data = [*rl(4, *LENGTHS), *grpo(5, 2, 4, 9)]
    leaves = _leaves(adapter)
    parameters = _merged(stock, adapter, leaves)
    (result,) = ok(backend.run([train("m", data, "importance_sampling")]))
    assert FROZEN_EXPERTS not in result.metrics
    loss = torch.zeros((), dtype=torch.float64)
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        given = {"input_ids": torch.from_numpy(datum.tokens)[None]}
        lp = _logprobs(functional_call(stock, parameters, kwargs=given).logits[0], datum)
        np.testing.assert_allclose(logprobs, lp.detach(), atol=2e-5)
        inputs = {name: torch.from_numpy(value) for name, value in datum.loss_inputs.items()}
        loss = loss - ((lp - inputs["logprobs"]).exp() * inputs["advantages"]).sum()
    theirs = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    ours = _gradients(saved(backend, "m", tmp_path))
    assert f"{EXPERT}.down_proj.lora_B" in ours
    assert_close(ours, theirs, 1e-5)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
def test_the_files_hold_a_pair_for_each_expert_and_peft_computes_the_same_with_them(tmp_path: Path) -> None:
    backend = _trained()
    backend.save_adapter("m", tmp_path)
    shapes = {name: tuple(one.shape) for name, one in load_file(tmp_path / "adapter_model.safetensors").items()}
    assert shapes[f"base_model.model.{EXPERT}.7.gate_proj.lora_A.weight"] == (8, 48)
    assert shapes[f"base_model.model.{EXPERT}.7.down_proj.lora_B.weight"] == (48, 8)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert {"gate_proj", "up_proj", "down_proj"} < set(config["target_modules"])
    model = PeftModel.from_pretrained(_stock("mixture"), str(tmp_path), autocast_adapter_dtype=False).eval()
    data = sft(4, *LENGTHS)
    (result,) = ok(backend.run([TrainingPass("m", data, "cross_entropy", backward=False)]))
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        logits = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
        np.testing.assert_allclose(logprobs, _logprobs(logits, datum).detach(), atol=2e-5)


def test_states_with_experts_continue_to_the_last_bit_on_one_device_and_on_ranks(tmp_path: Path) -> None:
    first = _trained()
    ok(first.run([train("m", sft(5, *LENGTHS))]))
    state = saved(first, "m", tmp_path / "first")
    second = make_backend("mixture")
    second.create_model("m", spec(8, 0))
    second.load_state("m", tmp_path / "first", optimizer=True)
    assert_same(saved(second, "m", tmp_path / "second"), state)
    ranks = make_ranks(2, "mixture")
    try:
        ranks.create_model("m", spec(8, 0))
        ranks.load_state("m", tmp_path / "first", optimizer=True)
        assert_same(saved(ranks, "m", tmp_path / "ranks"), state)
    finally:
        ranks.close()


def test_a_state_without_experts_does_not_load_into_an_adapter_with_them(tmp_path: Path) -> None:
    backend = _trained()
    backend.create_model("other", spec(8, 5, train_mlp=False))
    for one, other in (("m", "other"), ("other", "m")):
        saved(backend, one, tmp_path / one)
        with pytest.raises(InvalidRequest, match=r"train_mlp.* differ.*experts\.down_proj"):
            backend.load_state(other, tmp_path / one, optimizer=False)


def _restored(make: Callable[..., Backend], directory: Path, states: Path, more: dict[str, Any]) -> dict[str, Tensor]:
    """The state after one more step of a model that was restored where the operator's setting is another one."""
    backend = make("mixture", micro_batch_tokens=48, **more)
    backend.restore_model("m", spec(8, 5), directory)
    (result,) = ok(backend.run([train("m", sft(5, *LENGTHS))]))
    assert (FROZEN_EXPERTS in result.metrics) == ("leave_out" in directory.name)
    backend.optim_step("m", AdamParams(learning_rate=1e-2))
    states.mkdir(parents=True)
    backend.save_state("m", states)
    backend.close()
    return load_file(states / "adapter_model.safetensors")


def _one_rank(architecture: str, **options: Any) -> Backend:
    return make_ranks(1, architecture, **options)


@pytest.mark.parametrize(("saved_with", "later"), [({}, LEAVE_OUT), ({}, REFUSE), (LEAVE_OUT, {})])
def test_a_model_is_restored_with_its_own_layers_where_the_setting_has_changed(
    tmp_path: Path, saved_with: dict[str, Any], later: dict[str, Any]
) -> None:
    first = _trained(**saved_with)
    directory = tmp_path / ("leave_out" if saved_with else "train")
    saved(first, "m", directory)
    same = _restored(make_backend, directory, tmp_path / "same", saved_with)
    assert_same(_restored(make_backend, directory, tmp_path / "other", later), same)
    assert_close(_restored(_one_rank, directory, tmp_path / "ranks", later), same, 2e-3)


def test_a_checkpoint_without_experts_goes_on_without_them_in_a_model_of_the_same_flags(tmp_path: Path) -> None:
    """It was saved under `leave_out`."""
    before = saved(_trained(**LEAVE_OUT), "m", tmp_path / "before")
    backend = make_backend("mixture")
    backend.create_model("m", spec(8, 0))
    backend.load_state("m", tmp_path / "before", optimizer=True)
    assert_same(saved(backend, "m", tmp_path / "after"), before)


def test_layers_that_the_base_model_does_not_have_are_refused_by_name(tmp_path: Path) -> None:
    saved(_trained(), "m", tmp_path)
    backend = make_backend()
    backend.create_model("m", spec(8, 5))
    with pytest.raises(InvalidRequest, match=rf"layers of the base model that this server cannot train: {LAYER}.mlp"):
        backend.load_state("m", tmp_path, optimizer=False)


@pytest.mark.parametrize("change", ["lacks", "is larger"])
def test_a_file_that_lacks_an_expert_or_has_one_of_another_shape_is_refused_by_name(
    tmp_path: Path, change: str
) -> None:
    backend = _trained()
    saved(backend, "m", tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    matrix = tensors.pop(f"base_model.model.{EXPERT}.5.up_proj.lora_A.weight")
    if change == "is larger":
        tensors[f"base_model.model.{EXPERT}.5.up_proj.lora_A.weight"] = torch.cat([matrix, matrix])
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"names differ.*{EXPERT}"):
        backend.load_state("m", tmp_path, optimizer=False)


def test_gradient_checkpointing_gives_the_same_bits_also_with_routed_experts(tmp_path: Path) -> None:
    states = []
    for number, checkpointing in enumerate((False, True)):
        backend = _trained(gradient_checkpointing=checkpointing)
        ok(backend.run([train("m", with_experts(sft(3, *LENGTHS), 1))]))
        states.append(saved(backend, "m", tmp_path / str(number)))
    assert_same(states[0], states[1])


def test_replayed_experts_get_the_gradient_and_others_get_none(tmp_path: Path) -> None:
    backend = make_backend("mixture")
    backend.create_model("m", spec(8, 5))
    (datum,) = sft(3, 12)
    datum.loss_inputs["routed_experts"] = np.tile(np.array([6, 2]), (12, 2, 1))
    ok(backend.run([train("m", [datum])]))
    gradient = _gradients(saved(backend, "m", tmp_path))[f"{EXPERT}.up_proj.lora_B"]
    assert [number for number, of_expert in enumerate(gradient) if of_expert.any()] == [2, 6]


def test_other_passes_change_no_bit_of_a_pass(tmp_path: Path) -> None:
    states = []
    for number in range(2):
        backend = make_backend("mixture", micro_batch_tokens=48)
        for name in ("m", "other"):
            backend.create_model(name, spec(8, 5))
        passes = [train("m", sft(6, *LENGTHS)), train("m", with_experts(sft(7, *LENGTHS), 2))]
        if number:
            passes.insert(1, train("other", with_experts(sft(8, *LENGTHS), 3)))
        ok(backend.run(passes))
        states.append(saved(backend, "m", tmp_path / str(number)))
    assert_same(states[0], states[1])


TENANTS = {"a": spec(8, 5), "plain": spec(8, 1, train_mlp=False), "b": spec(3, 7), "c": spec(16, 9, train_attn=False)}


def _tenants(*, merge: bool) -> LoraBackend:
    """Adapters with experts of several ranks, one without, all of them away from their start."""
    backend = make_backend("mixture", merge=merge, micro_batch_tokens=256)
    for number, (name, of_tenant) in enumerate(TENANTS.items()):
        backend.create_model(name, of_tenant)
        generator = torch.Generator().manual_seed(number)
        weights = rank_of(backend).adapters[name].weights
        weights.add_(torch.randn(weights.shape, generator=generator) * 0.02)
    return backend


def test_tenants_in_one_micro_batch_differ_from_each_alone_by_rounding(tmp_path: Path) -> None:
    """Adapters with and without experts, of several ranks, and rows of the same expert in several adapters."""
    states = []
    for merge in (False, True):
        backend = _tenants(merge=merge)
        passes = [train(name, with_experts(sft(number, 20, 9), number)) for number, name in enumerate(TENANTS)]
        ok(backend.run(passes))
        states.append({name: saved(backend, name, tmp_path / f"{name}-{merge}") for name in TENANTS})
    for name in TENANTS:
        assert_close(states[0][name], states[1][name], 1e-5)


def test_numbers_that_are_not_finite_stay_with_their_tenant(tmp_path: Path) -> None:
    states = []
    for broken in (False, True):
        backend = _tenants(merge=True)
        if broken:
            rank_of(backend).adapters["b"].weights.fill_(torch.nan)
        outcomes = backend.run([train(name, sft(1, 20)) for name in TENANTS])
        assert [isinstance(each, Exception) for each in outcomes] == [broken and name == "b" for name in TENANTS]
        states.append(saved(backend, "a", tmp_path / str(broken)) | saved(backend, "c", tmp_path / f"c-{broken}"))
    assert_close(states[0], states[1], 1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_train_experts_as_one_device_does(tmp_path: Path, ranks: int) -> None:
    alone = _trained()
    data = with_experts(sft(3, *LENGTHS), 4)
    (expected,) = ok(alone.run([train("m", data)]))
    over_ranks = make_ranks(ranks, "mixture")
    try:
        over_ranks.create_model("m", spec(8, 5))
        _two_steps(over_ranks)
        (result,) = ok(over_ranks.run([train("m", data)]))
        assert FROZEN_EXPERTS not in result.metrics
        for one, other in zip(result.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=5e-5)
        assert_close(saved(over_ranks, "m", tmp_path / "ranks"), saved(alone, "m", tmp_path / "alone"), 2e-3)
    finally:
        over_ranks.close()


def test_an_adapter_may_train_experts_alone() -> None:
    backend = make_backend("mixture")
    backend.create_model("m", spec(8, 5, train_attn=False, train_unembed=False))
    assert {name.split(".mlp.")[1].split(".")[0] for name in rank_of(backend).adapters["m"].shapes} == {"experts"}
    _two_steps(backend)
