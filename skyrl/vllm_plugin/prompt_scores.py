"""The plugin's own prompt logprobs: of named tokens, and of tokens drawn from the model's distribution.

Knows logprobs of prompt positions and the layout of what vLLM sends to its API server. Deliberately knows nothing of
vLLM itself, and not how it gets called (that is `cpu_patches`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from skyrl.vllm_plugin.xargs import PromptScores

logger = logging.getLogger("vllm.skyrl_plugin")

GREEDY_BELOW = 1e-5
"""vLLM's own bound: at lower temperatures it takes the best token."""
_AT_ONCE = 2**18
"""Probabilities held at a time: 2 MiB, which stays in a core's cache and takes half the time of larger blocks."""


class ScoredPrompt:
    """One request's prompt, scored in one pass or (chunked prefill) in several.

    What vLLM sends: `token_ids` (int32) and `logprobs` (float32), [rows, columns], and `ranks` (int32), [rows]. vLLM
    fills the rows of the prompt's own tokens, this class those after them.
    """

    def __init__(self, asked: PromptScores, prompt_tokens: int, columns: int, temperature: float) -> None:
        """`columns`: what vLLM keeps per row, the prompt's own token included."""
        self._asked = asked
        self._own_rows = prompt_tokens - 1
        self._next_row = 0
        self._temperature = temperature
        self._uniforms = np.random.default_rng(asked.seed).random((self._own_rows, asked.draws))
        rows = self._own_rows + asked.appended(prompt_tokens)
        self.token_ids = torch.zeros((rows, columns), dtype=torch.int32)
        # JSON has no NaN: a row that is never written makes the request fail, not lie.
        self.logprobs = torch.full((rows, columns), torch.nan)
        self.ranks = torch.zeros(rows, dtype=torch.int32)

    def continued_at(self, row: int) -> ScoredPrompt:
        """Itself; the next rows to be added start there (again at 0 after vLLM took the request off its batch)."""
        self._next_row = row
        return self

    def add(self, logprobs: torch.Tensor) -> None:
        """Write what was asked of the next rows: float32 [rows, vocabulary]."""
        first, last = self._next_row, self._next_row + logprobs.shape[0]
        self._next_row = last
        cells = np.flatnonzero((self._asked.rows >= first) & (self._asked.rows < last))
        self._write(
            torch.from_numpy(self._own_rows + cells),
            torch.from_numpy(self._asked.ids[cells].astype(np.int64)),
            logprobs,
            torch.from_numpy(self._asked.rows[cells].astype(np.int64) - first),
        )
        draws = self._asked.draws
        if draws:
            start = self._own_rows + len(self._asked.rows)
            self._write(
                torch.arange(start + first * draws, start + last * draws),
                draw(logprobs, torch.from_numpy(self._uniforms[first:last]), self._temperature).flatten(),
                logprobs,
                torch.arange(logprobs.shape[0]).repeat_interleave(draws),
            )

    def _write(self, at: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, rows: torch.Tensor) -> None:
        """Every column holds the same token: in vLLM's map of a row they are one entry."""
        self.token_ids[at] = ids.to(torch.int32)[:, None]
        self.logprobs[at] = logprobs[rows, ids][:, None]


def scored_prompt(
    xargs: Mapping[str, Any] | None, prompt: list[int] | None, *, vocab_size: int, columns: int, temperature: float
) -> ScoredPrompt | None:
    """None when nothing is asked for beside vLLM's own prompt logprobs.

    Nor when it cannot be answered: an exception here would end the engine for everybody.
    """
    if prompt is None:
        return None
    try:
        asked = PromptScores.from_xargs(xargs, len(prompt), vocab_size)
    except ValueError as error:
        logger.error("a request's vllm_xargs are ignored: %s", error)
        return None
    return None if asked is None else ScoredPrompt(asked, len(prompt), columns, temperature)


def draw(logprobs: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> torch.Tensor:
    """Tokens from softmax(logprobs / temperature), int64 [rows, draws], one for each of `uniforms` (float64, [0, 1)).

    `logprobs` float32 [rows, vocabulary]. A token is where the cumulated probability passes the uniform number.
    """
    if temperature < GREEDY_BELOW:
        return logprobs.argmax(dim=-1, keepdim=True).expand(-1, uniforms.shape[1])
    drawn = []
    rows = max(1, _AT_ONCE // logprobs.shape[1])
    for block, chances in zip(logprobs.split(rows), uniforms.split(rows), strict=True):
        cumulated = block.double().div_(temperature).softmax(dim=-1).cumsum(dim=-1)
        found = torch.searchsorted(cumulated, chances * cumulated[:, -1:], right=True)
        drawn.append(found.clamp_(max=block.shape[1] - 1))
    return torch.cat(drawn)
