"""The longest sequence that a vLLM on a CPU serves, where no key says it: as long as the machine's memory easily holds.

Knows config.json and the machine's memory. All processes of a server come to the same number: it follows from the
memory of the machine, or the limit of its container, and not from what is free at the moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.inference.model_options import kv_cache_bytes

LEAST, MOST = 4_096, 32_768
"""In tokens. Coding agents begin with 8,500 to 27,000."""
BATCH = 8_192
"""vLLM computes so many tokens at once at least, or one prompt of the longest length: prompts are not split on a
CPU."""
SHARE = 1 / 3
"""The part of the machine's memory that cache and longest prompt may take, if they take more than with LEAST tokens."""
_WIDTHS = 8
"""Numbers of the hidden width that vLLM keeps for each token of a prompt, besides three of an MLP's width."""


def longest_context(model: Mapping[str, Any], sequences: int, memory: float) -> int:
    """A power of two between LEAST and MOST, or the model's own length if that is less. `model` is the text model's
    part of config.json, `sequences` how many run at a time, `memory` the bytes of the machine."""
    own = model.get("max_position_embeddings")
    if own is None:
        return LEAST
    least = _bytes(model, min(LEAST, own), sequences)
    length = MOST
    while length > LEAST:
        chosen = min(length, own)
        if _bytes(model, chosen, sequences) <= max(least, memory * SHARE):
            return chosen
        length //= 2
    return min(LEAST, own)


def longest_step(length: int) -> float:
    """How many times as long as a batch of BATCH tokens a prompt of `length` takes at most: attention grows with the
    square."""
    return max(1.0, length / BATCH) ** 2


def _bytes(model: Mapping[str, Any], length: int, sequences: int) -> float:
    """The cache, and what the tokens of a batch keep."""
    return kv_cache_bytes(dict(model), length, sequences) + batch_bytes(model, max(BATCH, length))


def batch_bytes(model: Mapping[str, Any], tokens: int) -> float:
    """What the tokens that vLLM computes at once keep meanwhile, in float32."""
    hidden = model.get("hidden_size", 0)
    return 4.0 * tokens * (_WIDTHS * hidden + 3 * (model.get("intermediate_size") or 4 * hidden))
