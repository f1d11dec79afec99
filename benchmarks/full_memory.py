"""Memory of full fine-tuning on this machine's CPU, in bytes for each parameter of the model.

Usage: python -m benchmarks.full_memory

The model: "quarter" of `benchmarks.models`, 144 million parameters. One device, and 1 to 3 ranks, each in a process of
its own. "held" is what the weights, moments and the gradient take by their sizes; "anonymous" is how much memory the
process has in all, besides mapped files, more than before it loaded the model. With ranks both are those of the rank
with the most. Memory does not depend on the load of the machine.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.models import make_quarter
from skyrl.backends.base import AdamParams, Backend, Datum, TrainingPass
from skyrl.backends.torch_full.backend import TorchFullBackend
from skyrl.backends.torch_full.rank import FullRank
from skyrl.backends.torch_full.sharded import ShardedFullBackend
from skyrl.backends.torch_lora.over_ranks import rank_settings
from skyrl.config.loading import load_config
from skyrl.config.server import ServerConfig
from skyrl.types.lora import LoraSpec
from tests.local_ranks import LocalRanks

RANKS = (1, 2, 3)
SEQUENCES, TOKENS = 4, 16
COLUMNS = ("ranks", "", "created", "after a step", "after the next pass")
Row = tuple[str, ...]


def anonymous_bytes() -> int:
    """The resident memory of this process that belongs to no file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class MeasuredRank(FullRank):
    """A rank whose process serves no other group."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._before = anonymous_bytes()

    def measured(self) -> tuple[int, int]:
        """The bytes that are held, and the growth of anonymous memory."""
        memory = self.memory()
        held = memory["weights"] + memory["moments"] + memory["gradient"]
        return held, anonymous_bytes() - self._before


def moments_of(backend: Backend, measure: Callable[[], tuple[int, int]]) -> list[tuple[int, int]]:
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


def on_one_device(config: ServerConfig) -> list[tuple[int, int]]:
    """In a process of its own."""
    before = anonymous_bytes()
    backend = TorchFullBackend(config)

    def measure() -> tuple[int, int]:
        parameters = backend._parameters("m")
        buffers = (parameters.exp_avg, parameters.exp_avg_sq, parameters.gradient, *parameters.weights.values())
        return sum(each.nbytes for each in buffers if each is not None), anonymous_bytes() - before

    return moments_of(backend, measure)


def on_ranks(config: ServerConfig, ranks: int) -> list[tuple[int, int]]:
    group = LocalRanks(ranks, rank_settings(config), MeasuredRank)
    backend = ShardedFullBackend(config, group)

    def measure() -> tuple[int, int]:
        held, anonymous = zip(*group.call("measured"), strict=True)
        return max(held), max(anonymous)

    found = moments_of(backend, measure)
    backend.close()
    return found


def rows(name: str, found: list[tuple[int, int]], parameters: int) -> list[Row]:
    held, anonymous = zip(*found, strict=True)
    return [
        (name, "held", *(f"{each / parameters:.2f}" for each in held)),
        ("", "anonymous", *(f"{each / parameters:.2f}" for each in anonymous)),
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
