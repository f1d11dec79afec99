"""Routing replay: the routers of a mixture use the experts that the sampler has used, where these were recorded; and
what a client must know of a mixture, and is told.

The weights of the experts are the router's own: what it makes of its logits at the recorded experts. Gradients go
through them ("Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370: the
mask comes from the sampler, the logits from the trainer). Where no adapter trains experts, they compute as
transformers' `grouped_mm`: the rows are sorted by expert, and each expert that is used makes one matrix product
(docs/decisions/mixtures-of-experts.md).
Knows how transformers' routers weigh experts. Knows nothing of how passes run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from skyrl.base.model_files import FROZEN_EXPERTS
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.lora.adapter import Target
from skyrl.trainer.protocol import Mixture, PassResult
from skyrl.trainer.rows.packing import PackedItem

RouterOutput = tuple[Tensor, ...]
"""logits [rows, experts]; weights [rows, k] of the chosen experts; the experts, int64 [rows, k]; of some kinds also the
weights [rows, shared] of shared experts."""
Weigh = Callable[[Any, Tensor, Tensor], Tensor]
"""Of a router, its logits, and the experts that it shall use: their weights [rows, k]."""


def _softmax_of_all(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Its sum is made 1 unless `norm_topk_prob` says otherwise; some routers have no such setting."""
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


def _softmax_of_chosen(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    return logits.gather(1, experts).softmax(-1)


def _sigmoid(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.float().sigmoid().gather(1, experts)
    return weights / weights.sum(-1, keepdim=True)


def _scaled_sigmoid(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.float().sigmoid().gather(1, experts)
    return _scaled(weights, router.norm_topk_prob, router.routed_scaling_factor)


def _scaled_sigmoid_of_hunyuan(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    return _scaled(logits.sigmoid().gather(1, experts), True, router.router_scaling_factor)


def _scaled_softmax(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    return _scaled(logits.softmax(-1).gather(1, experts), router.norm_topk_prob, router.routed_scaling_factor)


def _scaled(weights: Tensor, sum_is_one: bool, factor: float) -> Tensor:
    if sum_is_one:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * factor


def _scaled_probabilities(router: Any, probabilities: Tensor, experts: Tensor) -> Tensor:
    """Gemma 4's router gives probabilities in the place of logits, and has a factor for each expert."""
    weights = probabilities.gather(1, experts)
    return weights / weights.sum(-1, keepdim=True) * router.per_expert_scale[experts]


def _scaled_sigmoid_of_lfm2(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    return weights * router.routed_scaling_factor


def _sigmoids_with_shared(router: Any, logits: Tensor, experts: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Inkling's: the weights of the chosen and of the shared experts have one sum. The router returns no logits of the
    shared ones; made of all experts' weights, they have the same bits."""
    shared = functional.linear(hidden.reshape(len(logits), -1), router.weight)[:, router.num_experts :]
    sigmoids = functional.logsigmoid(torch.cat([logits.gather(1, experts), shared], dim=1))
    weights = (sigmoids - sigmoids.logsumexp(1, keepdim=True)).exp() * router.route_scale * router.global_scale
    return weights[:, : experts.shape[1]], weights[:, experts.shape[1] :]


ROUTERS: dict[str, Weigh] = {
    "Qwen3MoeTopKRouter": _softmax_of_all,
    "Qwen3NextTopKRouter": _softmax_of_all,
    "Qwen3_5MoeTopKRouter": _softmax_of_all,
    "Qwen3VLMoeTextTopKRouter": _softmax_of_all,
    "MixtralTopKRouter": _softmax_of_all,
    "GptOssTopKRouter": _softmax_of_chosen,
    "MiniMaxM2TopKRouter": _sigmoid,
    "DeepseekV3TopkRouter": _scaled_sigmoid,
    "DeepseekV32TopkRouter": _scaled_sigmoid,
    "GlmMoeDsaTopkRouter": _scaled_sigmoid,
    "Glm5NextTextTopkRouter": _scaled_sigmoid,
    "Glm4MoeTopkRouter": _scaled_sigmoid,
    "Glm4MoeLiteTopkRouter": _scaled_sigmoid,
    "KimiLinearTopkRouter": _scaled_sigmoid,
    "Lfm2MoeTopKRouter": _scaled_sigmoid_of_lfm2,
    "NemotronHTopkRouter": _scaled_sigmoid,
    "HunYuanMoEV1Gate": _softmax_of_all,
    "HYV3TopKRouter": _scaled_sigmoid_of_hunyuan,
    "Mistral4TopkRouter": _scaled_softmax,
    "Gemma4TextRouter": _scaled_probabilities,
}
"""How each kind of router weighs the experts that it uses. What else changes its *choice*, such as groups of experts,
or a bias that makes their use even, changes no weights. Every kind returns `RouterOutput`."""
WITH_SHARED: dict[str, Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "InklingTopkRouter": _sigmoids_with_shared
}
"""Those that weigh shared experts, too: from their logits, the experts, and their input [..., hidden]."""


def router_of(block: nn.Module) -> Any | None:
    """The router beside a layer's experts; None for a module without experts."""
    if not isinstance(getattr(block, "experts", None), nn.Module):
        return None
    return getattr(block, "gate", getattr(block, "router", None))


def routers_of(model: nn.Module) -> list[Any]:
    """The routers of a mixture's layers, in the order of the layers; none for a dense model.

    Raises ValueError for layers whose router is of a kind that `routing` does not know."""
    routers: list[Any] = []
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "experts", None), nn.Module):
            continue
        router = router_of(module)
        if type(router).__name__ not in {**ROUTERS, **WITH_SHARED}:
            raise ValueError(
                f"{name} is a mixture of experts of a kind that cannot be trained: how {type(router).__name__} of "
                f"{type(module).__name__} weighs the experts that it uses is not known; there are: "
                f"{', '.join([*ROUTERS, *WITH_SHARED])}"
            )
        routers.append(router)
    return routers


CORRECTIONS = ("e_score_correction_bias", "expert_bias")
"""Buffers of some routers, or of the module around them: what they add to scores for their choice. Its numbers are as
large as the scores, and differ little from each other: in bfloat16 other experts would be chosen. vLLM has it in
float32; transformers keeps it so for some families alone."""


class Routing:
    """What the routers of one base model are told, and what they have chosen."""

    def __init__(self, routers: Sequence[Any]) -> None:
        """`routers`: in the order of their layers."""
        self._layers = len(routers)
        self._given: Tensor | None = None
        self._chosen: list[Tensor] | None = None
        self.recorded: Tensor | None = None
        """Of the last `recording`: int64 [rows, layers, k]; None before the first one, and for a dense model."""
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._routed, layer))

    def follow(self, slices: Sequence[PackedItem]) -> None:
        """Use the experts of these slices from now on, until the next call: a backward may compute layers again."""
        self._given = _joined(slices)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, the routers choose freely, and their choice is recorded."""
        self._given, self._chosen = None, []
        try:
            yield
        finally:
            chosen, self._chosen = self._chosen, None
        if chosen:
            layers = [torch.cat(chosen[layer :: self._layers]) for layer in range(self._layers)]
            self.recorded = torch.stack(layers, dim=1)

    def _routed(self, layer: int, router: Any, args: tuple[Any, ...], output: RouterOutput) -> RouterOutput:
        logits, own_weights, experts, *shared = output
        if self._chosen is not None:
            self._chosen.append(experts)
        if self._given is None:
            return output
        count = experts.shape[1]
        given = self._given[:, layer * count : (layer + 1) * count].long()
        experts = torch.where(given[:, :1] < 0, experts, given)
        if shared:
            weights, *shared = WITH_SHARED[type(router).__name__](router, logits, experts, args[0])
        else:
            weights = ROUTERS[type(router).__name__](router, logits, experts)
        return logits, weights.to(own_weights.dtype), experts, *shared


def _joined(slices: Sequence[PackedItem]) -> Tensor | None:
    """The experts of a micro-batch's rows, int32 [rows, layers * k]; -1 for slices without. None if no slice has
    any."""
    width = next((packed.experts.shape[1] for packed in slices if packed.experts is not None), None)
    if width is None:
        return None
    return torch.cat(
        [
            packed.tokens.new_full((len(packed.tokens), width), -1, dtype=torch.int32)
            if packed.experts is None
            else packed.experts
            for packed in slices
        ]
    )


def counts_of(router: Any) -> tuple[int, int]:
    """How many experts a layer has, and how many of them each row uses."""
    if hasattr(router, "top_k"):
        return int(router.num_experts), int(router.top_k)
    return int(router.config.num_experts), int(router.config.top_k_experts)


def mixture_of(routers: Sequence[Any]) -> Mixture | None:
    """What a client must know to send routed experts; None for a dense model. Raises ValueError if layers differ in
    it."""
    if not routers:
        return None
    counts = {counts_of(router) for router in routers}
    if len(counts) > 1:
        some = " and ".join(f"{used} of {experts}" for experts, used in sorted(counts)[:2])
        raise ValueError(f"its layers use different numbers of experts ({some}), which is not supported")
    ((experts, used),) = counts
    return Mixture(len(routers), experts, used)


def with_frozen_experts(
    outcome: PassResult | Exception, spec: LoraSpec, targets: Sequence[Target]
) -> PassResult | Exception:
    """The outcome of a pass of a mixture's adapter that trains `targets`. Its metrics say so if the adapter asked for
    `train_mlp`, and does not train the experts of the base model."""
    trains_experts = any(target.experts is not None for target in targets)
    if trains_experts or not spec.train_mlp or isinstance(outcome, Exception):
        return outcome
    return replace(outcome, metrics=outcome.metrics | {FROZEN_EXPERTS: 1.0})
