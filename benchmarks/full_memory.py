"""Memory of full fine-tuning on this machine's CPU, in bytes for each parameter of the model.

Usage: python -m benchmarks.full_memory

The model: "quarter" of `benchmarks.models`, 144 million parameters. One device, and 1 to 3 ranks, each in a process of
its own. "held" is what the weights, moments and the gradient take by their sizes. "process" is the growth of the
process's memory since before it loaded the model, without mapped files; "trimmed" is the same after the allocator has
given freed memory back. With ranks all are those of the rank with the most. Memory does not depend on the load of the
machine.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.models import make_quarter
from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.lora import LoraSpec
from skyrl.training.backends.base import AdamParams, Backend, Datum, TrainingPass
from skyrl.training.backends.torch_full.backend import TorchFullBackend
from skyrl.training.backends.torch_full.rank import FullRank
from skyrl.training.backends.torch_full.sharded import ShardedFullBackend
from skyrl.training.backends.torch_lora.over_ranks import rank_settings
from tests.local_ranks import LocalRanks

RANKS = (1, 2, 3)
SEQUENCES, TOKENS = 4, 16
COLUMNS = ("ranks", "", "created", "after a step", "after the next pass")
FIGURES = ("held", "process", "trimmed")
Row = tuple[str, ...]
Figures = tuple[int, int, int]
"""Bytes, in the order of `FIGURES`."""


def anonymous_bytes() -> int:
    """The resident memory of this process that belongs to no file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def growth(since: int) -> tuple[int, int]:
    """How much anonymous memory has grown, before and after freed memory is given back."""
    untrimmed = anonymous_bytes() - since
    ctypes.CDLL(None).malloc_trim(0)
    return untrimmed, anonymous_bytes() - since


class MeasuredRank(FullRank):
    """A rank whose process serves no other group."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._before = anonymous_bytes()

    def measured(self) -> Figures:
        memory = self.memory()
        return memory["weights"] + memory["moments"] + memory["gradient"], *growth(self._before)


def moments_of(backend: Backend, measure: Callable[[], Figures]) -> list[Figures]:
    """Measure a model after its creation, after a step, and after the next pass."""
    text = np.random.default_rng(0).integers(0, backend.limits.vocab_size, (SEQUENCES, TOKENS + 1))
    one_pass = TrainingPass("m", [Datum(row[:-1], {"target_tokens": row[1:]}) for row in text], "cross_entropy")
    backend.create_model("m", LoraSpec(0, 32.0, 0))
    found = [measure()]
    backend.run([one_pass])
    backend.optim_step("m", AdamParams())
    found.append(measure())
    backend.run([one_pass])
    found.append(measure())
    return found


def on_one_device(config: ServerConfig) -> list[Figures]:
    """In a process of its own."""
    before = anonymous_bytes()
    backend = TorchFullBackend(config)

    def measure() -> Figures:
        parameters = backend._parameters("m")
        buffers = (parameters.exp_avg, parameters.exp_avg_sq, parameters.gradient, *parameters.weights.values())
        return sum(each.nbytes for each in buffers if each is not None), *growth(before)

    return moments_of(backend, measure)


def on_ranks(config: ServerConfig, ranks: int) -> list[Figures]:
    group = LocalRanks(ranks, rank_settings(config), MeasuredRank)
    backend = ShardedFullBackend(config, group)

    def measure() -> Figures:
        held, untrimmed, trimmed = (max(of_ranks) for of_ranks in zip(*group.call("measured"), strict=True))
        return held, untrimmed, trimmed

    found = moments_of(backend, measure)
    backend.close()
    return found


def rows(name: str, found: list[Figures], parameters: int) -> list[Row]:
    return [
        (name, figure, *(f"{size / parameters:.2f}" for size in sizes))
        for figure, sizes in zip(FIGURES, zip(*found, strict=True), strict=True)
    ]


def main() -> None:
    with TemporaryDirectory() as directory:
        path = make_quarter(Path(directory))
        trainer = {"trainer.full_finetuning": True, "trainer.rank_timeout_s": 600.0}
        config = load_config({"base_model": path, "backend_config": trainer})
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(on_one_device, (config,))
        parameters = found[0][0] // 4
        table: list[Row] = [COLUMNS, *rows("one device", found, parameters)]
        for ranks in RANKS:
            table += rows(str(ranks), on_ranks(config, ranks), parameters)
    print(f"bytes for each of {parameters:,} parameters, on the rank with the most")
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
