"""The backend against stock transformers, PEFT and torch.optim.AdamW on the same data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch_lora_support import (
    ARCHITECTURES,
    VOCAB,
    assert_close,
    assert_same,
    base_path,
    make_backend,
    ok,
    rl,
    saved,
    sft,
    spec,
    train,
)
from transformers import AutoModelForCausalLM

from skyrl.trainer.model import logprobs as logprobs_module
from skyrl.trainer.protocol import AdamParams, Datum, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend

# PEFT warns about an adapter on a tied lm_head. The adapters of this backend do not change the embeddings.
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
LENGTHS = (7, 31, 1, 18, 30)


def _stock(architecture: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(base_path(architecture), attn_implementation="eager").eval()


def _peft(architecture: str, directory: Path, *, trainable: bool) -> Any:
    return PeftModel.from_pretrained(_stock(architecture), str(directory), is_trainable=trainable).eval()


def _logprobs(model: Any, datum: Datum) -> Tensor:
    logits = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
    targets = torch.from_numpy(datum.loss_inputs["target_tokens"])
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _export(backend: LoraBackend, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save_adapter("m", directory)
    return directory


def _trained(architecture: str, **flags: bool) -> LoraBackend:
    """A backend whose model "m" has made two optimizer steps, so that lora_B is not 0."""
    backend = make_backend(architecture)
    backend.create_model("m", spec(8, 5, **flags))
    for step in range(2):
        ok(backend.run([train("m", sft(step, *LENGTHS))]))
        backend.optim_step("m", AdamParams(learning_rate=1e-2))
    return backend


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_untrained_adapter_gives_the_base_models_logprobs(architecture: str) -> None:
    backend = make_backend(architecture, micro_batch_tokens=40)
    backend.create_model("m", spec())
    data = sft(3, *LENGTHS)
    (result,) = ok(backend.run([TrainingPass("m", data, "cross_entropy", backward=False)]))
    stock = _stock(architecture)
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, _logprobs(stock, datum).detach(), atol=2e-5)


@pytest.mark.parametrize(
    ("architecture", "loss_fn", "params"),
    [
        (
            "qwen3",
            "cross_entropy",
            AdamParams(learning_rate=3e-3, weight_decay=0.1, grad_clip_norm=0.5, eps=1e-8),
        ),
        ("qwen3", "importance_sampling", AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-8)),
        ("qwen3-tied", "cross_entropy", AdamParams(learning_rate=3e-3, eps=1e-8)),
        ("llama", "cross_entropy", AdamParams(learning_rate=3e-3, weight_decay=0.01, eps=1e-8)),
        ("qwen2-window", "importance_sampling", AdamParams(learning_rate=3e-3, grad_clip_norm=0.1, eps=1e-8)),
    ],
)
def test_training_equals_peft_and_torch_adamw(
    tmp_path: Path, architecture: str, loss_fn: str, params: AdamParams
) -> None:
    backend = make_backend(architecture, micro_batch_tokens=50)
    backend.create_model("m", spec(4, 11))
    model = _peft(architecture, _export(backend, tmp_path / "start"), trainable=True)
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert {name.split(".")[-3] for name in trainable} == {"lora_A", "lora_B"}
    optimizer = torch.optim.AdamW(
        list(trainable.values()),
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    for step in range(4):
        data = (sft if loss_fn == "cross_entropy" else rl)(step, *LENGTHS)
        loss = torch.zeros(())
        for datum in data:
            lp = _logprobs(model, datum)
            inputs = {name: torch.from_numpy(value) for name, value in datum.loss_inputs.items()}
            if loss_fn == "cross_entropy":
                loss = loss - (inputs["weights"] * lp).sum()
            else:
                loss = loss - ((lp - inputs["logprobs"]).exp() * inputs["advantages"]).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable.values(), params.grad_clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        (result,) = ok(backend.run([train("m", data, loss_fn)]))
        assert result.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-3)
        metrics = backend.optim_step("m", params)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert metrics["optimizer_step"] == step + 1
        assert metrics["learning_rate"] == params.learning_rate
    ours = load_file(_export(backend, tmp_path / "end") / "adapter_model.safetensors")
    theirs = {name.replace(".default", ""): value.detach() for name, value in trainable.items()}
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-tied", "qwen2", "llama"])
def test_peft_loads_the_export_and_gives_the_same_logprobs(tmp_path: Path, architecture: str) -> None:
    backend = _trained(architecture)
    model = _peft(architecture, _export(backend, tmp_path), trainable=False)
    data = sft(8, *LENGTHS)
    (result,) = ok(backend.run([TrainingPass("m", data, "cross_entropy", backward=False)]))
    stock = _stock(architecture)
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        expected = _logprobs(model, datum).detach()
        np.testing.assert_allclose(logprobs, expected, atol=5e-5)
        assert (expected - _logprobs(stock, datum).detach()).abs().max() > 0.01


def test_pefts_own_merge_changes_tied_embeddings_and_one_of_an_untied_model_does_not(tmp_path: Path) -> None:
    """docs/how-it-works/checkpoints.md has this way to merge. PEFT 0.21 adds the update of a tied lm_head to the
    weights that are the embedding, too."""
    adapter, data = _export(_trained("qwen3-tied"), tmp_path / "adapter"), sft(8, *LENGTHS)

    def distance(merged: Any) -> float:
        """The largest from the adapter's logprobs, in nats."""
        right = _peft("qwen3-tied", adapter, trainable=False)
        return max(float((_logprobs(merged, each) - _logprobs(right, each)).detach().abs().max()) for each in data)

    with pytest.warns(UserWarning, match="Model with `tie_word_embeddings=True`"):
        wrong = _peft("qwen3-tied", adapter, trainable=False).merge_and_unload()
    assert distance(wrong) > 0.1
    base = _stock("qwen3-tied")
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
    base.config.tie_word_embeddings = False
    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().eval()
    assert distance(merged) < 1e-4
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    assert distance(again) < 1e-4


def test_the_export_holds_exactly_the_trained_modules(tmp_path: Path) -> None:
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    mlp = {"gate_proj", "up_proj", "down_proj"}
    for name, flags, expected in (
        ("all", {}, every),
        ("mlp", {"train_attn": False, "train_unembed": False}, mlp),
        ("no-mlp", {"train_mlp": False}, every - mlp),
    ):
        directory = _export(_trained("qwen3", **flags), tmp_path / name)
        config = json.loads((directory / "adapter_config.json").read_text())
        assert set(config["target_modules"]) == expected
        assert config["peft_type"] == "LORA"
        assert config["task_type"] == "CAUSAL_LM"
        assert (config["r"], config["lora_alpha"], config["bias"]) == (8, 32.0, "none")
        assert config["inference_mode"] is True
        assert config["base_model_name_or_path"] == base_path()
        tensors = load_file(directory / "adapter_model.safetensors")
        assert {key.split(".")[-3] for key in tensors} == expected
        assert all(value.dtype == torch.float32 for value in tensors.values())
        if "q_proj" in expected:
            assert tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (8, 48)
            assert tensors["base_model.model.lm_head.lora_B.weight"].shape == (VOCAB, 8)
        else:
            assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"].shape == (8, 80)


def test_gradient_checkpointing_gives_the_same_bits(tmp_path: Path) -> None:
    states = []
    for number, checkpointing in enumerate((False, True)):
        backend = make_backend(gradient_checkpointing=checkpointing)
        backend.create_model("m", spec())
        for step in range(2):
            ok(backend.run([train("m", sft(step, *LENGTHS))]))
            backend.optim_step("m", AdamParams(learning_rate=1e-2))
        ok(backend.run([TrainingPass("m", sft(3, *LENGTHS), "cross_entropy", backward=False)]))
        states.append(saved(backend, "m", tmp_path / str(number)))
    assert_same(states[0], states[1])


def test_logits_in_chunks_give_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, results = [], []
    for number, rows in enumerate((10_000, 16)):
        monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", rows * VOCAB * 4)
        backend = _trained("qwen3")
        results.append(ok(backend.run([train("m", sft(9, *LENGTHS))]))[0])
        states.append(saved(backend, "m", tmp_path / str(number)))
    assert_close(states[0], states[1], 1e-4)
    for one, other in zip(results[0].logprobs, results[1].logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
