"""Memory and time of one long sequence over ranks: `python -m benchmarks.long_ranks --tokens 16384 32768`.

A small model of Qwen3's architecture with random weights; a forward and a backward of one sequence, with layers that
are recomputed. First with one rank, then divided over several. The peak of a rank's resident memory counts above what
the rank has after a short pass. The vocabulary is small: logits are computed in chunks of a fixed size, which more
ranks do not make smaller.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks import program
from benchmarks.models import make_deep
from skyrl.base.config.loading import load_config
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.protocol import Datum, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.ranks.lora_rank import LoraRank
from skyrl.trainer.ranks.rank import RankSettings
from tests.local_ranks import LocalRanks

VOCABULARY = 512
SHORT = 1024
"""Tokens of the pass before the measurement; sequences of so many tokens are divided."""


class MeasuredRank(LoraRank):
    """Tells its resident memory in bytes, and the CPU seconds of its process."""

    def reset_peak(self) -> tuple[int, float]:
        """The memory now, from which a peak counts again, and the seconds so far."""
        Path("/proc/self/clear_refs").write_text("5")
        return psutil.Process().memory_info().rss, time.process_time()

    def peak(self) -> tuple[int, float]:
        """The largest memory since `reset_peak`, and the seconds so far."""
        lines = Path("/proc/self/status").read_text().splitlines()
        (peak,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        return peak * 1024, time.process_time()


@dataclass(frozen=True)
class Measured:
    """Of the rank with the most: bytes above the base, and CPU seconds. `logprobs`: float32 [tokens]."""

    above: int
    cpu_s: float
    wall_s: float
    logprobs: np.ndarray


def measure(path: str, ranks: int, tokens: int) -> Measured:
    settings = {
        "trainer.context_parallel_tokens": SHORT,
        "trainer.gradient_checkpointing": True,
        "trainer.rank_timeout_s": 3600.0,
    }
    config = load_config({"base_model": path, "backend_config": settings})
    group = LocalRanks(ranks, RankSettings.of(config), MeasuredRank)
    with closing(LoraBackend(config, group)) as backend:
        backend.create_model("m", LoraSpec(rank=8, alpha=32.0, seed=0))
        _run(backend, SHORT)
        before = group.call("reset_peak")
        started = time.monotonic()
        logprobs = _run(backend, tokens)
        wall_s = time.monotonic() - started
        after = group.call("peak")
    above = max(peak - base for (base, _), (peak, _) in zip(before, after, strict=True))
    cpu_s = max(last - first for (_, first), (_, last) in zip(before, after, strict=True))
    return Measured(above, cpu_s, wall_s, logprobs)


def _run(backend: LoraBackend, tokens: int) -> np.ndarray:
    text = np.random.default_rng(tokens).integers(0, VOCABULARY, tokens + 1)
    datum = Datum(text[:-1], {"target_tokens": text[1:]})
    (outcome,) = backend.run([TrainingPass("m", [datum], "cross_entropy", {})])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome.logprobs[0]


def main() -> None:
    parser = program.parser("long_ranks", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 32_768])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args()
    print("tokens | ranks | peak above the base, MB | of one rank | CPU s of a rank | wall s | largest difference")
    with tempfile.TemporaryDirectory() as directory:
        path = make_deep(Path(directory), options.layers, options.hidden, VOCABULARY, max(options.tokens))
        for tokens in options.tokens:
            one = measure(path, 1, tokens)
            for ranks, found in ((1, one), (options.ranks, measure(path, options.ranks, tokens))):
                share, apart = found.above / one.above, float(np.abs(found.logprobs - one.logprobs).max())
                print(
                    f"{tokens:,} | {ranks} | {found.above / 1e6:,.0f} | {share:.2f} | {found.cpu_s:.1f} | "
                    f"{found.wall_s:.1f} | {apart:.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
