"""Lookup and insertion of the radix cache beside a naive tree, which scans children one by one and never splits.

Usage: python -m benchmarks.radix. Prints a table and writes benchmarks/results/radix.json.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from skyrl.router.radix.cache import RadixCache
from skyrl.router.radix.trajectory import Sample

SIZES = (100, 1_000, 16_000)
LOOKUPS = 200
ROUNDS = 5
OUT = Path(__file__).parent / "results" / "radix.json"


class NaiveTree:
    """Texts below the first stored text that is their beginning, else below the root."""

    def __init__(self) -> None:
        self.root: tuple[str, list, list[int]] = ("", [], [])

    def find(self, text: str) -> tuple[tuple[str, list, list[int]], str]:
        node = self.root
        while child := next((child for child in node[1] if text.startswith(child[0])), None):
            node, text = child, text[len(child[0]) :]
        return node, text

    def insert(self, text: str, ids: list[int]) -> None:
        node, rest = self.find(text)
        node[1].append((rest, [], ids))


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
    cache, naive = RadixCache(_encode, max_bytes=2**40), NaiveTree()
    began = time.perf_counter()
    for prompt in prompts:
        cache.store(cache.prompt(prompt), span, "0")
    inserted = time.perf_counter()
    for prompt in prompts:
        naive.insert(prompt + span.text, ids)
    naive_inserted = time.perf_counter()
    asked = [prompt + span.text + " more" for prompt in source.choices(prompts, k=LOOKUPS)]
    return {
        "prompts": count,
        "lookup_us": _microseconds(cache.prompt, asked),
        "naive_lookup_us": _microseconds(naive.find, asked),
        "insert_us": (inserted - began) / count * 1e6,
        "naive_insert_us": (naive_inserted - inserted) / count * 1e6,
        "bytes_per_prompt": cache.bytes / count,
    }


def main() -> None:
    rows = [measure(count) for count in SIZES]
    for row in rows:
        print("  ".join(f"{name} {value:,.1f}" for name, value in row.items()))
    print(
        f"lookup at {SIZES[-1]:,} / at {SIZES[0]}: {rows[-1]['lookup_us'] / rows[0]['lookup_us']:.2f} (target: ≤ 1.5)"
    )
    OUT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
