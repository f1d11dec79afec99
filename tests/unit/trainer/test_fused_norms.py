"""RMS norms as torch's one operation: on a CPU in float32 the same bits, and only for norms of the plain formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl.base.tiny import model_path
from skyrl.trainer.model.base_model import fuse_norms
from skyrl.trainer.model.loading import load_model
from tests.families import make_family

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


@pytest.mark.parametrize(("family", "all_of_them"), [("qwen3.5", False), ("deepseek-v3", True)])
def test_only_norms_of_the_plain_formula_are_fused(family: str, all_of_them: bool, tmp_path: Path) -> None:
    """Qwen3.5's norms add 1 to their weight, or have a gate."""
    model = load_model(make_family(family, tmp_path), torch.float32)
    norms = sum("RMSNorm" in type(module).__name__ for module in model.modules())
    with torch.no_grad():
        before = model(TOKENS, use_cache=False).logits
        assert fuse_norms(model) == (norms if all_of_them else 0)
        assert norms > 3
        torch.testing.assert_close(model(TOKENS, use_cache=False).logits, before, rtol=1e-5, atol=1e-6)
