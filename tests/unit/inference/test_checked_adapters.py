"""Adapters that the plugin refuses in vLLM. The manager is a stand-in with the attributes of vLLM's;
tests/component/inference/test_families_vllm.py has the real one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    from vllm.lora.layers import FusedMoE3DWithLoRA
    from vllm.model_executor.models.utils import PPMissingLayer

    from skyrl.inference.vllm_plugin.patches import check_adapter

PACKED = {
    "model.layers.0.attn.qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "model.layers.0.attn.in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    "model.layers.0.mlp.experts": [f"experts.{n}.{leaf}_proj" for n in range(2) for leaf in ("gate", "down", "up")],
}
SINGLE = ("model.layers.0.attn.o_proj", "model.layers.0.attn.kv_b_proj", "model.layers.0.mlp.shared_expert_gate")
EXPERTS = [f"model.layers.0.mlp.{name}" for name in PACKED["model.layers.0.mlp.experts"]]


def _manager(*, latent: bool = True) -> Any:
    """Of a model with two layers, the second on another device."""
    first = nn.ModuleDict({"attn": nn.ModuleDict({"mla_attn": nn.Identity()} if latent else {}), "mlp": nn.Module()})
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([first, PPMissingLayer()])
    modules: dict[str, Any] = {name: SimpleNamespace() for name in (*PACKED, *SINGLE)}
    modules["model.layers.0.attn.in_proj_qkvz"].n_slices = 4
    packed = {name: [f"{name.rpartition('.')[0]}.{part}" for part in parts] for name, parts in PACKED.items()}
    config = SimpleNamespace(max_lora_rank=8)
    return SimpleNamespace(modules=modules, packed_modules=packed, model=model, lora_config=config)


def _parts(names: Sequence[str], rank: int = 8) -> dict[str, Any]:
    return {name: SimpleNamespace(lora_a=torch.zeros(rank, 4)) for name in names}


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.0.attn.q_proj", "model.layers.0.attn.o_proj"],
        ["model.layers.0.attn.in_proj_qkv", "model.layers.0.attn.in_proj_z"],
        ["model.layers.0.attn.o_proj", *EXPERTS],
        ["model.layers.1.attn.o_proj", "model.layers.1.mlp.experts.0.gate_proj"],
    ],
    ids=["one of a packed layer", "both of more slices", "all experts", "on another device"],
)
def test_an_adapter_that_vllm_serves_as_a_whole_is_taken(names: list[str]) -> None:
    manager = _manager()
    if "model.layers.1" in names[0]:
        manager.modules["model.layers.1.mlp.experts"] = SimpleNamespace()
    check_adapter(_parts(names), manager)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model.layers.0.mlp.gate"], "changes model.layers.0.mlp.gate, which vLLM computes without adapters"),
        (["model.layers.2.attn.o_proj"], "changes model.layers.2.attn.o_proj, which vLLM computes without"),
        (["model.layers.0.attn.kv_b_proj"], "vLLM ignores adapters on kv_b_proj"),
        (["model.layers.0.mlp.shared_expert_gate"], "vLLM ignores adapters on shared_expert_gate"),
        (["model.layers.0.attn.in_proj_z"], "lacks model.layers.0.attn.in_proj_qkv: vLLM loads all parts of"),
        (EXPERTS[:-1], f"lacks {EXPERTS[-1]}: vLLM loads all parts of"),
        (
            ["model.layers.0.mlp.experts"],
            "for all experts of model.layers.0.mlp.experts together, and vLLM reads a pair for",
        ),
        (["model.layers.0.mlp.experts.base_layer"], "for all experts of model.layers.0.mlp.experts together"),
        (["model.layers.0.mlp.experts.2.up_proj"], "changes model.layers.0.mlp.experts.2.up_proj, which"),
    ],
)
def test_an_adapter_that_vllm_would_serve_in_part_is_refused(names: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_adapter(_parts(names), _manager())


def test_experts_are_refused_where_vllm_keeps_no_room_for_them() -> None:
    manager = _manager()
    del manager.modules["model.layers.0.mlp.experts"], manager.packed_modules["model.layers.0.mlp.experts"]
    with pytest.raises(ValueError, match=f"changes experts .{EXPERTS[0]}.*train_mlp_of_mixtures to train"):
        check_adapter(_parts(EXPERTS), manager)


def test_a_part_of_a_higher_rank_than_vllm_has_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 16 for model.layers.0.attn.o_proj, and vLLM keeps room for 8"):
        check_adapter(_parts(["model.layers.0.attn.o_proj"], rank=16), _manager())


def test_without_latent_attention_kv_b_proj_may_change() -> None:
    check_adapter(_parts(["model.layers.0.attn.kv_b_proj"]), _manager(latent=False))


class FusedExperts(FusedMoE3DWithLoRA):
    """vLLM's class without its parameters."""

    global_num_experts = 4  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self) -> None:
        nn.Module.__init__(self)


def test_fused_experts_are_taken_whole_and_up_to_the_rank_of_one_expert() -> None:
    manager, experts = _manager(), "model.layers.0.mlp.experts"
    del manager.packed_modules[experts]
    manager.modules[experts] = FusedExperts()
    both = [experts, f"{experts}.base_layer"]
    check_adapter(_parts(both, rank=4 * 8), manager)
    with pytest.raises(ValueError, match=f"rank 16 for {experts}, and vLLM keeps room for 8"):
        check_adapter(_parts(both, rank=4 * 16), manager)
    with pytest.raises(ValueError, match=f"lacks {experts}.base_layer: vLLM loads all parts of {experts} or none"):
        check_adapter(_parts(both[:1], rank=4 * 8), manager)
    with pytest.raises(ValueError, match="changes model.layers.0.mlp.experts.0.gate_proj, which vLLM computes without"):
        check_adapter(_parts(EXPERTS), manager)
