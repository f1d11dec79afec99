"""Plain decoder layers in two pieces against transformers' layers: which layers are plain, results, gradients, what is
kept; and the operations between the products against autograd of their formulas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from between_cases import cases
from torch import Tensor
from torch_lora_support import make_backend, ok, sft, spec, train

from benchmarks.cuda_norms import norms_as_on_cuda
from skyrl.base.config.pass_memory import Widths
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.kernels import between
from skyrl.trainer.kernels.between import IN_TORCH, Between
from skyrl.trainer.kernels.fused_norms import WITH_FUSED_NORMS
from skyrl.trainer.model import layer_functions, layer_pieces
from skyrl.trainer.model.loading import detach_vision, load_model
from skyrl.trainer.model.packed_model import PackedModel
from tests.families import make_family
from tests.local_ranks import rank_of


@pytest.fixture(params=["in torch", "in small blocks", "with fused norms"])
def functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Between]:
    if request.param == "with fused norms":
        with norms_as_on_cuda():
            yield WITH_FUSED_NORMS
        return
    if request.param == "in small blocks":
        monkeypatch.setattr(between, "BLOCK", 64)
    yield IN_TORCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "apart"), [(24, False), (128, True)])
def test_functions_give_what_their_formulas_give(functions: Between, dtype: torch.dtype, n: int, apart: bool) -> None:
    tolerance = 1e-6 if dtype == torch.float32 else 6e-3
    for case in cases(37, n, dtype, apart=apart):
        for found, exact in zip(case.results(functions), case.exact, strict=True):
            assert (found is None) == (exact is None)
            if found is not None and exact is not None:
                error = (found.double().reshape(exact.shape) - exact).norm() / exact.norm()
                assert float(error) < tolerance, case.function


def test_a_norm_is_computed_again_with_the_same_bits(functions: Between) -> None:
    x, weight = torch.randn(37, 96), torch.randn(96)
    y, rstd = functions.rms_norm(x, weight, 1e-6)
    assert torch.equal(functions.normed(x, weight, rstd, 1e-6), y)


PLAIN = {
    **dict.fromkeys(("qwen2", "qwen2.5", "qwen3", "llama-3", "mistral", "qwen3-vl"), 2),
    **{"smollm3": 1, "glm-4.5": 1, "qwen3-moe": 1},  # of two layers; the other has no rotary embedding, or experts
    **dict.fromkeys(("gemma", "gemma-2", "phi", "phi-3", "olmo", "olmo-2", "granite", "command-r", "hunyuan"), 0),
    **dict.fromkeys(("ministral-3", "gpt-oss", "qwen3.5"), 0),
}


@pytest.mark.parametrize("family", PLAIN)
def test_only_layers_of_the_plain_formula_compute_in_pieces(family: str, tmp_path: Path) -> None:
    """The estimate of memory before a start knows which."""
    model = load_model(make_family(family, tmp_path), torch.float32)
    detach_vision(model)
    assert layer_pieces.install(PackedModel(model).decoder_layers, IN_TORCH) == PLAIN[family]
    widths = Widths.of(model.config.get_text_config().to_dict())
    assert widths is None or widths.in_pieces == (PLAIN[family] > 0)


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


def _trained(
    which: str, *, pieces: bool, merge: bool = False, path: str | None = None
) -> tuple[dict[str, Tensor], list[Any], float]:
    """The gradients of two adapters, the results, and the bytes that a row keeps."""
    with pytest.MonkeyPatch.context() as patch:
        if not pieces:
            patch.setattr(layer_pieces, "install", lambda layers, between: 0)
        backend = make_backend(merge=merge, path=path)
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


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in found.items():
        other = expected[name]
        assert float(gradient.norm()) > 0
        assert float((gradient - other).norm() / other.norm()) < 2e-5


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each forward of a piece before the attention. Of those that try whether a layer is plain: 5."""
    found, before = list[int](), layer_functions.before
    monkeypatch.setattr(layer_functions, "before", lambda *given: found.append(len(given[4][0])) or before(*given))
    return found


@pytest.mark.parametrize("which", SPECS)
@pytest.mark.parametrize("merge", [False, True])
def test_gradients_and_logprobs_are_those_of_transformers_layers(which: str, merge: bool) -> None:
    found, results, of_row = _trained(which, pieces=True, merge=merge)
    expected, others, of_other = _trained(which, pieces=False, merge=merge)
    _compare(found, expected)
    for one, other in zip(results, others, strict=True):
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(theirs), rtol=0, atol=2e-5)
    assert of_row < of_other, "pieces keep less"


@pytest.mark.parametrize(
    ("family", "changed", "in_pieces"),
    [
        ("llama-3", {"attention_bias": True, "mlp_bias": True}, True),
        ("mistral", {}, True),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, True),
        ("glm-4.5", {}, False),
    ],
    ids=["biases of all layers", "windows", "a window in one layer", "half of each head turns"],
)
def test_gradients_of_other_configurations(
    family: str, changed: dict[str, Any], in_pieces: bool, tmp_path: Path, calls: list[int]
) -> None:
    path = make_family(family, tmp_path, **changed)
    found, *_ = _trained("all", pieces=True, path=path)
    assert (max(calls) > 5) == in_pieces
    expected, *_ = _trained("all", pieces=False, path=path)
    _compare(found, expected)


def test_a_layer_that_returns_more_than_its_rows_is_not_plain(tmp_path: Path) -> None:
    model = load_model(make_family("llama-3", tmp_path), torch.float32)
    kind: Any = type(model.model.layers[0])

    class More(kind):
        __module__ = kind.__module__

        def forward(self, hidden_states: Tensor, **options: Any) -> Any:
            return (super().forward(hidden_states, **options),)

    model.model.layers[0].__class__ = More
    packed = PackedModel(model)
    assert layer_pieces.install(packed.decoder_layers, IN_TORCH) == len(packed.decoder_layers) - 1


def test_recomputed_pieces_give_the_same_bits(calls: list[int]) -> None:
    found = []
    for setting in (False, True):
        backend = make_backend(gradient_checkpointing=setting)
        layers = len(layer_pieces.plain_layers(rank_of(backend).base.packed.decoder_layers))
        calls.clear()
        backend.create_model("m", spec(8))
        ok(backend.run([train("m", sft(0, 64, 30))]))
        assert len(calls) == layers * (1 + setting) > 0
        found.append(rank_of(backend).adapters["m"].gradient)
    assert torch.equal(*found)
