"""The experts that mixtures of transformers' use by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl.trainer.experts.routing import RouterOutput, routers_of


@torch.no_grad()
def own_experts(model: Any, tokens: Tensor) -> Tensor:
    """For one sequence, int64 [tokens, layers, k]. tokens: int64 [tokens]."""
    found: list[Tensor] = []

    def note(router: Any, args: object, output: RouterOutput) -> None:
        found.append(output[2])

    handles = [router.register_forward_hook(note) for router in routers_of(model)]
    try:
        model(input_ids=tokens[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(found, dim=1)
