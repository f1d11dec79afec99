"""What the trainer's ranks cost on this machine's CPU: parameters and memory of each rank, seconds for each step.

Usage: python -m benchmarks.ranks [--only tiny|quarter] [--steps N]

The models: the tiny one, and "quarter", random weights with the layers of Qwen3-0.6B, a quarter of them (7), and a
vocabulary of 32,768: 144 million parameters, float32. For each number of ranks new processes. The ranks share the
machine's cores, so with more ranks than cores a step gets no faster. A step is one forward_backward of 16 sequences of
96 tokens and one optim_step, with an adapter of rank 8 on all layers. Without Ray: a call takes about a millisecond.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.models import make_quarter
from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.base.types.lora import LoraSpec
from skyrl.training.backends.base import AdamParams, Datum, TrainingPass
from skyrl.training.backends.torch_lora.backend import TorchLoraBackend
from skyrl.training.backends.torch_lora.over_ranks import rank_settings
from skyrl.training.backends.torch_lora.rank import Rank
from skyrl.training.backends.torch_lora.sharded import ShardedBackend
from tests.local_ranks import LocalRanks

SEQUENCES, TOKENS = 16, 96
RANKS = (1, 2, 3)
TIMEOUT_S = 600.0
COLUMNS = ("model", "ranks", "parameters per rank", "of all", "RSS loaded", "peak RSS", "s per step", "loss")


class MeasuredRank(Rank):
    """A rank whose process serves no other group, so that its peak of memory is its own."""


def data(vocabulary: int) -> list[Datum]:
    rng = np.random.default_rng(0)
    text = rng.integers(0, vocabulary, (SEQUENCES, TOKENS + 1))
    return [Datum(row[:-1], {"target_tokens": row[1:]}) for row in text]


def seconds_per_step(backend: Any, steps: int) -> tuple[float, float]:
    """The median, and the loss of the last step."""
    backend.create_model("m", LoraSpec(8, 32.0, 0))
    taken: list[float] = []
    loss = 0.0
    for _ in range(steps + 1):
        began = time.perf_counter()
        (result,) = backend.run([TrainingPass("m", data(backend.limits.vocab_size), "cross_entropy")])
        backend.optim_step("m", AdamParams(1e-3))
        taken.append(time.perf_counter() - began)
        loss = result.metrics["loss:sum"]
    return statistics.median(taken[1:]), loss  # the first step warms up


def rows(name: str, path: str, steps: int) -> list[tuple[str, ...]]:
    config = load_config({"base_model": path, "backend_config": {"trainer.rank_timeout_s": TIMEOUT_S}})
    found: list[tuple[str, ...]] = []
    for ranks in RANKS:
        group = LocalRanks(ranks, rank_settings(config), MeasuredRank)
        backend = ShardedBackend(config, group)
        loaded = group.call("memory")
        seconds, loss = seconds_per_step(backend, steps)
        memory = group.call("memory")
        backend.close()
        held = max(each["parameters"] for each in memory)
        found.append(
            (
                name,
                str(ranks),
                f"{held:,}",
                f"1/{memory[0]['all_parameters'] / held:.2f}",
                f"{max(each['peak_rss'] for each in loaded) / 1e6:,.0f} MB",
                f"{max(each['peak_rss'] for each in memory) / 1e6:,.0f} MB",
                f"{seconds:.2f}",
                f"{loss:.6f}",
            )
        )
        print("  ".join(found[-1]), flush=True)
    alone = TorchLoraBackend(config)
    seconds, loss = seconds_per_step(alone, steps)
    found.append((name, "without ranks", "", "", "", "", f"{seconds:.2f}", f"{loss:.6f}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("tiny", "quarter"))
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start", flush=True)
    table: list[tuple[str, ...]] = [COLUMNS]
    if options.only != "quarter":
        table += rows("tiny", str(model_path()), options.steps)
    if options.only != "tiny":
        with TemporaryDirectory() as directory:
            table += rows("quarter", make_quarter(Path(directory)), options.steps)
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    print()
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
