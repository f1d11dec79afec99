"""CPU time of a layer's experts in vLLM on a CPU: its own kernel, and the plugin's, which adds adapters.

Run as `python -m benchmarks.sampled_experts`. Adapters have rank 32. The last shape is that of Qwen3-30B-A3B.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

REPEATS = 5
SHAPES = ((128, 320, 8, 2), (1024, 384, 64, 8), (2048, 768, 128, 8))
"""Hidden size, size of an expert, experts, experts per token."""
ROWS = (1, 64, 512)
SLOTS, RANK = 4, 32


def milliseconds(function: Callable[[], object]) -> float:
    """CPU time of the fastest call."""
    found = []
    for _ in range(REPEATS):
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return 1e3 * min(found)


def slots_of(experts: int, hidden: int, size: int) -> Any:
    """Adapters in vLLM's slots."""
    down, up = torch.randn(SLOTS, experts, RANK, hidden), torch.randn(SLOTS, experts, size, RANK)
    return SimpleNamespace(
        w13_lora_a_stacked=(down, down.clone()),
        w13_lora_b_stacked=(up, up.clone()),
        w2_lora_a_stacked=(torch.randn(SLOTS, experts, RANK, size),),
        w2_lora_b_stacked=(torch.randn(SLOTS, experts, hidden, RANK),),
    )


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, for what vLLM imports
        from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

        from skyrl.inference.vllm_plugin.expert_adapters_cpu import add_experts

    torch.set_num_threads(1)
    for hidden, size, count, per_token in SHAPES:
        w13, w2 = torch.randn(count, 2 * size, hidden) * 0.03, torch.randn(count, hidden, size) * 0.03
        packed = cpu_prepack_moe_weight(w13, "vec"), cpu_prepack_moe_weight(w2, "vec")
        adapters = slots_of(count, hidden, size)
        for length in ROWS:
            x = torch.randn(length, hidden)
            weights, chosen = torch.randn(length, count).softmax(-1).topk(per_token)
            chosen = chosen.int()
            output = torch.zeros_like(x)
            ways: dict[str, Callable[[], object]] = {
                "vLLM's": partial(cpu_fused_moe, output, x, *packed, None, None, weights, chosen, "silu", "vec", False),
            }
            rows = {
                "none": [-1] * length,
                "one adapter": [0] * length,
                "four adapters": [row % 4 for row in range(length)],
            }
            for name, slots in rows.items():
                ways[name] = partial(add_experts, output, x, w13, w2, weights, chosen, slots, adapters)
            figures = "  ".join(f"{name} {milliseconds(way):.2f} ms" for name, way in ways.items())
            print(f"{hidden} x {size}, {per_token} of {count}, {length} rows: {figures}", flush=True)


if __name__ == "__main__":
    main()
