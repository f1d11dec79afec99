"""Compares the two products of float32 matrices that torch has on a CPU: its default (MKL), and oneDNN's.

Usage: python -m benchmarks.products [--rows R ...] [--out FILE]

For each shape of a layer: GFLOP/s of x W^T, of the gradients of x and of a matrix of rank 32, in turns, the best of
several rounds, on one thread. Errors: RMS, relative to float64's result. "First": what the first call with a shape
takes more than the next.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine, program
from benchmarks.table import aligned, number
from skyrl.trainer.device import prepare_device
from skyrl.trainer.kernels import dense

SHAPES = ((128, 320), (576, 1536), (1024, 3072))
"""Inputs and outputs of the first product of an MLP: the tiny model, SmolLM2-135M, Qwen3-0.6B."""
RANK, ROUNDS, SECONDS = 32, 5, 0.05


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"default": torch.nn.functional.linear, "oneDNN": onednn}


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    times = max(1, int(SECONDS / (time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def measured(rows: int, inputs: int, outputs: int) -> dict[str, Any]:
    x, weight, gradient, low_rank = (
        torch.randn(*shape) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs), (rows, RANK))
    )
    pairs = {"x W^T": (x, weight), "of x": (gradient, weight.t()), "of lora_A": (low_rank.t(), x.t())}
    found: dict[str, Any] = {"rows": rows, "inputs": inputs, "outputs": outputs}
    start = time.perf_counter()
    onednn(x[1:], weight)
    first = time.perf_counter() - start
    found["first_ms"] = 1e3 * (first - min(seconds_of(lambda: onednn(x[1:], weight)) for _ in range(2)))
    exact = x.double() @ weight.double().t()
    for name, way in WAYS.items():
        found[f"error, {name}"] = float((way(x, weight) - exact).norm() / exact.norm())
    for what, (a, b) in pairs.items():
        flop = 2 * a.shape[0] * a.shape[1] * b.shape[0]
        best = dict.fromkeys(WAYS, float("inf"))
        for _ in range(ROUNDS):
            for name, way in WAYS.items():
                best[name] = min(best[name], seconds_of(functools.partial(way, a, b)))
        found |= {f"{what}, {name}": flop / seconds / 1e9 for name, seconds in best.items()}
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    head = [*found[0]]
    return aligned(
        [head, *([number(each[name]) if each[name] >= 1 else f"{each[name]:.2g}" for name in head] for each in found)]
    )


def main() -> None:
    parser = program.parser("products", __doc__, out="products.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512, 4096], metavar="R")
    options = parser.parse_args()
    prepare_device(1)
    torch.manual_seed(0)
    found = [measured(rows, *shape) for shape in SHAPES for rows in options.rows]
    print(table(found))
    print(f"the trainer takes oneDNN on this machine: {dense.onednn_is_faster()}")
    program.write(options.out, {"facts": machine.facts(), "results": found})


if __name__ == "__main__":
    main()
