"""Plain decoder layers in two pieces against transformers' layers: which layers are plain, results, gradients, what is
kept; and the operations between the products against autograd of their formulas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from torch_lora_support import make_backend, ok, sft, spec, train

from benchmarks.cuda_norms import norms_as_on_cuda
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.kernels import between
from skyrl.trainer.kernels.between import IN_TORCH, Between
from skyrl.trainer.kernels.fused_norms import WITH_FUSED_NORMS
from skyrl.trainer.model import layer_pieces, packed_model
from skyrl.trainer.model.loading import detach_vision, load_model
from skyrl.trainer.model.packed_model import PackedModel
from tests.families import make_family
from tests.local_ranks import rank_of

EPS = 1e-5
ROWS, HEADS = 37, 3


@pytest.fixture(params=["in torch", "in small blocks", "with fused norms"])
def functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Between]:
    if request.param == "with fused norms":
        with norms_as_on_cuda():
            yield WITH_FUSED_NORMS
        return
    if request.param == "in small blocks":
        monkeypatch.setattr(between, "BLOCK", 64)
    yield IN_TORCH


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [24, 128])
def test_norms_and_their_backward_are_those_of_the_formula(functions: Between, dtype: torch.dtype, size: int) -> None:
    x, residual, weight, gradient = (
        each.to(dtype)
        for each in (*(_drawn(ROWS, size, seed=n) for n in (0, 1)), _drawn(size, seed=2), _drawn(ROWS, size, seed=3))
    )
    total = (x.double() + residual.double()).to(dtype).double().requires_grad_()
    expected = _norm(total, weight.double())
    (of_total,) = torch.autograd.grad(expected, total, gradient.double())
    found, y, rstd = functions.add_rms_norm(x.clone(), residual, weight, EPS)
    _close(found, total.detach(), dtype)
    _close(y, expected.detach(), dtype)
    assert torch.equal(functions.normed(found, weight, rstd, EPS), y)
    assert torch.equal(functions.rms_norm(found, weight, EPS)[0], y)
    of_x = functions.rms_norm_backward(gradient.clone(), found, weight, rstd, residual)
    _close(of_x, of_total + residual.double(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_norm", [True, False])
def test_heads_turn_and_turn_back(functions: Between, dtype: torch.dtype, with_norm: bool) -> None:
    size = 16
    x, weight, gradient = _drawn(ROWS, HEADS, size, seed=0), _drawn(size, seed=1), _drawn(ROWS, HEADS, size, seed=2)
    angles = _drawn(ROWS, size // 2, seed=3).repeat(1, 2)
    x, weight, gradient, cos, sin = (each.to(dtype) for each in (x, weight, gradient, angles.cos(), angles.sin()))
    exact = x.double().requires_grad_()
    heads = _norm(exact, weight.double()) if with_norm else exact
    other = torch.cat([-heads[..., size // 2 :], heads[..., : size // 2]], dim=-1)
    expected = heads * cos.double()[:, None] + other * sin.double()[:, None]
    (of_x,) = torch.autograd.grad(expected, exact, gradient.double())
    given = weight if with_norm else None
    y, rstd = functions.rotated(x, given, EPS, cos, sin)
    _close(y, expected.detach(), dtype)
    apart = gradient.transpose(0, 1).contiguous().transpose(0, 1)
    found = functions.rotated_backward(apart, x, given, rstd, cos, sin)
    _close(found, of_x, dtype)
    assert torch.equal(apart, gradient), "the gradient of the attention stays as it is"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_product_and_its_backward_are_those_of_the_formula(functions: Between, dtype: torch.dtype) -> None:
    gate, up, gradient = (_drawn(ROWS, 40, seed=n).mul(4 if n == 0 else 1).to(dtype) for n in range(3))
    leaves = gate.double().requires_grad_(), up.double().requires_grad_()
    expected = silu(leaves[0]) * leaves[1]
    of_gate, of_up = torch.autograd.grad(expected, leaves, gradient.double())
    _close(functions.swiglu(gate, up), expected.detach(), dtype)
    for found, exact in zip(
        functions.swiglu_backward(gradient.clone(), gate, up), (of_gate, of_up, expected), strict=True
    ):
        _close(found, exact.detach(), dtype)


def test_large_gates_give_finite_gradients(functions: Between) -> None:
    gate = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0]])
    found = functions.swiglu_backward(torch.ones(1, 5), gate, torch.ones(1, 5))
    assert all(bool(each.isfinite().all()) for each in found)


PLAIN = {
    **dict.fromkeys(("qwen2", "qwen2.5", "qwen3", "llama-3", "mistral", "qwen3-vl"), 2),
    **{"smollm3": 1, "glm-4.5": 1, "qwen3-moe": 1},  # of two layers; the other has no rotary embedding, or experts
    **dict.fromkeys(("gemma", "gemma-2", "phi", "phi-3", "olmo", "olmo-2", "granite", "command-r", "hunyuan"), 0),
    **dict.fromkeys(("ministral-3", "gpt-oss", "qwen3.5"), 0),
}


@pytest.mark.parametrize("family", PLAIN)
def test_only_layers_of_the_plain_formula_compute_in_pieces(family: str, tmp_path: Path) -> None:
    model = load_model(make_family(family, tmp_path), torch.float32)
    detach_vision(model)
    assert layer_pieces.install(PackedModel(model).decoder_layers, IN_TORCH) == PLAIN[family]


def test_a_layer_that_scales_what_it_adds_is_not_plain(tmp_path: Path) -> None:
    model = load_model(make_family("llama-3", tmp_path), torch.float32)
    kind: Any = type(model.model.layers[0])

    class Halved(kind):
        __module__ = kind.__module__

        def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
            return super().forward(hidden_states, **options) / 2

    model.model.layers[0].__class__ = Halved
    packed = PackedModel(model)
    assert layer_pieces.install(packed.decoder_layers, IN_TORCH) == len(packed.decoder_layers) - 1


SPECS = {
    "all": spec(8),
    "attention": LoraSpec(8, 16.0, 1, train_mlp=False, train_unembed=False),
    "mlp": LoraSpec(4, 16.0, 1, train_attn=False, train_unembed=False),
    "ranks": LoraSpec(8, 16.0, 1, rank_pattern=(("self_attn.k_proj", 3), ("mlp.*", 5))),
}


def _trained(which: str, *, pieces: bool, merge: bool = False) -> tuple[dict[str, Tensor], list[Any], float]:
    """The gradients of two adapters, the results, and the bytes that a row keeps."""
    with pytest.MonkeyPatch.context() as patch:
        if not pieces:
            patch.setattr(layer_pieces, "install", lambda layers, between: 0)
        backend = make_backend(merge=merge)
        backend.create_model("m", SPECS[which])
        backend.create_model("n", spec(4))
        for name in ("m", "n"):
            weights = rank_of(backend).adapters[name].weights
            weights.add_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(7)), alpha=0.05)
        results = ok(backend.run([train("m", sft(0, 64, 30, 41)), train("n", sft(1, 20, 64))]))
        rank = rank_of(backend)
        recomputation = rank.base.packed.recomputation
        assert recomputation is not None
        gradients = {name: rank.adapters[name].gradient for name in ("m", "n")}
        return gradients, results, recomputation.bytes_of_row  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("which", SPECS)
@pytest.mark.parametrize("merge", [False, True])
def test_gradients_and_logprobs_are_those_of_transformers_layers(which: str, merge: bool) -> None:
    found, results, of_row = _trained(which, pieces=True, merge=merge)
    expected, others, of_other = _trained(which, pieces=False, merge=merge)
    for name, gradient in found.items():
        other = expected[name]
        assert float(gradient.norm()) > 0
        assert float((gradient - other).norm() / other.norm()) < 2e-5
    for one, other in zip(results, others, strict=True):
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(theirs), rtol=0, atol=2e-5)
    assert of_row < of_other, "pieces keep less"


def test_recomputed_pieces_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for setting in (False, True):
        backend = make_backend(gradient_checkpointing=setting)
        backend.create_model("m", spec(8))
        ok(backend.run([train("m", sft(0, 64, 30))]))
        found.append(rank_of(backend).adapters["m"].gradient)
    assert torch.equal(*found)
    assert packed_model.layer_pieces is layer_pieces
