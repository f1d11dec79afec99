"""Lets vLLM 0.32 serve routers with sigmoid scores and no groups on a CPU, as MiniMax-M2 has them.

vLLM's router for CPUs computes sigmoid scores and their correction bias only where experts are in groups. No groups are
the same as one group that holds all experts.

Knows the settings of vLLM's router. Knows nothing of experts.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter


def route_without_groups() -> None:
    """Patch this process."""
    original = CPURouter.__init__

    def initialize(router: Any, *args: Any, **kwargs: Any) -> None:
        original(router, *args, **kwargs)
        if router.scoring_func == "sigmoid" and router.custom_routing_function is None and not router.use_grouped_topk:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

    CPURouter.__init__ = initialize  # type: ignore[method-assign]
