"""The plugin's kernel for experts with adapters, against one row and one expert at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, relu, silu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    from vllm.model_executor.layers.activation import SwigluOAIAndMul
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

    from skyrl.inference.vllm_plugin.experts_cpu import AdaptedExperts, BaseExperts, add_experts, check_kernel

EXPERTS, PER_ROW, HIDDEN, SIZE, SLOTS, RANK = 5, 2, 12, 6, 3, 4
SLOTS_OF_ROWS = [0, 0, -1, 2, 2, -1, 0, 1]


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _adapters(pairs: int = 2, parts: int = 1) -> Any:
    """With `pairs` of matrices for the first product, each for so many parts of it."""
    shapes = {
        "w13_lora_a_stacked": ((RANK, HIDDEN),) * pairs,
        "w13_lora_b_stacked": ((parts * SIZE, RANK),) * pairs,
        "w2_lora_a_stacked": ((RANK, SIZE),),
        "w2_lora_b_stacked": ((HIDDEN, RANK),),
    }
    seeds = iter(range(100))
    stacked = {
        name: tuple(_random(SLOTS, EXPERTS, *shape, seed=next(seeds)) for shape in each)
        for name, each in shapes.items()
    }
    return SimpleNamespace(**stacked)


def _swiglu_oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As vLLM has it, with the constants of gpt-oss."""
    constants: Any = SimpleNamespace(alpha=1.702, limit=7.0)
    return SwigluOAIAndMul.forward_native(constants, torch.stack([gate, up], dim=-1).flatten(-2))


class Batch:
    """Rows, their experts, and the base model's weights."""

    def __init__(self, activation: MoEActivation = MoEActivation.SILU) -> None:
        rows, first = len(SLOTS_OF_ROWS), 2 if activation.is_gated else 1
        self.activation, self.first = activation, first
        has_bias = activation == MoEActivation.SWIGLUOAI
        self.x = 3 * _random(rows, HIDDEN, seed=200)
        self.w13, self.w2 = _random(EXPERTS, first * SIZE, HIDDEN, seed=201), _random(EXPERTS, HIDDEN, SIZE, seed=202)
        self.bias13 = _random(EXPERTS, first * SIZE, seed=204) if has_bias else None
        self.bias2 = _random(EXPERTS, HIDDEN, seed=205) if has_bias else None
        self.weights = _random(rows, PER_ROW, seed=203).softmax(-1)
        self.chosen = torch.stack([torch.randperm(EXPERTS - 1)[:PER_ROW] for _ in range(rows)])  # the last has no row

    def computed(self, slots: list[int], context: Any) -> torch.Tensor:
        output = torch.zeros_like(self.x)
        base = BaseExperts(self.w13, self.w2, self.activation, self.bias13, self.bias2)
        add_experts(output, self.x, base, self.weights, self.chosen, slots, context)
        return output

    def expected(self, slots: list[int], context: Any) -> torch.Tensor:
        output = torch.zeros_like(self.x)
        for row, slot in enumerate(slots):
            for rank, expert in enumerate(self.chosen[row].tolist()):
                output[row] += self.weights[row, rank] * self._of_expert(self.x[row], expert, slot, context)
        return output

    def _of_expert(self, x: torch.Tensor, expert: int, slot: int, context: Any) -> torch.Tensor:
        first, w2 = self._first(self.w13[expert]), self.w2[expert]
        if slot >= 0:
            pairs = zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True)
            updates = [b[slot, expert] @ a[slot, expert] for a, b in pairs]
            if len(updates) < len(first):
                updates = self._first(updates[0])
            first = [w + update for w, update in zip(first, updates, strict=True)]
            w2 = w2 + context.w2_lora_b_stacked[0][slot, expert] @ context.w2_lora_a_stacked[0][slot, expert]
        projected = [w @ x for w in first]
        if self.bias13 is not None:
            projected = [y + bias for y, bias in zip(projected, self._first(self.bias13[expert]), strict=True)]
        made = w2 @ FUNCTIONS[self.activation](*projected)
        return made if self.bias2 is None else made + self.bias2[expert]

    def _first(self, fused: torch.Tensor) -> list[torch.Tensor]:
        if self.activation == MoEActivation.SWIGLUOAI:
            return [fused[::2], fused[1::2]]
        return list(fused.chunk(self.first))


FUNCTIONS: dict[MoEActivation, Callable[..., torch.Tensor]] = {
    MoEActivation.SILU: lambda gate, up: silu(gate) * up,
    MoEActivation.SWIGLUOAI: _swiglu_oai,
    MoEActivation.RELU2_NO_MUL: lambda up: relu(up) ** 2,
    MoEActivation.GELU_TANH: lambda gate, up: gelu(gate, approximate="tanh") * up,
}


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("fused", [False, True])
def test_each_row_gets_the_update_of_its_adapter_and_expert(activation: MoEActivation, fused: bool) -> None:
    batch = Batch(activation)
    context = _adapters(1, batch.first) if fused else _adapters(batch.first)
    torch.testing.assert_close(
        batch.computed(SLOTS_OF_ROWS, context), batch.expected(SLOTS_OF_ROWS, context), atol=1e-10, rtol=1e-10
    )


@pytest.mark.parametrize("has_slots", [False, True])
def test_rows_without_an_adapter_get_the_base_models_experts(has_slots: bool) -> None:
    batch = Batch()
    none = [-1] * len(SLOTS_OF_ROWS)
    found = batch.computed(none, _adapters() if has_slots else None)
    torch.testing.assert_close(found, batch.expected(none, None), atol=1e-10, rtol=1e-10)


def test_a_map_of_adapters_for_another_number_of_rows_is_an_error() -> None:
    batch, context = Batch(), _adapters()
    context.punica_wrapper = SimpleNamespace(token_lora_indices=torch.tensor([0, 1]))
    kernel = AdaptedExperts.__new__(AdaptedExperts)
    kernel.quant_config = FUSED_MOE_UNQUANTIZED_CONFIG
    kernel.set_lora_context(context)
    with pytest.raises(RuntimeError, match="experts of 8 rows, but the batch has adapters for 2"):
        kernel.apply(
            torch.zeros_like(batch.x),
            batch.x,
            batch.w13,
            batch.w2,
            batch.weights,
            batch.chosen,
            MoEActivation.SILU,
            EXPERTS,
            None,
            None,
            None,
            batch.x,
            batch.x,
            None,
            False,
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"activation": MoEActivation.GELU}, "silu, swigluoai, relu2_no_mul"),
        ({"use_ep": True}, "expert parallelism"),
    ],
)
def test_experts_that_the_kernel_cannot_compute_are_refused(given: dict[str, Any], words: str) -> None:
    settings = {"activation": MoEActivation.SILU, "use_ep": False}
    check_kernel(SimpleNamespace(**settings))
    with pytest.raises(ValueError, match=words):
        check_kernel(SimpleNamespace(**settings | given))
