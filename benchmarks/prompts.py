"""Which tokens are sent, and which ones the null upstream answers to them: a mixed-up result shows."""

from __future__ import annotations

VARIANTS = 64
FIRST, RANGE = 3, 400
"""Token ids are FIRST to FIRST + RANGE - 1."""


def prompt(index: int, tokens: int) -> list[int]:
    """Sample `index`'s prompt; its first token says which of the 64 variants it is."""
    return [FIRST + (index % VARIANTS + 7 * position) % RANGE for position in range(tokens)]


def variant(first_token: int) -> int:
    return (first_token - FIRST) % VARIANTS


def answer(variant: int, tokens: int) -> list[int]:
    """What the null upstream generates for a prompt of this variant."""
    return [FIRST + (5 * variant + position) % RANGE for position in range(tokens)]
