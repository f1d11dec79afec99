"""From how many saved rows on a shared prefix pays: `prefixes.MIN_SAVED_ROWS`.

Run as `python -m benchmarks.sharing [--models tiny wide] [--rounds N]`.
A step trains 32 sequences. Pairs of them begin with the same tokens, so that each prefix saves as many rows as it has.
The batch is trained with all prefixes shared and with none, in turns, on one thread. CPU time counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.models import make_long_tiny, make_wide
from benchmarks.trainer_rows import RANK, TenantPass
from benchmarks.trainer_ways import SkyrlWay
from skyrl.training.backends.base import Datum
from skyrl.training.backends.torch_lora import prefixes

MODELS = {"tiny": make_long_tiny, "wide": make_wide}
SEQUENCES = 32
REST = 40
"""Tokens of a sequence after its prefix."""
SAVED = (8, 12, 16, 24, 48, 96)
ALL, NONE = 1, 10**9
"""Values of `MIN_SAVED_ROWS`."""


def batch(saved: int, vocabulary: int) -> list[Datum]:
    rng = np.random.default_rng(saved)
    found: list[Datum] = []
    for _ in range(SEQUENCES // 2):
        prefix = rng.integers(0, vocabulary, saved)
        # The first tokens after the prefix differ, so that it is no longer than asked for
        for first in rng.permutation(vocabulary)[:2]:
            tokens = np.concatenate([prefix, [first], rng.integers(0, vocabulary, REST - 1)])
            found.append(Datum(tokens, {"target_tokens": np.roll(tokens, -1)}))
    return found


def ratios(model: str, saved: int, vocabulary: int, rounds: int) -> list[float]:
    """Of each round: time without sharing over time with it."""
    way = SkyrlWay(model, 1, merge=False)
    way.start([TenantPass(RANK, "cross_entropy", batch(saved, vocabulary))])
    found: list[float] = []
    for _ in range(rounds + 1):  # the first one does not count
        seconds: dict[int, float] = {}
        for least in (ALL, NONE):
            prefixes.MIN_SAVED_ROWS = least
            start = time.process_time()
            way.step()
            seconds[least] = time.process_time() - start
        found.append(seconds[NONE] / seconds[ALL])
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help="tiny, wide")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind (default: 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="skyrl-sharing-") as directory:
        for name in options.models:
            model = MODELS[name](Path(directory) / name)
            for saved in SAVED:
                found = ratios(model, saved, 512, options.rounds)
                middle, low, high = statistics.median(found), min(found), max(found)
                print(f"{name}, {saved} rows saved by each prefix: {middle:.2f} ({low:.2f} to {high:.2f})", flush=True)


if __name__ == "__main__":
    main()
