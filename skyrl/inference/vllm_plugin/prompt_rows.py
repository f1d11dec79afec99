"""Logits of prompts: to which rows of a forward pass they belong, and the adapter of each of these rows.

vLLM keeps one adapter per request for logits, because a request samples from one row. Logits of a prompt have one row
per token. With them vLLM uses the adapters of other requests, or none, and says nothing (seen in 0.32.0 on CPUs and
GPUs). Its runners take the rows of a prompt from the tensor of the pass's hidden states, so the place of the rows in
that tensor is their place in the map from each row of the pass to its adapter. This also holds for a part of a prompt,
and for parts of several prompts together.

Knows tensors and slots. Knows nothing of requests or of how a runner is patched.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

PART_LOGITS = 3 * 2**22
"""Logits of a prompt that are computed at a time: 48 MiB in float32, 82 rows with 152k tokens. All tensors of a part
together take about three times as much. vLLM's profile of memory does not count them."""

_rows: slice | None = None
"""The rows of the forward pass whose logits this process is computing; None for logits of one row per request."""


class PromptLogits:
    """vLLM's `compute_logits` for consecutive rows of one forward pass. A call tells vLLM's layer for adapters on
    lm_head which rows these are.

    `start` is the first row of the last call, in the pass."""

    def __init__(self, compute_logits: Callable[[torch.Tensor], torch.Tensor], hidden_states: torch.Tensor) -> None:
        """`hidden_states`: [rows of the pass, width], of which each call gets a slice."""
        self._compute_logits = compute_logits
        self._hidden_states = hidden_states
        self.start = 0

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocabulary] of `rows` [n, width]. Raises RuntimeError when they are not a slice of the pass."""
        global _rows
        whole = self._hidden_states
        if rows.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            raise RuntimeError("logits of a prompt are not computed from the hidden states of the forward pass")
        self.start = (int(rows.storage_offset()) - int(whole.storage_offset())) // int(whole.stride(0))
        _rows = slice(self.start, self.start + rows.shape[0])
        try:
            return self._compute_logits(rows)
        finally:
            _rows = None


def part_rows(vocabulary: int) -> int:
    """The most rows of a prompt whose logits are computed at a time."""
    return max(1, PART_LOGITS // vocabulary)


def prompt_slots(row_slots: torch.Tensor) -> list[int] | None:
    """The adapter of each row of a prompt whose logits are being computed; None when they are not those of a prompt.
    `row_slots`: the adapter of each row of the pass."""
    return None if _rows is None else row_slots[_rows].tolist()
