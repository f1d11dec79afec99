"""Counts what keeps micro-batches from CUDA graphs and from torch.compile: which operations they run, where the host
waits for the device, and how often a compiled layer is compiled again. Counts alone, of the tiny model on a CPU.

Usage: python -m benchmarks.capture [--micro-batches N] [--compile layer norms] [--backend eager | inductor]

A CUDA graph can be replayed for a micro-batch that runs the same operations with the same shapes. `--compile` needs
minutes, and with inductor a C++ compiler.
"""

from __future__ import annotations

import argparse
import collections
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers.utils import logging

from benchmarks.operation_counts import DeviceWork
from benchmarks.table import aligned
from benchmarks.trainer_rows import Shape
from benchmarks.trainer_ways import spec
from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.trainer.protocol import TrainingPass
from skyrl.trainer.ranks.lora_backend import TorchLoraBackend

VOCABULARY, RANK, MOST_ADAPTERS = 256, 8, 4
WARM_UP = 5
"""Micro-batches after which nothing should be compiled any more."""
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


def _backend() -> TorchLoraBackend:
    settings = {"trainer.merge_passes": True, "trainer.micro_batch_tokens": 4096}
    backend = TorchLoraBackend(load_config({"base_model": str(model_path()), "backend_config": settings}))
    for number in range(MOST_ADAPTERS):
        backend.create_model(f"m{number}", spec(RANK, number))
    return backend


def _run(backend: TorchLoraBackend, passes: Sequence[TrainingPass]) -> None:
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


@contextmanager
def _compiled(backend: TorchLoraBackend, part: str, counter: CompileCounterWithBackend) -> Iterator[None]:
    """The decoder layers, or their norms, compiled for any number of rows."""
    torch._dynamo.reset()
    counters.clear()
    for layer in backend._base.packed.decoder_layers:
        norms = [module for module in layer.modules() if type(module).__name__.endswith("RMSNorm")]
        for module in [layer] if part == "layer" else norms:
            compiled: Any = torch.compile(module.forward, backend=counter, dynamic=True)
            module.forward = compiled
    with torch._dynamo.config.patch(recompile_limit=256):  # else dynamo gives up after 8, and runs without
        yield


def compiled(part: str, name: str, count: int) -> None:
    """Print how many graphs dynamo has made while the micro-batches of each kind ran."""
    table = [(f"{part}, {name}", "graphs", f"after {WARM_UP} micro-batches", "breaks", "failure")]
    for kind, (shapes, adapters) in KINDS.items():
        backend, counter = _backend(), CompileCounterWithBackend(name)
        graphs: list[int] = []
        failure = ""
        with _compiled(backend, part, counter):
            for seed in range(count):
                try:
                    _run(backend, _batch(shapes, adapters, seed))
                except Exception as error:
                    failure = type(error).__name__
                    break
                graphs.append(counter.frame_count)
        late = counter.frame_count - graphs[min(WARM_UP, len(graphs)) - 1] if graphs else 0
        breaks = sum(counters["graph_break"].values())
        ran = f"{len(graphs)} of {count}, {kind}"
        table.append((ran, str(counter.frame_count), str(late), str(breaks), failure))
    print(aligned(table))


PARTS: dict[str, Callable[[str, int], None]] = {
    "layer": lambda name, count: compiled("layer", name, count),
    "norms": lambda name, count: compiled("norms", name, count),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--micro-batches", type=int, default=30, help="of each kind (default: 30)")
    parser.add_argument("--compile", nargs="*", choices=PARTS, default=[], help="compile these, and count graphs")
    parser.add_argument(
        "--backend", choices=("eager", "inductor"), default="eager", help="of torch.compile (default: eager)"
    )
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    traced(options.micro_batches)
    for part in options.compile:
        print()
        PARTS[part](options.backend, options.micro_batches)


if __name__ == "__main__":
    main()
