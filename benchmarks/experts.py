"""CPU time of a layer's experts, forward and backward: with each of transformers' implementations, and with adapters.

Run as `python -m benchmarks.experts`.
The experts are frozen, as under adapters on attention; `trained` has gradients of the experts, too, as in full
fine-tuning. `adapters` has frozen experts, and gradients of one adapter on them, or of four that share the rows.
The last shape is that of Qwen3-30B-A3B.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from skyrl.training.backends.torch_lora.expert_product import BaseExperts, ExpertsUpdate, experts_with_updates

REPEATS = 3
SHAPES = ((128, 320, 8, 2, 1024), (1024, 384, 64, 8, 1024), (1024, 384, 64, 8, 4096), (2048, 768, 128, 8, 512))
"""Hidden size, size of an expert, experts, experts per token, rows."""
SMALL_ONLY = {False: ("batched_mm",), True: ("batched_mm", "eager")}
"""Implementations that are measured on the first shape alone, for frozen and for trained experts. `batched_mm` copies
an expert's weights for each row, and `eager` makes a gradient of all experts for each expert."""


ADAPTERS = ((8, 1), (32, 1), (32, 4))
"""Rank, and how many adapters share the rows."""


def seconds(experts: Any, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> float:
    """CPU seconds of one forward and backward."""
    rows = rows.clone().requires_grad_()
    experts.zero_grad()
    start = time.process_time()
    experts(rows, chosen, weights).square().sum().backward()
    return time.process_time() - start


class Adapted:
    """A layer's frozen experts with adapters, each on its part of the rows. Called as the experts are."""

    def __init__(self, experts: Any, rows: int, rank: int, adapters: int) -> None:
        count, hidden, size = experts.down_proj.shape
        self._frozen = BaseExperts(experts.gate_up_proj, experts.down_proj, experts.act_fn)
        bounds = [rows * number // adapters for number in range(adapters + 1)]
        self._updates = [
            ExpertsUpdate(
                start,
                stop,
                1.0,
                *(
                    (
                        torch.randn(count, rank, inputs, requires_grad=True),
                        torch.randn(count, outputs, rank, requires_grad=True),
                    )
                    for inputs, outputs in ((hidden, size), (hidden, size), (size, hidden))
                ),
            )
            for start, stop in zip(bounds, bounds[1:], strict=False)
        ]

    def zero_grad(self) -> None:
        for update in self._updates:
            for pair in (update.gate, update.up, update.down):
                for matrix in pair:
                    matrix.grad = None

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return experts_with_updates(rows, chosen, weights, self._frozen, self._updates)


def main() -> None:
    torch.set_num_threads(1)
    for hidden, size, count, per_token, length in SHAPES:
        config = Qwen3MoeConfig(
            hidden_size=hidden, moe_intermediate_size=size, num_experts=count, num_experts_per_tok=per_token
        )
        experts: Any = Qwen3MoeExperts(config)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.03)
        rows = torch.randn(length, hidden)
        weights, chosen = torch.randn(length, count).softmax(-1).topk(per_token)
        for trained in (False, True):
            if trained and hidden * length > 2**20:
                continue
            experts.requires_grad_(trained)
            best: dict[str, float] = {}
            for _ in range(REPEATS):
                for name in ("eager", "grouped_mm", "batched_mm"):
                    if name in SMALL_ONLY[trained] and hidden > 128:
                        continue
                    config._experts_implementation = name
                    best[name] = min(best.get(name, 1e9), seconds(experts, rows, chosen, weights))
            figures = "  ".join(f"{name} {found * 1e3:.0f} ms" for name, found in best.items())
            kind = "trained" if trained else "frozen"
            print(f"{hidden} x {size}, {per_token} of {count}, {length} rows, {kind}: {figures}", flush=True)
        experts.requires_grad_(False)
        config._experts_implementation = "grouped_mm"
        ways = {"none": experts}
        ways |= {f"{adapters} of rank {rank}": Adapted(experts, length, rank, adapters) for rank, adapters in ADAPTERS}
        best = dict.fromkeys(ways, 1e9)
        for _ in range(REPEATS):
            for name, way in ways.items():
                best[name] = min(best[name], seconds(way, rows, chosen, weights))
        figures = "  ".join(f"{name} {found * 1e3:.0f} ms" for name, found in best.items())
        print(f"{hidden} x {size}, {per_token} of {count}, {length} rows, adapters: {figures}", flush=True)


if __name__ == "__main__":
    main()
