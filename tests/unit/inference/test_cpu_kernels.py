"""What the plugin corrects in vLLM's kernels and routers for CPUs, against plain torch."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from skyrl.inference.vllm_plugin.cpu_patches import (
        ask_for_tiles,
        refuse_missing_kernels,
        route_without_groups,
        take_the_plain_latent_attention,
        turn_all_heads,
    )

TOKENS, HEADS, SIZE, EXPERTS, PER_ROW = 7, 4, 64, 6, 2


ARCH_PRCTL, ARCH_GET_XCOMP_PERM, TILE_DATA = 158, 0x1022, 18


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")
def test_a_process_may_use_the_tiles_of_amx() -> None:
    allowed = ctypes.c_uint64()
    ask_for_tiles()
    assert ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(allowed)) == 0
    assert allowed.value >> TILE_DATA & 1


@pytest.mark.parametrize("named", [None, AttentionBackendEnum.AMX_MLA])
def test_a_cpu_with_amx_computes_latent_attention_as_others_do_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, named: AttentionBackendEnum | None
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(lambda cls, config: None))
    take_the_plain_latent_attention()
    latent, other = (
        SimpleNamespace(attention_config=SimpleNamespace(backend=named), model_config=SimpleNamespace(use_mla=mla))
        for mla in (True, False)
    )
    for config in (latent, other):
        CpuPlatform.check_and_update_config(cast(Any, config))
    assert other.attention_config.backend is named
    selector: Any = SimpleNamespace(use_sparse=False, use_mla=True)
    chosen = CpuPlatform.get_attn_backend_cls(latent.attention_config.backend, selector)
    assert chosen == (named or AttentionBackendEnum.CPU_MLA).get_path()


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)  # put back after the test
    monkeypatch.setattr(CPURouter, "__init__", CPURouter.__init__)
    turn_all_heads()
    route_without_groups()
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("by_head", [False, True], ids=["rows of all heads", "views of heads"])
def test_rotary_embeddings_turn_all_heads_of_queries_and_keys(by_head: bool) -> None:
    settings = {"rope_type": "default", "rope_theta": 1e4}
    layer: Any = get_rope(SIZE, 128, is_neox_style=False, rope_parameters=settings, dtype=torch.float32)
    query, key = torch.randn(TOKENS, HEADS, SIZE + 32)[..., 32:], torch.randn(TOKENS, 1, SIZE + 16)[..., 16:]
    expected = [_turned(each) for each in (query, key)]
    given = (query.clone(), key.clone()) if by_head else (query.flatten(1).clone(), key.flatten(1).clone())
    if by_head:  # views of wider rows, as latent attention has them
        given = (query, key)
    found = layer.forward_cpu(torch.arange(TOKENS), *given)
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each.view(wanted.shape), wanted)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbouring numbers as complex ones, turned by their angles."""
    angles = torch.arange(TOKENS)[:, None] / 1e4 ** (torch.arange(0, SIZE, 2) / SIZE)
    pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("has_bias", [False, True])
def test_sigmoid_scores_choose_experts_without_groups(has_bias: bool) -> None:
    bias = torch.tensor([0.0, 0.9, -0.9, 0.3, 0.0, 0.6]) if has_bias else None
    router: Any = CPURouter(PER_ROW, EXPERTS, scoring_func="sigmoid", e_score_correction_bias=bias)
    logits = torch.randn(TOKENS, EXPERTS)
    weights, chosen = router._compute_routing(logits, logits, None)
    scores = logits.sigmoid()
    best = (scores if bias is None else scores + bias).topk(PER_ROW).indices
    assert [set(row) for row in chosen.tolist()] == [set(row) for row in best.tolist()]
    of_chosen = scores.gather(1, chosen.long())
    torch.testing.assert_close(weights, of_chosen / of_chosen.sum(-1, keepdim=True))


@pytest.mark.usefixtures("patched")
def test_other_routers_keep_their_settings() -> None:
    router: Any = CPURouter(PER_ROW, EXPERTS, use_grouped_topk=True, num_expert_group=3, topk_group=2)
    assert (router.use_grouped_topk, router.num_expert_group, router.topk_group) == (True, 3, 2)
    softmax: Any = CPURouter(PER_ROW, EXPERTS)
    assert not softmax.use_grouped_topk


@pytest.mark.parametrize("has_avx512", [False, True])
def test_weights_of_four_bits_are_refused_where_vllm_has_no_product_for_them(
    has_avx512: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllms = classmethod(lambda cls, config: (True, None))
    monkeypatch.setattr(CPUWNA16LinearKernel, "can_implement", vllms)
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(**({"cpu_gemm_wna16": None} if has_avx512 else {})))
    refuse_missing_kernels()
    takes, reason = CPUWNA16LinearKernel.can_implement(cast(Any, None))
    assert takes is has_avx512
    assert (reason is None) is has_avx512
