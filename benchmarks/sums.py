"""The task of `benchmarks.real_step`: sums of two digits, the same for every trainer. Needs only Python, because the
trainer of a peer has an environment of its own."""

from __future__ import annotations

import random
import re


def questions(seed: int, step: int, count: int) -> list[tuple[str, int]]:
    """Questions of one step, each with its answer."""
    draw = random.Random(f"{seed}/{step}")
    sums = [(draw.randrange(1, 10), draw.randrange(1, 10)) for _ in range(count)]
    return [(f"Compute {a} + {b}. Answer with the number alone.", a + b) for a, b in sums]


def reward(text: str, expected: int) -> float:
    """1 for the number alone, 0.5 where it is the first number of the answer, else 0."""
    if text.removesuffix("<|im_end|>").strip() == str(expected):
        return 1.0
    numbers = re.findall(r"\d+", text)
    return 0.5 if numbers and int(numbers[0]) == expected else 0.0
