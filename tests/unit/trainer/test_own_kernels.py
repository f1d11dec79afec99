"""RMS norms as torch's one operation and gated MLPs that keep less give the bits of transformers' layers, where the
formula is the plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_lora_support import make_backend, ok, sft, spec, train
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from skyrl.base.tiny import model_path
from skyrl.trainer.lora.linear import _is_plain
from skyrl.trainer.model import layer_pieces, packed_model
from skyrl.trainer.model.base_model import fuse_norms
from skyrl.trainer.model.loading import load_model
from tests.families import make_family
from tests.local_ranks import rank_of

TOKENS = torch.arange(3, 40)[None]


def test_fused_norms_give_the_same_bits_forward_and_backward() -> None:
    found: list[list[torch.Tensor]] = []
    for fused in (False, True):
        model = load_model(str(model_path()), torch.float32)
        layers = model.config.num_hidden_layers
        assert not fused or fuse_norms(model) == 4 * layers + 1
        logits = model(TOKENS).logits
        weight = model.get_decoder().layers[0].self_attn.q_proj.weight
        found.append([logits, *torch.autograd.grad(logits.square().sum(), [weight])])
    for plain, fused in zip(*found, strict=True):
        assert torch.equal(plain, fused)


@pytest.mark.parametrize(
    ("family", "plain"),
    [
        ("qwen3.5", ()),
        ("deepseek-v3", ("DeepseekV3RMSNorm",)),
        ("nemotron-h", ("NemotronHRMSNorm",)),
        ("kimi-linear", ("KimiLinearRMSNorm",)),
    ],
)
def test_only_norms_of_the_plain_formula_are_fused(family: str, plain: tuple[str, ...], tmp_path: Path) -> None:
    """Qwen3.5's norms add 1 to their weight, or have a gate. Nemotron-H's and Kimi-Linear's with a gate raise other
    errors than TypeError without it."""
    model = load_model(make_family(family, tmp_path), torch.float32)
    norms = [name for module in model.modules() if "RMSNorm" in (name := type(module).__name__)]
    with torch.no_grad():
        before = model(TOKENS, use_cache=False).logits
        assert fuse_norms(model) == sum(name in plain for name in norms)
        assert len(norms) > 3
        torch.testing.assert_close(model(TOKENS, use_cache=False).logits, before, rtol=1e-5, atol=1e-6)


BETWEEN, LAYERS, FLOAT = 80, 2, 4
"""Of the model of `make_backend`."""


def _results(monkeypatch: pytest.MonkeyPatch, *, kept: bool) -> tuple[torch.Tensor, Any, float]:
    """With transformers' decoder layers."""
    monkeypatch.setattr(layer_pieces, "install", lambda layers, between: 0)
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
