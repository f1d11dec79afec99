"""Routing replay: the routers of a mixture use the experts that the sampler has used, where these were recorded.

The weights of the experts are the router's own: its softmax over all experts at the recorded experts, made to sum to 1
if the model does so. Gradients go through that softmax ("Stabilizing MoE Reinforcement Learning by Aligning Training
and Inference Routers", arXiv 2510.11370: the mask comes from the sampler, the logits from the trainer).
Knows the routers named in `experts.ROUTERS`. Knows nothing of passes or adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skyrl.training.backends.torch_lora.packing import PackedSlice

RouterOutput = tuple[Tensor, Tensor, Tensor]
"""logits [rows, experts]; weights [rows, k] of the chosen experts; the experts, int64 [rows, k]."""


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

    def follow(self, slices: Sequence[PackedSlice]) -> None:
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

    def _routed(self, layer: int, router: Any, args: object, output: RouterOutput) -> RouterOutput:
        logits, _, experts = output
        if self._chosen is not None:
            self._chosen.append(experts)
        if self._given is None:
            return output
        count = experts.shape[1]
        given = self._given[:, layer * count : (layer + 1) * count].long()
        experts = torch.where(given[:, :1] < 0, experts, given)
        weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), experts


def _joined(slices: Sequence[PackedSlice]) -> Tensor | None:
    """The experts of a micro-batch's rows, int32 [rows, at least layers * k]; -1 for slices without. None if no slice
    has any."""
    found = [packed.experts for packed in slices if packed.experts is not None]
    if not found:
        return None
    width = max(experts.shape[1] for experts in found)
    joined = found[0].new_full((sum(len(packed.tokens) for packed in slices), width), -1)
    start = 0
    for packed in slices:
        if packed.experts is not None:
            joined[start : start + len(packed.tokens), : packed.experts.shape[1]] = packed.experts
        start += len(packed.tokens)
    return joined


@torch.no_grad()
def own_experts(model: Any, tokens: Tensor) -> Tensor:
    """The experts that a mixture of transformers' uses for one sequence, int64 [tokens, layers, k]. tokens: int64
    [tokens]. It must be a model as transformers makes it, because it asks for the routers' logits by name."""
    logits = model(input_ids=tokens[None], use_cache=False, output_router_logits=True).router_logits
    per_token = model.config.get_text_config().num_experts_per_tok
    return torch.stack([layer.softmax(-1, dtype=torch.float32).topk(per_token).indices for layer in logits], dim=1)
