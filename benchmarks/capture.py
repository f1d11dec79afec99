"""Counts what keeps micro-batches from CUDA graphs: which operations they run, and where the host waits for the device.
Counts alone, of the tiny model on a CPU.

Usage: python -m benchmarks.capture [--micro-batches N]

A CUDA graph can be replayed for a micro-batch that runs the same operations with the same shapes.
"""

from __future__ import annotations

import collections
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from benchmarks import program
from benchmarks.operation_counts import DeviceWork
from benchmarks.table import aligned
from benchmarks.trainer_rows import Shape
from benchmarks.trainer_ways import spec
from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.trainer.protocol import TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend

VOCABULARY, RANK, MOST_ADAPTERS = 256, 8, 4
COPIES = "copies to the device"
SAME = Shape(1, 4, (0, 0), (40, 40))
OTHER_LENGTHS = Shape(1, 4, (0, 0), (10, 60))
GROUPS = Shape(1, 6, (40, 80), (5, 30))


def _batch(shapes: Sequence[Shape], adapters: tuple[int, int], seed: int) -> list[TrainingPass]:
    rng = np.random.default_rng(seed)
    passes: list[TrainingPass] = []
    for number in range(rng.integers(*adapters, endpoint=True)):
        shape = shapes[int(rng.integers(len(shapes)))]
        passes.append(TrainingPass(f"m{number}", shape.data(VOCABULARY, 100 * seed + number), shape.loss_fn))
    return passes


KINDS: dict[str, tuple[Sequence[Shape], tuple[int, int]]] = {
    "same lengths": ([SAME], (2, 2)),
    "other lengths": ([OTHER_LENGTHS], (2, 2)),
    "1 to 4 adapters": ([OTHER_LENGTHS], (1, MOST_ADAPTERS)),
    "shared prompts": ([OTHER_LENGTHS, GROUPS], (1, MOST_ADAPTERS)),
}
"""The micro-batches of a row: shapes, and how many adapters, of which each has a pass."""


class _Trace(DeviceWork):
    """Notes every operation: its name and the shapes of its tensors. `waits`: by the line that makes the host wait.
    `copies`: to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, tuple[Any, ...]]] = []
        self.waits: collections.Counter[str] = collections.Counter()
        self.copies = 0

    def started(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        shapes = tuple(tuple(each.shape) for each in args if isinstance(each, Tensor))
        self.operations.append((name, shapes))

    def waited(self) -> None:
        own = [each for each in traceback.extract_stack() if "/skyrl/" in each.filename]
        self.waits[f"{own[-1].filename.rpartition('/')[2]}: {own[-1].line}"] += 1

    def uploaded(self) -> None:
        self.copies += 1


def _backend() -> LoraBackend:
    settings = {"trainer.merge_passes": True, "trainer.micro_batch_tokens": 4096}
    backend = LoraBackend(load_config({"base_model": str(model_path()), "backend_config": settings}))
    for number in range(MOST_ADAPTERS):
        backend.create_model(f"m{number}", spec(RANK, number))
    return backend


def _run(backend: LoraBackend, passes: Sequence[TrainingPass]) -> None:
    for outcome in backend.run(passes):
        if isinstance(outcome, Exception):
            raise outcome


def traced(count: int) -> None:
    """Print how many different sequences of operations the micro-batches of each kind have."""
    table: list[tuple[str, ...]] = [
        ("micro-batches", "operations, views too", "different names", "different shapes", "host waits", COPIES)
    ]
    lines: collections.Counter[str] = collections.Counter()
    for kind, (shapes, adapters) in KINDS.items():
        backend = _backend()
        _run(backend, _batch(shapes, adapters, count))  # the first one measures what a row keeps
        traces: list[_Trace] = []
        for seed in range(count):
            passes = _batch(shapes, adapters, seed)
            with _Trace() as trace:
                _run(backend, passes)
            traces.append(trace)
            lines |= trace.waits
        names = {tuple(name for name, _ in each.operations) for each in traces}
        whole = {tuple(each.operations) for each in traces}
        sizes = [len(each.operations) for each in traces]
        waits = [sum(each.waits.values()) for each in traces]
        ranges = [f"{min(of_each)} to {max(of_each)}" for of_each in (sizes, waits, [each.copies for each in traces])]
        table.append((f"{count}, {kind}", ranges[0], str(len(names)), str(len(whole)), *ranges[1:]))
    print(aligned(table))
    print("\nwhere the host waits, at most so often in a micro-batch:")
    for line, times in lines.most_common():
        print(f"{times:4}  {line}")


def main() -> None:
    parser = program.parser("capture", __doc__)
    parser.add_argument("--micro-batches", type=int, default=30, help="of each kind (default: 30)")
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    traced(options.micro_batches)


if __name__ == "__main__":
    main()
