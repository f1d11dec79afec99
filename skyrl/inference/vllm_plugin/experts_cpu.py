"""Mixtures of experts with adapters for vLLM 0.32 on a CPU, whether the adapters change experts or not.

Knows how vLLM chooses the kernel of experts, its interface of kernels, and how it keeps adapters in slots. Knows
nothing of routers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import gelu, linear, relu, silu
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

EXPERTS = "experts"


def choose_cpu_kernels() -> None:
    """Choose a kernel that a CPU has for the experts of a mixture with adapters.

    With LoRA enabled vLLM computes experts with Triton's kernels, which can add adapters to experts. A CPU has no
    Triton, so the first request ends the engine. Here the kernel is `AdaptedExperts`, if `lora_target_modules` names
    experts; else the CPU's own, as without LoRA. Experts without a gate always get `AdaptedExperts`: the CPU has no
    kernel for them.
    """
    method: Any = unquantized_fused_moe_method
    initialize, select = FusedMoEConfig.__post_init__, method.select_unquantized_moe_backend

    def patched_initialize(config: FusedMoEConfig) -> None:
        config.is_lora_enabled = config.is_lora_enabled and _adapters_change_experts()
        activation = config.activation
        if not activation.is_gated:
            config.activation = MoEActivation.SILU  # otherwise vLLM refuses the model
        initialize(config)
        config.activation = activation

    def patched_select(moe_config: FusedMoEConfig) -> Any:
        if not moe_config.is_lora_enabled and moe_config.is_act_and_mul:
            return select(moe_config)
        check_kernel(moe_config)
        return UnquantizedMoeBackend.CPU, AdaptedExperts

    FusedMoEConfig.__post_init__ = patched_initialize  # type: ignore[method-assign]
    method.select_unquantized_moe_backend = patched_select


def check_kernel(moe_config: Any) -> None:
    """Raise ValueError for experts that the kernel for adapters cannot compute."""
    if moe_config.activation not in ACTIVATIONS:
        known = ", ".join(activation.value for activation in ACTIVATIONS)
        raise ValueError(
            f"on a CPU adapters change experts with one of the activations {known}, not {moe_config.activation}"
        )
    if moe_config.use_ep:
        raise ValueError("on a CPU adapters do not change experts with expert parallelism (enable_expert_parallel)")


def _adapters_change_experts() -> bool:
    """vLLM takes all layers if no target is named."""
    lora = get_current_vllm_config().lora_config
    return lora is not None and (lora.target_modules is None or EXPERTS in lora.target_modules)


ACTIVATIONS = (MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.RELU2_NO_MUL, MoEActivation.GELU_TANH)
_ALPHA, _LIMIT = 1.702, 7.0
"""Of gpt-oss's activation, as in vLLM's kernel for CPUs, which takes no others."""


@dataclass(frozen=True)
class BaseExperts:
    """A layer's experts without adapters: w13 [E, 2 * I, H], or [E, I, H] of experts without a gate; w2 [E, H, I];
    biases [E, 2 * I] and [E, H] of experts that have them. gpt-oss's gate and up projections alternate in w13; others
    have the gate above."""

    w13: torch.Tensor
    w2: torch.Tensor
    activation: MoEActivation = MoEActivation.SILU
    bias13: torch.Tensor | None = None
    bias2: torch.Tensor | None = None

    def first(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """The first product of x [rows, H]: [rows, outputs of w13]."""
        return linear(x, self.w13[expert], None if self.bias13 is None else self.bias13[expert])

    def parts(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of the first product: its gate and up projections, each [rows, I], or the up projection alone."""
        if self.activation == MoEActivation.SWIGLUOAI:
            return y[..., ::2], y[..., 1::2]
        return y.chunk(2, dim=-1) if self.activation.is_gated else (y,)

    def inner(self, y: torch.Tensor) -> torch.Tensor:
        """What the second product reads, [rows, I], from the first one."""
        if self.activation == MoEActivation.RELU2_NO_MUL:
            return relu(y).square()
        gate, up = self.parts(y)
        if self.activation == MoEActivation.SILU:
            return silu(gate) * up
        if self.activation == MoEActivation.GELU_TANH:
            return gelu(gate, approximate="tanh") * up
        gate = gate.clamp(max=_LIMIT)
        return (up.clamp(-_LIMIT, _LIMIT) + 1) * gate * torch.sigmoid(gate * _ALPHA)

    def second(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        return linear(inner, self.w2[expert], None if self.bias2 is None else self.bias2[expert])


class AdaptedExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
    """Experts with the update of their rows' adapters; also those without a gate, for which vLLM has no kernel on a
    CPU.

    vLLM's layer for such adapters (`FusedMoEWithLoRA`) loads them and keeps them in slots on every device; its kernels
    need a GPU. This one computes with torch alone: for each expert that is used, two products with the base model's
    matrices over all its rows, and two small ones for each adapter among them and each projection."""

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in ACTIVATIONS

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """The weights stay as they were loaded: vLLM's other kernel for CPUs keeps them in an order of its own."""

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Overwrite `output`. What experts on several devices, quantized ones and other kernels need is not used."""
        assert expert_map is None
        assert not apply_router_weight_on_input
        context = self._lora_context
        slots = [-1] * len(hidden_states) if context is None else context.punica_wrapper.token_lora_indices.tolist()
        if len(slots) != len(hidden_states):
            raise RuntimeError(f"experts of {len(hidden_states)} rows, but the batch has adapters for {len(slots)}")
        base = BaseExperts(w1, w2, activation, self.w1_bias, self.w2_bias)
        add_experts(output.zero_(), hidden_states, base, topk_weights, topk_ids, slots, context)


def add_experts(
    output: torch.Tensor,
    x: torch.Tensor,
    base: BaseExperts,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    slots: list[int],
    context: MoELoRAContext | None,
) -> None:
    """Add to each row of `output` what its chosen experts make of it, in place.

    output, x [T, H]; weights and chosen [T, k]; `slots`: the adapter's slot of each row, -1 without an adapter.
    `context`: vLLM's matrices of adapters; one pair for the whole first product where a release has gate and up fused,
    else a pair for each part.
    """
    for expert, rows, ranks, groups in _by_expert(chosen.tolist(), slots):
        inputs = x[rows]
        projected = base.first(expert, inputs)
        if context is not None:
            stacked = list(zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True))
            parts = (projected,) if len(stacked) == 1 else base.parts(projected)
            for (a, b), y in zip(stacked, parts, strict=True):
                _add_updates(y, inputs, a, b, expert, groups)
        inner = base.inner(projected)
        made = base.second(expert, inner)
        if context is not None:
            _add_updates(made, inner, context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0], expert, groups)
        output.index_add_(0, rows, (made * weights[rows, ranks, None]).to(output.dtype))


Groups = list[tuple[int, slice]]


def _by_expert(chosen: list[list[int]], slots: list[int]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, Groups]]:
    """For each used expert: its rows, the rank of the expert among those of each row, and which of these rows each slot
    has, without -1. The rows of a slot follow each other."""
    entries = sorted(
        (expert, slots[row], row, rank) for row, experts in enumerate(chosen) for rank, expert in enumerate(experts)
    )
    for expert, of_expert in groupby(entries, key=lambda entry: entry[0]):
        _, of_slots, rows, ranks = zip(*of_expert, strict=True)
        groups: Groups = []
        start = 0
        for slot, members in groupby(of_slots):
            stop = start + sum(1 for _ in members)
            if slot >= 0:
                groups.append((slot, slice(start, stop)))
            start = stop
        yield expert, torch.tensor(rows), torch.tensor(ranks), groups


def _add_updates(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, expert: int, groups: Groups
) -> None:
    """`y[rows] += x[rows] @ A.T @ B.T` for the rows of each slot, in place. a [slots, E, rank, inputs], b [slots, E,
    outputs, rank], with the adapter's scale in it."""
    for slot, rows in groups:
        down = linear(x[rows].to(a.dtype), a[slot, expert])
        y[rows] += linear(down, b[slot, expert]).to(y.dtype)
