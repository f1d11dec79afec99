"""Layers that vLLM keeps in another form than it loads them take new weights: with vLLM's own kernels and packing, in
a model of one layer.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from skyrl.inference.vllm_plugin.weights.forms import forms_of, keep_projections, number_of, plain, plain_expert, ready
from skyrl.inference.vllm_plugin.weights.jobs import WeightsError

EXPERTS, HIDDEN, SIZE = 3, 64, 32
NAME = "model.layers.5.mlp.experts"


def config(size: int) -> Any:
    return SimpleNamespace(intermediate_size_per_partition=size, activation=MoEActivation.SILU, is_act_and_mul=True)


class RoutedExperts(torch.nn.Module):
    """vLLM's layer as far as its kernel and an update look at it; the kernel is vLLM's own."""

    def __init__(self, dtype: torch.dtype, size: int = SIZE, *, backend: str = "CPU", biases: bool = False) -> None:
        super().__init__()
        self.moe_config = config(size)
        self.w13_weight = torch.nn.Parameter(torch.randn(EXPERTS, 2 * size, HIDDEN).to(dtype), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, size).to(dtype), requires_grad=False)
        if biases:
            self.w13_bias = torch.nn.Parameter(torch.zeros(EXPERTS, 2 * size), requires_grad=False)
        kernel = CPUUnquantizedExperts.__new__(CPUUnquantizedExperts)
        kernel.moe_config = self.moe_config
        kernel._use_zentorch = False
        self.quant_method = SimpleNamespace(
            unquantized_backend=SimpleNamespace(name=backend), moe_kernel=SimpleNamespace(fused_experts=kernel)
        )


def loaded(layer: torch.nn.Module, name: str = NAME) -> torch.nn.Module:
    """A model with this layer, as it is before its weights are changed for kernels."""
    model = torch.nn.Module()
    owner, *_, last = name.split(".")
    inner = model
    for part in name.split(".")[:-1]:
        child = torch.nn.Module()
        inner.add_module(part, child)
        inner = child
    assert owner == "model"
    inner.add_module(last, layer)
    record_metadata_for_reloading(model)
    return model


def packed(layer: RoutedExperts) -> None:
    layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def weights(layer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in layer.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 24])  # the second one is padded
def test_all_experts_are_replaced_in_place(dtype: torch.dtype, size: int) -> None:
    layer, wanted = RoutedExperts(dtype, size), RoutedExperts(dtype, size)
    model, new = loaded(layer), weights(wanted)
    packed(layer)
    packed(wanted)
    addresses = [parameter.data_ptr() for parameter in layer.parameters()]
    forms = forms_of(model)
    with ready(forms), plain(forms, keep=False):
        for name, parameter in layer.named_parameters():
            assert parameter.isnan().all()
            parameter.data.copy_(new[name])
    assert same(weights(layer), weights(wanted))
    assert [parameter.data_ptr() for parameter in layer.parameters()] == addresses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 24])
def test_one_expert_is_replaced(dtype: torch.dtype, size: int) -> None:
    layer = RoutedExperts(dtype, size)
    model, before = loaded(layer), weights(layer)
    packed(layer)
    forms = forms_of(model)
    [form] = forms
    with ready(forms), plain(forms, keep=True):
        assert same(weights(layer), before), "the plain tensors are those of the checkpoint"
        layer.w2_weight.data[1] = 7
    prefix = f"{NAME}.1"
    assert (form.read(f"{prefix}.down_proj.weight") == 7).all()
    gate, up = before["w13_weight"][1].chunk(2)
    for names, matrix in ((("gate_proj", "w1"), gate), (("up_proj", "w3"), up)):
        for name in names:
            found = form.read(f"{prefix}.{name}.weight")
            assert found is not None
            assert torch.equal(found, matrix)
    assert form.read("model.layers.5.input_layernorm.weight") is None


def test_nothing_is_loaded_into_the_kernels_order() -> None:
    """It has the shape of the plain tensors, so a loader would mix up elements and say nothing."""
    layer = RoutedExperts(torch.float32)
    model, new = loaded(layer), weights(RoutedExperts(torch.float32))
    packed(layer)
    before, forms = weights(layer), forms_of(model)
    assert before["w13_weight"].shape == new["w13_weight"].shape
    with pytest.raises(RuntimeError, match="size"), ready(forms):
        layer.w13_weight.data.copy_(new["w13_weight"])
    with pytest.raises(RuntimeError, match="size"), ready(forms), plain(forms, keep=False):
        layer.w13_weight.data.copy_(new["w2_weight"])
    assert same(weights(layer), before)


class Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 1, 4).bfloat16(), requires_grad=False)

    def pack(self) -> None:
        """As vLLM does it after loading (`dispatch_cpu_unquantized_gemm`)."""
        self._cpu_unpacked_conv_weight = self.weight.view(64, 4).contiguous().clone()
        self.weight.data = ops.causal_conv1d_weight_pack(self._cpu_unpacked_conv_weight)


@pytest.mark.skipif(
    not hasattr(torch.ops._C, "causal_conv1d_weight_pack"), reason="vLLM packs convolutions only with AVX-512"
)
def test_a_packed_convolution_is_replaced_with_its_plain_copy() -> None:
    layer, wanted = Convolution(), Convolution()
    new, plain_new = wanted.weight.detach().clone(), wanted.weight.view(64, 4).clone()
    layer.pack()
    wanted.pack()
    [form] = forms = forms_of(loaded(layer, "model.layers.0.conv1d"))
    for keep in (False, True):
        with ready(forms), plain(forms, keep=keep):
            layer.weight.data[:32].copy_(new[:32])
            if not keep:
                assert layer.weight[32:].isnan().all()
                layer.weight.data[32:].copy_(new[32:])
        assert torch.equal(layer.weight, wanted.weight)
        assert torch.equal(layer._cpu_unpacked_conv_weight, plain_new)
    with pytest.raises(RuntimeError, match="size"), ready(forms):
        layer.weight.data.copy_(new)
    found = form.read("model.layers.0.conv1d.weight")
    assert found is not None
    assert torch.equal(found, new)


class MLAAttention(torch.nn.Module):
    """Latent attention makes two tensors of `kv_b_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(4, 6, dtype=torch.bfloat16)
        self.made: list[tuple[torch.Tensor, torch.dtype]] = []

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.made.append((self.kv_b_proj.weight.detach().clone(), dtype))


def test_what_latent_attention_makes_of_its_projection_is_made_anew() -> None:
    layer = MLAAttention()
    forms = forms_of(loaded(layer, "model.layers.0.attn"))
    with ready(forms), plain(forms, keep=False):
        layer.kv_b_proj.weight.data.fill_(3)
    [(made, dtype)] = layer.made
    assert (made == 3).all()
    assert dtype == torch.bfloat16


def test_latent_attention_keeps_what_it_packs_for_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = mla_attention.MLAAttention
    monkeypatch.setattr(kind, "process_weights_after_loading", kind.process_weights_after_loading)
    layer: Any = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    packing: Any = SimpleNamespace(process_weights_after_loading=lambda dtype: None)
    layer.impl, layer.is_amx_bmm_enabled, layer.kv_b_proj = packing, True, torch.nn.Linear(4, 6)
    weight = layer.kv_b_proj.weight
    keep_projections()
    for _ in range(2):
        layer.process_weights_after_loading(torch.float32)
        assert layer.kv_b_proj.weight is weight


def test_experts_with_plain_weights_have_no_form_and_are_read() -> None:
    layer = RoutedExperts(torch.float32, backend="TRITON")
    model = loaded(layer)
    assert forms_of(model) == []
    gate, up = layer.w13_weight.data[2].chunk(2)
    for name, matrix in (("w1", gate), ("up_proj", up), ("down_proj", layer.w2_weight.data[2])):
        found = plain_expert(model, f"{NAME}.2.{name}.weight")
        assert found is not None
        assert torch.equal(found, matrix)
    layer.moe_config.is_act_and_mul = False
    found = plain_expert(model, f"{NAME}.2.up_proj.weight")
    assert found is not None
    assert torch.equal(found, layer.w13_weight.data[2])
    for name in (f"{NAME}.gate.weight", "model.layers.4.mlp.experts.2.w1.weight"):
        assert plain_expert(model, name) is None
    layer.expert_map = torch.arange(3)
    assert plain_expert(model, f"{NAME}.2.up_proj.weight") is None
    layer.quant_method = SimpleNamespace(old_quant_method=layer.quant_method)
    assert forms_of(loaded(layer)) == [], "with adapters on experts"


class KeepsMore(torch.nn.Module):
    def process_weights_after_loading(self) -> None:
        """Whatever it makes, an update would not make it anew."""


def test_forms_that_are_not_known_are_refused_by_name() -> None:
    padded = RoutedExperts(torch.float32, 24, biases=True)
    model = loaded(padded)
    packed(padded)
    refused = [
        (loaded(RoutedExperts(torch.float32, backend="FLASHINFER_CUTLASS")), rf"{NAME} .*CUTLASS.*moe-backend triton"),
        (model, "biases of "),
        (KeepsMore(), "KeepsMore makes tensors of its own"),
    ]
    for one, message in refused:
        with pytest.raises(WeightsError, match=message) as raised:
            forms_of(one)
        assert raised.value.status == 501


def test_an_order_that_cannot_be_undone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = RoutedExperts(torch.float32)
    model = loaded(layer)
    packed(layer)
    layer.quant_method.moe_kernel.fused_experts.isa = "other"
    monkeypatch.setattr(ops, "cpu_prepack_moe_weight", lambda weight, isa: weight.flip(1))  # not within blocks
    with pytest.raises(WeightsError, match="an order that is not known"):
        forms_of(model)


def test_the_number_of_a_layer() -> None:
    assert number_of("model.layers.12.mlp.experts.3.up_proj.weight") == 12
    assert number_of("language_model.model.layers.0.mlp.experts") == 0
    assert number_of("lm_head.weight") is None
