"""The tokens of each prompt, and the tokens that the null upstream answers. They differ by variant, so that a result of
another request shows.
"""

from __future__ import annotations

VARIANTS = 64
PROMPT_TOKENS, MAX_TOKENS = 512, 64
"""Of every sample."""
FIRST, RANGE = 3, 400
"""Token ids are FIRST to FIRST + RANGE - 1."""


def prompt(index: int, tokens: int) -> list[int]:
    """The prompt of sample `index`. Its first token tells its variant, one of 64."""
    return [FIRST + (index % VARIANTS + 7 * position) % RANGE for position in range(tokens)]


def variant(first_token: int) -> int:
    return (first_token - FIRST) % VARIANTS


def answer(variant: int, tokens: int) -> list[int]:
    """The tokens that the null upstream generates for a prompt of this variant."""
    return [FIRST + (5 * variant + position) % RANGE for position in range(tokens)]
