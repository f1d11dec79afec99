"""How each kind of transformers' routers weighs given experts, against what the router itself does."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skyrl.trainer.experts.routing import ROUTERS, WITH_SHARED, Routing, routers_of

ROWS, HIDDEN, EXPERTS, PER_ROW = 20, 16, 8, 3
MODULES = {
    "Qwen3MoeTopKRouter": "qwen3_moe",
    "Qwen3NextTopKRouter": "qwen3_next",
    "Qwen3_5MoeTopKRouter": "qwen3_5_moe",
    "Qwen3VLMoeTextTopKRouter": "qwen3_vl_moe",
    "MixtralTopKRouter": "mixtral",
    "GptOssTopKRouter": "gpt_oss",
    "HunYuanMoEV1Gate": "hunyuan_v1_moe",
    "Mistral4TopkRouter": "mistral4",
    "Gemma4TextRouter": "gemma4",
    "MiniMaxM2TopKRouter": "minimax_m2",
    "HYV3TopKRouter": "hy_v3",
    "DeepseekV3TopkRouter": "deepseek_v3",
    "DeepseekV32TopkRouter": "deepseek_v32",
    "GlmMoeDsaTopkRouter": "glm_moe_dsa",
    "Glm5NextTextTopkRouter": "glm5_next",
    "Glm4MoeTopkRouter": "glm4_moe",
    "Glm4MoeLiteTopkRouter": "glm4_moe_lite",
    "KimiLinearTopkRouter": "kimi_linear",
    "NemotronHTopkRouter": "nemotron_h",
    "Lfm2MoeTopKRouter": "lfm2_moe",
    "InklingTopkRouter": "inkling",
}
SOFTMAX = tuple(MODULES)[:9]
SIGMOID = tuple(MODULES)[9:]
BIAS_GIVEN = ("MiniMaxM2TopKRouter", "HYV3TopKRouter", "Lfm2MoeTopKRouter")
"""Their layer gives them the bias that changes the choice."""
WITH_SETTING = ("Qwen3MoeTopKRouter", "Qwen3NextTopKRouter", "Mistral4TopkRouter")
FACTOR = 2.5


def _router(name: str, dtype: torch.dtype = torch.float32, *, normed: bool = True, groups: int = 4) -> Any:
    kind: Any = getattr(import_module(f"transformers.models.{MODULES[name]}.modeling_{MODULES[name]}"), name)
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=PER_ROW,
        moe_topk=PER_ROW,
        top_k_experts=PER_ROW,
        norm_topk_prob=normed,
        routed_scaling_factor=FACTOR,
        router_scaling_factor=FACTOR,
        rms_norm_eps=1e-6,
        n_group=groups,
        topk_group=max(1, groups // 2),
        use_expert_bias=True,
        n_routed_experts=EXPERTS,
        n_shared_experts=2,
        route_scale=FACTOR,
    )
    torch.manual_seed(1)
    router = kind(config).to(dtype)
    for tensor in router.state_dict().values():
        tensor.normal_(0, 0.3)
    return router


def _output(name: str, router: Any, hidden: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Weights of shared experts, where the router has some, are joined to those of the chosen ones."""
    logits, weights, chosen, *shared = _made(name, router, hidden, bias)
    return logits, torch.cat([weights, *shared], dim=1), chosen


def _made(name: str, router: Any, hidden: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    if name in BIAS_GIVEN:
        return router(hidden, bias)
    if name in SIGMOID:
        router.e_score_correction_bias.copy_(bias)
    return router(hidden)


def _follow(routing: Routing, experts: Tensor) -> None:
    packed: Any = SimpleNamespace(tokens=torch.zeros(len(experts)), experts=experts.int())
    routing.follow([packed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_with_its_own_experts_a_router_gives_the_same_bits_and_gradients(
    name: str, normed: bool, dtype: torch.dtype
) -> None:
    router = _router(name, dtype, normed=normed)
    routing = Routing([router])
    hidden = torch.randn(ROWS, HIDDEN, dtype=dtype).requires_grad_()
    bias = torch.randn(EXPERTS) * 0.2
    matrix = next(parameter for parameter in router.parameters() if parameter.ndim == 2)
    found = []
    experts: Tensor | None = None
    for _ in range(2):
        _, weights, chosen = _output(name, router, hidden, bias)
        assert experts is None or torch.equal(chosen, experts)
        experts = chosen
        mixed = (weights.float() * torch.arange(1.0, weights.shape[1] + 1)).sum()
        found.append((weights, *torch.autograd.grad(mixed, [hidden, matrix])))
        _follow(routing, experts)
    (weights, *gradients), (replayed, *others) = found
    assert replayed.dtype == weights.dtype
    assert torch.equal(replayed, weights)
    for one, other in zip(gradients, others, strict=True):
        # shared experts' logits are computed again: two products have the gradient, and each is rounded
        bound = 0.01 * float(one.abs().max()) if name in WITH_SHARED else None
        torch.testing.assert_close(one, other, atol=bound, rtol=None if bound is None else 0.0)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("name", SIGMOID)
def test_sigmoid_routers_weigh_given_experts_as_if_a_bias_had_chosen_them(name: str, normed: bool) -> None:
    """The bias changes the choice alone. It is one for all rows, so each row's router is another one."""
    hidden = torch.randn(ROWS, HIDDEN)
    given = torch.rand(ROWS, EXPERTS).topk(PER_ROW).indices
    router = _router(name, normed=normed, groups=1)
    expected = torch.zeros(ROWS, EXPERTS)
    of_shared = []
    for row, experts in enumerate(given):
        bias = torch.zeros(EXPERTS).index_fill(0, experts, 5.0)
        _, weights, chosen = _output(name, router, hidden[row : row + 1], bias)
        expected[row, chosen[0]] = weights[0, :PER_ROW]
        of_shared.append(weights[:, PER_ROW:])
    _follow(Routing([router]), given)
    _, weights, chosen = _output(name, router, hidden, torch.zeros(EXPERTS))
    assert torch.equal(chosen, given)
    torch.testing.assert_close(weights, torch.cat([expected.gather(1, given), torch.cat(of_shared)], dim=1))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_routers_weigh_given_experts_by_their_logits(name: str, normed: bool) -> None:
    router = _router(name, normed=normed)
    given = torch.rand(ROWS, EXPERTS).topk(PER_ROW).indices
    _follow(Routing([router]), given)
    logits, weights, chosen = router(torch.randn(ROWS, HIDDEN))
    assert torch.equal(chosen, given)
    if name == "Gemma4TextRouter":  # it gives probabilities
        logits = logits.log()
    shares = logits.exp() / logits.exp().sum(-1, keepdim=True)
    of_all = 1.0 if normed or name not in WITH_SETTING else shares.gather(1, given).sum(-1, keepdim=True)
    expected = logits.gather(1, given).softmax(-1) * of_all
    if name == "Mistral4TopkRouter":
        expected = expected * FACTOR
    elif name == "Gemma4TextRouter":
        expected = expected * router.per_expert_scale[given]
    torch.testing.assert_close(weights, expected)


def test_every_known_kind_is_tried_here() -> None:
    assert set(MODULES) == {*ROUTERS, *WITH_SHARED}


class _Block(nn.Module):
    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.experts, self.gate = nn.Identity(), router


def test_a_router_of_another_kind_is_refused_by_name() -> None:
    model = nn.ModuleDict({"layer": _Block(nn.Linear(2, 2))})
    with pytest.raises(
        ValueError, match=r"layer is a mixture of experts .*how Linear of _Block weighs .* is not known"
    ):
        routers_of(model)
