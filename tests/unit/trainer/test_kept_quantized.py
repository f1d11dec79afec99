"""Weights that stay quantized in the trainer's memory compute the same bits as weights computed at loading."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_support import CASES, release
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch_lora_support import assert_same, make_backend, ok, saved, sft, spec, train

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.trainer import create_backend
from skyrl.trainer.model.loading import load_model
from skyrl.trainer.protocol import AdamParams
from skyrl.trainer.quantized.weights import QuantizedWeight, held_bytes
from tests.local_ranks import rank_of

STEP = AdamParams(learning_rate=1e-2)


def trained(path: str, out: Path, **settings: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """Metrics and logprobs of two steps, and the adapter after them."""
    flat = {f"trainer.{key}": value for key, value in settings.items()}
    backend: Any = create_backend(load_config({"base_model": path, "backend_config": flat}))
    backend.create_model("m", spec(4, 1))
    seen: list[Any] = []
    for step in range(2):
        (result,) = ok(backend.run([train("m", sft(step, 12, 30, 9))]))
        seen += [result.metrics, [logprobs.tolist() for logprobs in result.logprobs], backend.optim_step("m", STEP)]
    adapter = saved(backend, "m", out)
    backend.close()
    return seen, adapter


@pytest.mark.parametrize("case", CASES)
def test_training_gives_the_same_bits_as_on_weights_computed_at_loading(case: str, tmp_path: Path) -> None:
    path = release(case, tmp_path)
    expected, adapter = trained(path, tmp_path / "computed")
    kept, kept_adapter = trained(path, tmp_path / "kept", keep_quantized=True)
    assert kept == expected
    assert_same(kept_adapter, adapter)


@pytest.mark.parametrize("case", ["dense-int4", "fused-mixture-mxfp4"])
def test_recomputed_layers_and_merged_passes_give_the_same_bits_too(case: str, tmp_path: Path) -> None:
    path, settings = release(case, tmp_path), {"gradient_checkpointing": True, "merge_passes": True}
    expected, adapter = trained(path, tmp_path / "computed", **settings)
    kept, kept_adapter = trained(path, tmp_path / "kept", keep_quantized=True, **settings)
    assert kept == expected
    assert_same(kept_adapter, adapter)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_computed_at_loading_and_take_the_bits_of_the_files(case: str, tmp_path: Path) -> None:
    path = release(case, tmp_path)
    kept, computed = load_model(path, torch.float32, keep_quantized=True), load_model(path, torch.float32)
    kept.requires_grad_(False)
    bits = 0.0
    for (name, ours), theirs in zip(kept.named_parameters(), computed.parameters(), strict=True):
        assert ours.shape == theirs.shape
        if not isinstance(ours, QuantizedWeight):
            assert torch.equal(ours, theirs), name
            continue
        assert torch.equal(ours.whole(), theirs), name
        bits = max(bits, 8 * held_bytes([ours]) / ours.numel())
    assert 4 < bits < 9, "4 or 8 bits for a number, and some for factors"
    experts = [each for name, each in kept.named_parameters() if ".experts." in name and each.ndim == 3]
    assert all(isinstance(each, QuantizedWeight) for each in experts), "the experts of all cases are quantized"


def test_nothing_of_the_size_of_a_weight_is_kept_for_the_backward(tmp_path: Path) -> None:
    """Beside quantized weights, only activations: all have the micro-batch's 40 rows."""
    path = release("dense-int4", tmp_path)
    settings = {"trainer.keep_quantized": True, "trainer.gradient_checkpointing": False}
    backend: Any = create_backend(load_config({"base_model": path, "backend_config": settings}))
    backend.create_model("m", spec(4, 1))
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        ok(backend.run([train("m", sft(0, 40))]))
    smallest = min(
        each.numel() for each in rank_of(backend).base.packed.parameters() if isinstance(each, QuantizedWeight)
    )
    quantized = [each for each in kept if isinstance(each, QuantizedWeight)]
    assert len(quantized) >= 14, "seven projections of two layers"
    large = [each.shape for each in kept if not isinstance(each, QuantizedWeight) and each.numel() >= smallest]
    heads = rank_of(backend).base.packed.lm_head.base.weight.shape
    assert all(shape == heads or 40 in shape for shape in large), large


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_numbers_of_one_weight_live_at_a_time(
    tmp_path: Path, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = release("mixture-fp8", tmp_path)
    settings = {"trainer.keep_quantized": True, "trainer.gradient_checkpointing": recomputed}
    backend: Any = create_backend(load_config({"base_model": path, "backend_config": settings}))
    backend.create_model("m", spec(4, 1))
    whole, living, most, computed = QuantizedWeight.whole, [], 0, 0

    def noted(weight: QuantizedWeight) -> Tensor:
        nonlocal most, computed
        made = whole(weight)
        living[:] = [each for each in living if each() is not None] + [weakref.ref(made)]
        most, computed = max(most, len(living)), computed + 1
        return made

    monkeypatch.setattr(QuantizedWeight, "whole", noted)
    ok(backend.run([train("m", sft(0, 40))]))
    assert most == 1
    quantized = sum(isinstance(each, QuantizedWeight) for each in rank_of(backend).base.packed.parameters())
    assert computed >= (3 if recomputed else 2) * quantized - 3, "the first layer's inputs need no gradient"


def test_a_quantized_weight_is_never_changed(tmp_path: Path) -> None:
    model = load_model(release("dense-int4", tmp_path), torch.float32, keep_quantized=True)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert isinstance(weight, QuantizedWeight)
    for change in (lambda: weight.data.zero_(), lambda: weight.data.add_(1.0), lambda: weight.data.copy_(weight)):
        with pytest.raises(RuntimeError, match="would change a quantized weight"):
            change()
    assert torch.equal(weight.t().contiguous(), weight.whole().t())
    assert torch.equal(weight[3:5] + 1, weight.whole()[3:5] + 1), "other operations get its numbers"
    assert weight.to(torch.bfloat16).dtype == torch.bfloat16
    moved = weight.to("meta")
    assert isinstance(moved, QuantizedWeight)
    assert moved.pieces[0].numbers.device.type == "meta"


def test_a_model_that_is_not_quantized_is_refused_by_the_keys_name() -> None:
    with pytest.raises(ConfigError, match=r"^trainer.keep_quantized: .* is not quantized: .* skyrl quantize"):
        make_backend(keep_quantized=True)
