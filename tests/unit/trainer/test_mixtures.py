"""Base models that are mixtures of experts, against transformers, PEFT and torch's autograd on the same data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch_lora_support import (
    SHAPE,
    assert_close,
    assert_same,
    base_path,
    files_saved,
    make_backend,
    make_full,
    make_ranks,
    ok,
    rl,
    saved,
    sft,
    spec,
    train,
    with_experts,
)
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.base.model_files import FROZEN_EXPERTS
from skyrl.trainer.experts.layers import OWN_PRODUCTS
from skyrl.trainer.protocol import AdamParams, Backend, Datum, InvalidRequest, Mixture, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.local_ranks import rank_of

LENGTHS = (7, 31, 1, 18, 30)
MIXTURES = ("mixture", "mixture-with-dense-layer")
NO_MLP = {"train_mlp": False}


def _stock(path: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with its plainest attention and experts."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, **plain, dtype=dtype).eval()


def _logprobs(model: Any, datum: Datum) -> Tensor:
    logits = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
    targets = torch.from_numpy(datum.loss_inputs["target_tokens"])
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _two_steps(backend: Backend) -> None:
    for step in range(2):
        ok(backend.run([train("m", sft(step, *LENGTHS))]))
        backend.optim_step("m", AdamParams(learning_rate=1e-2))


def _trained(architecture: str = "mixture", **options: Any) -> LoraBackend:
    backend = make_backend(architecture, micro_batch_tokens=48, **options)
    backend.create_model("m", spec(8, 5, **NO_MLP))
    _two_steps(backend)
    return backend


@pytest.mark.parametrize("architecture", MIXTURES)
def test_an_untrained_adapter_gives_the_mixtures_logprobs(architecture: str) -> None:
    backend = make_backend(architecture, micro_batch_tokens=40)
    backend.create_model("m", spec(**NO_MLP))
    data = sft(3, *LENGTHS)
    (result,) = ok(backend.run([TrainingPass("m", data, "cross_entropy", backward=False)]))
    assert FROZEN_EXPERTS not in result.metrics
    stock = _stock(base_path(architecture))
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, _logprobs(stock, datum).detach(), atol=2e-5)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_gradients_of_a_mixtures_adapter_equal_those_of_peft_in_float64(tmp_path: Path, architecture: str) -> None:
    backend = _trained(architecture)
    backend.save_adapter("m", tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "lm_head", "o_proj", "q_proj", "v_proj"]
    stock = _stock(base_path(architecture), torch.float64)
    model = PeftModel.from_pretrained(stock, str(tmp_path), is_trainable=True, autocast_adapter_dtype=False).eval()
    data = rl(4, *LENGTHS)
    (result,) = ok(backend.run([train("m", data, "importance_sampling")]))
    loss = torch.zeros((), dtype=torch.float64)
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        lp = _logprobs(model, datum)
        np.testing.assert_allclose(logprobs, lp.detach(), atol=5e-5)
        inputs = {name: torch.from_numpy(value) for name, value in datum.loss_inputs.items()}
        loss = loss - ((lp - inputs["logprobs"]).exp() * inputs["advantages"]).sum()
    loss.backward()
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    theirs: dict[str, Tensor] = {}
    for name, value in named:
        assert value.grad is not None
        short = name.removeprefix("base_model.model.").replace(".default", "").removesuffix(".weight")
        theirs[short] = value.grad.float()
    state = saved(backend, "m", tmp_path / "state")
    ours = {name.removeprefix("gradient."): value for name, value in state.items() if name.startswith("gradient.")}
    assert_close(ours, theirs, 1e-4)


def test_state_of_a_mixtures_adapter_is_saved_and_loaded_to_the_last_bit(tmp_path: Path) -> None:
    first = _trained()
    ok(first.run([train("m", sft(5, *LENGTHS))]))
    state = saved(first, "m", tmp_path / "first")
    second = make_backend("mixture")
    second.create_model("m", spec(8, 0, **NO_MLP))
    second.load_state("m", tmp_path / "first", optimizer=True)
    assert_same(saved(second, "m", tmp_path / "second"), state)


def test_gradient_checkpointing_of_a_mixture_gives_the_same_bits_also_with_routed_experts(tmp_path: Path) -> None:
    states = []
    for number, checkpointing in enumerate((False, True)):
        backend = _trained(gradient_checkpointing=checkpointing)
        ok(backend.run([train("m", with_experts(sft(3, *LENGTHS), 1))]))
        states.append(saved(backend, "m", tmp_path / str(number)))
    assert_same(states[0], states[1])


def test_other_passes_do_not_change_a_mixtures_pass(tmp_path: Path) -> None:
    states = []
    for number in range(2):
        backend = make_backend("mixture", micro_batch_tokens=48)
        for name in ("m", "other"):
            backend.create_model(name, spec(8, 5, **NO_MLP))
        passes = [train("m", sft(6, *LENGTHS)), train("m", with_experts(sft(7, *LENGTHS), 2))]
        if number:
            passes.insert(1, train("other", with_experts(sft(8, *LENGTHS), 3)))
        ok(backend.run(passes))
        states.append(saved(backend, "m", tmp_path / str(number)))
    assert_same(states[0], states[1])


def test_merged_passes_of_a_mixture_differ_by_rounding_alone(tmp_path: Path) -> None:
    states = []
    for merge in (False, True):
        backend = make_backend("mixture", merge=merge, micro_batch_tokens=128)
        for name in ("m", "other"):
            backend.create_model(name, spec(8, 5, **NO_MLP))
        ok(backend.run([train("m", sft(6, *LENGTHS)), train("other", with_experts(sft(8, 20, 9), 3))]))
        states.append(saved(backend, "m", tmp_path / str(merge)))
    assert_close(states[0], states[1], 1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_train_a_mixture_as_one_device_does(tmp_path: Path, ranks: int) -> None:
    alone = _trained()
    data = with_experts(sft(3, *LENGTHS), 4)
    (expected,) = ok(alone.run([train("m", data)]))
    over_ranks = make_ranks(ranks, "mixture")
    try:
        assert over_ranks.limits == alone.limits
        over_ranks.create_model("m", spec(8, 5, **NO_MLP))
        _two_steps(over_ranks)
        (result,) = ok(over_ranks.run([train("m", data)]))
        for one, other in zip(result.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=5e-5)
        weights = saved(over_ranks, "m", tmp_path / "ranks")
        assert_close(weights, saved(alone, "m", tmp_path / "alone"), 2e-3)
    finally:
        over_ranks.close()


REFUSE: dict[str, Any] = {"policy.model.lora.train_mlp_of_mixtures": "refuse"}
LEAVE_OUT: dict[str, Any] = {"policy.model.lora.train_mlp_of_mixtures": "leave_out"}


def test_where_the_operator_refuses_train_mlp_the_error_says_what_to_send_instead() -> None:
    backend = make_backend("mixture", **REFUSE)
    assert backend.limits.mixture == Mixture(layers=2, experts=8, per_token=2)
    with pytest.raises(InvalidRequest, match="lora_config.train_mlp: .* send train_mlp=False.*train_mlp_of_mixtures"):
        backend.create_model("m", spec())
    make_backend().create_model("m", spec())


def test_the_operator_may_let_train_mlp_train_the_other_layers_and_a_metric_says_so(tmp_path: Path) -> None:
    backend = make_backend("mixture", **LEAVE_OUT)
    backend.create_model("default", spec(8, 1))
    backend.create_model("said", spec(8, 1, **NO_MLP))
    default, said = ok(backend.run([train("default", sft(2, 20)), train("said", sft(2, 20))]))
    assert default.metrics == {**said.metrics, FROZEN_EXPERTS: 1.0}
    for name in ("default", "said"):
        backend.optim_step(name, AdamParams())
    assert_same(saved(backend, "default", tmp_path / "default"), saved(backend, "said", tmp_path / "said"))
    with pytest.raises(InvalidRequest, match="train_attn or train_unembed must be true"):
        backend.create_model("nothing", spec(train_attn=False, train_unembed=False))


def test_ranks_refuse_and_leave_out_experts_as_one_device_does() -> None:
    for more in (REFUSE, LEAVE_OUT):
        ranks = make_ranks(1, "mixture", **more)
        try:
            if more is REFUSE:
                with pytest.raises(InvalidRequest, match="lora_config.train_mlp"):
                    ranks.create_model("m", spec())
                continue
            ranks.create_model("m", spec())
            (result,) = ok(ranks.run([train("m", sft(2, 20))]))
            assert result.metrics[FROZEN_EXPERTS] == 1.0
        finally:
            ranks.close()


def test_a_dense_model_trains_its_mlp_whatever_the_operator_says_of_mixtures() -> None:
    dense = make_backend(**LEAVE_OUT)
    dense.create_model("m", spec())
    (result,) = ok(dense.run([train("m", sft(2, 20))]))
    assert FROZEN_EXPERTS not in result.metrics
    assert "model.layers.0.mlp.up_proj.lora_A" in rank_of(dense).adapters["m"].shapes


@pytest.fixture(scope="module")
def other_mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of a family that is not trained."""
    config = AutoConfig.for_model("olmoe", **SHAPE, num_experts=4, num_experts_per_tok=2)
    path = tmp_path_factory.mktemp("other-mixture")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def test_mixtures_with_other_routers_are_refused_by_name(other_mixture: str) -> None:
    words = "model.layers.0.mlp is a mixture of experts of a kind that cannot be trained: how Olmoe.*Qwen3MoeTopKRouter"
    with pytest.raises(ConfigError, match=words):
        LoraBackend(load_config({"base_model": other_mixture}))


def test_ranks_refuse_experts_that_the_files_lack(tmp_path: Path) -> None:
    tensors = load_file(Path(base_path("mixture")) / "model.safetensors")
    for name in [name for name in tensors if ".experts.5." in name]:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((Path(base_path("mixture")) / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"experts.down_proj with shape \[7, 48, 24\]"):
        make_ranks(1, path=str(tmp_path))


@pytest.fixture
def full() -> Iterator[Backend]:
    backend = make_full("mixture")
    backend.create_model("m", spec(0))
    yield backend
    backend.close()


def test_full_fine_tuning_of_a_mixture_equals_torch_autograd(full: Backend, tmp_path: Path) -> None:
    data = sft(3, *LENGTHS)
    (result,) = ok(full.run([train("m", data)]))
    stock = _stock(base_path("mixture"))
    loss = torch.zeros(())
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        lp = _logprobs(stock, datum)
        np.testing.assert_allclose(logprobs, lp.detach(), atol=2e-5)
        loss = loss - (torch.from_numpy(datum.loss_inputs["weights"]) * lp).sum()
    loss.backward()
    found = files_saved(full, "m", tmp_path / "state")
    gradients = {name: value for name, value in found.items() if name.startswith("gradient.")}
    theirs = {f"gradient.{name}": _filled(value.grad) for name, value in stock.named_parameters()}
    assert_close(gradients, theirs, 1e-4)


def _filled(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def test_experts_make_one_product_for_each_used_expert() -> None:
    assert rank_of(make_backend("mixture")).base.packed.model.config._experts_implementation == OWN_PRODUCTS


def test_the_weights_of_a_trained_mixture_are_saved_as_vllm_reads_them(full: Backend, tmp_path: Path) -> None:
    ok(full.run([train("m", sft(3, *LENGTHS))]))
    full.optim_step("m", AdamParams(learning_rate=1e-2))
    full.save_adapter("m", tmp_path)
    ours, base = _shapes(tmp_path), _shapes(Path(base_path("mixture")))
    assert ours == base
    assert "model.layers.0.mlp.experts.7.gate_proj.weight" in ours
    data = sft(4, *LENGTHS)
    (result,) = ok(full.run([TrainingPass("m", data, "cross_entropy", backward=False)]))
    stock = _stock(str(tmp_path))
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, _logprobs(stock, datum).detach(), atol=2e-5)


def _shapes(directory: Path) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in load_file(directory / "model.safetensors").items()}
