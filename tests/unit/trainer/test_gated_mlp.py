"""Gated MLPs keep half of their wide tensors for the backward, and give the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch_lora_support import make_backend, ok, sft, spec, train
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from skyrl.trainer.lora.linear import _is_plain
from skyrl.trainer.model import packed_model
from tests.local_ranks import rank_of

BETWEEN, LAYERS, FLOAT = 80, 2, 4
"""Of the model of `make_backend`."""


def _results(monkeypatch: pytest.MonkeyPatch, *, kept: bool) -> tuple[torch.Tensor, Any, float]:
    if kept:
        monkeypatch.setattr(packed_model, "keep_less", lambda model: 0)
    backend = make_backend()
    backend.create_model("m", spec(8))
    result = ok(backend.run([train("m", sft(0, 64, 64))]))
    gradient = rank_of(backend).adapters["m"].gradient
    assert gradient is not None
    assert gradient.abs().sum() > 0
    recomputation = rank_of(backend).base.packed.recomputation
    assert recomputation is not None
    return gradient, result[0].metrics, recomputation.bytes_of_row


def test_a_layer_keeps_two_wide_tensors_less_and_its_gradient_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradient, metrics, of_row = _results(monkeypatch, kept=False)
    other, of_other, kept = _results(monkeypatch, kept=True)
    assert torch.equal(gradient, other)
    assert metrics == of_other
    assert kept - of_row == pytest.approx(LAYERS * 2 * BETWEEN * FLOAT)


def test_an_mlp_of_another_formula_stays_as_it_is() -> None:
    assert _is_plain(Gemma3MLP, nn.GELU("tanh"))
    assert _is_plain(Qwen2MLP, nn.SiLU())
    assert not _is_plain(Phi3MLP, nn.SiLU())

    class Halved(Gemma3MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 2

    assert not _is_plain(Halved, nn.SiLU())
