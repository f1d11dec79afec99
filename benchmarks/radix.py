"""Lookup and insertion of the radix cache among few and many prompts.

A row of `make bench`: `--only radix`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from benchmarks.stage import Stage
from benchmarks.table import Row, Target
from skyrl.router.radix.cache import RadixCache
from skyrl.router.radix.trajectory import Sample

SIZES = (100, 1_000, 16_000)
LOOKUPS = 200
ROUNDS = 5


def _encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def _microseconds(call: Callable[[str], object], texts: list[str]) -> float:
    """The median over rounds of the mean time of a call."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for text in texts:
            call(text)
        rounds.append((time.perf_counter() - began) / len(texts) * 1e6)
    return statistics.median(rounds)


def measure(count: int) -> dict[str, float]:
    """Microseconds per lookup and per insertion with `count` stored prompts of about 300 characters."""
    source = random.Random(0)
    prompts = ["Question: " + "".join(source.choices("abcdefgh ", k=200)) for _ in range(count)]
    ids = list(range(100))
    span = Sample("".join(source.choices("xyz", k=100)), ids, [-1.0] * 100, [(at, at) for at in range(1, 101)])
    cache = RadixCache(_encode, max_bytes=2**40)
    began = time.perf_counter()
    for prompt in prompts:
        cache.store(cache.prompt(prompt), span, "0")
    inserted = time.perf_counter()
    asked = [prompt + span.text + " more" for prompt in source.choices(prompts, k=LOOKUPS)]
    return {
        "prompts": count,
        "lookup_us": _microseconds(cache.prompt, asked),
        "insert_us": (inserted - began) / count * 1e6,
        "bytes_per_prompt": cache.bytes / count,
    }


def compare(stage: Stage) -> list[Row]:
    results = [measure(count) for count in SIZES]
    stage.raw += [{"row": "radix", "path": "radix"} | result for result in results]
    rows: list[Row] = []
    for result in results:
        note = f"insertion {result['insert_us']:.0f} µs; {result['bytes_per_prompt'] / 1e3:.1f} kB per prompt"
        what = f"lookup among {result['prompts']:,.0f} prompts"
        rows.append(Row("radix", what, "µs", result["lookup_us"], note=note))
    growth = results[-1]["lookup_us"] / results[0]["lookup_us"]
    what = f"lookup among {SIZES[-1]:,} prompts over lookup among {SIZES[0]}"
    return [*rows, Row("radix", what, "", growth, Target(1.5))]
