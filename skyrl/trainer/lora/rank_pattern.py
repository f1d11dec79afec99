"""The rank of each layer of an adapter, by PEFT's `rank_pattern`, and the pattern that its files have.

A layer is known by the name that the trainer gives it: of experts `<experts>.<projection>`, all experts of a layer
together. Files have a name for each expert. Knows nothing of tensors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from skyrl.base.types.weights import RankPattern


def ranks_of(rank: int, pattern: RankPattern, names: Sequence[str]) -> tuple[int, ...]:
    """The rank of each layer of an adapter of rank `rank`."""
    if not pattern:
        return (rank,) * len(names)
    return tuple(rank if place is None else pattern[place][1] for place in _first_matches(pattern, tuple(names)))


def without_layer(pattern: RankPattern, names: Sequence[str]) -> list[str]:
    """The expressions that give no layer its rank."""
    deciding = set(_first_matches(pattern, tuple(names)))
    return [expression for place, (expression, _) in enumerate(pattern) if place not in deciding]


@functools.lru_cache(maxsize=64)
def _first_matches(pattern: RankPattern, names: tuple[str, ...]) -> tuple[int | None, ...]:
    """For each name, the place of the first expression that matches it. Cached: a save asks again, and a pattern may
    take a second."""
    expressions = [re.compile(rf"(.*\.)?({expression})$") for expression, _ in pattern]
    return tuple(
        next((place for place, expression in enumerate(expressions) if expression.match(name)), None) for name in names
    )


_NUMBERED = re.compile(r"(.*\blayers\\\.)(\d+)(\\\..*)")


def written_pattern(rank: int, ranks: Mapping[str, int]) -> dict[str, int]:
    """PEFT's `rank_pattern` of an adapter of rank `rank`. ranks: of each layer, by an expression that matches the
    layer's whole names alone, in which dots are escaped. Expressions that differ in the number of the decoder layer
    become one, because vLLM tries all expressions on all layers. Their order does not matter."""
    found: dict[str, int] = {}
    numbers: dict[tuple[str, str, int], list[str]] = {}
    for expression, own in ranks.items():
        if own == rank:
            continue
        if (parts := _NUMBERED.fullmatch(expression)) is None:
            found[expression] = own
        else:
            numbers.setdefault((parts[1], parts[3], own), []).append(parts[2])
    return found | {f"{before}(?:{'|'.join(of)}){after}": own for (before, after, own), of in numbers.items()}
