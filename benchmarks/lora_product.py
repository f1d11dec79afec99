"""CPU time of a linear layer that several adapters use at once, forward and backward: one operation, against tensors.

Run as `python -m benchmarks.lora_product`.
With tensors, each adapter's update has the size of its output; all are concatenated, and added to the base model's
product. One operation adds each update in place (`torch_lora/lora_product.py`). In turns, on one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from skyrl.training.backends.torch_lora.lora_product import RowsUpdate, linear_with_updates

SIZES = (128, 1024)
RANKS = {"4 adapters": (4, 8, 16, 32), "1 adapter": (8,)}
ROWS = (16, 64, 256, 1024)
"""Of each adapter."""
ROUNDS = 5
ROUND_S = 0.1


def with_tensors(x: Tensor, weight: Tensor, bias: Tensor | None, updates: Sequence[RowsUpdate]) -> Tensor:
    """As `linear_with_updates`."""
    parts = [
        torch.nn.functional.linear(torch.nn.functional.linear(x[start:stop], lora_a), lora_b) * scale
        for start, stop, scale, lora_a, lora_b in updates
    ]
    return torch.nn.functional.linear(x, weight, bias) + torch.cat(parts)


def seconds(layer: Callable[..., Tensor], size: int, ranks: Sequence[int], rows: int, repeats: int) -> float:
    """CPU seconds of one forward and backward."""
    x, weight = torch.randn(rows * len(ranks), size, requires_grad=True), torch.randn(size, size)
    updates = [
        RowsUpdate(
            place * rows,
            (place + 1) * rows,
            1.0,
            torch.randn(rank, size, requires_grad=True),
            torch.randn(size, rank, requires_grad=True),
        )
        for place, rank in enumerate(ranks)
    ]
    wanted = [x, *(matrix for update in updates for matrix in update[3:])]
    gradient = torch.ones_like(x)
    start = time.process_time()
    for _ in range(repeats):
        torch.autograd.grad(layer(x, weight, None, updates), wanted, gradient)
    return (time.process_time() - start) / repeats


def main() -> None:
    torch.set_num_threads(1)
    for size in SIZES:
        for name, ranks in RANKS.items():
            for rows in ROWS:
                repeats = max(1, round(ROUND_S / seconds(with_tensors, size, ranks, rows, 2)))
                found: list[float] = []
                for _ in range(ROUNDS):
                    before, now = (
                        seconds(layer, size, ranks, rows, repeats) for layer in (with_tensors, linear_with_updates)
                    )
                    found.append(before / now)
                print(
                    f"{size} × {size}, {name}, {rows} rows each: {statistics.median(found):.2f} "
                    f"({min(found):.2f} to {max(found):.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
