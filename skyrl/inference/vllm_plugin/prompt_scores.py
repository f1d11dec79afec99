"""The plugin's own prompt logprobs: of named tokens, and of tokens drawn from the model's distribution.

Knows logprobs of prompt positions, on any device, and the layout of the tensors that vLLM sends to its API server.
`first_runner` and `second_runner` call it from vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from skyrl.inference.vllm_plugin.extra_args import PromptScores

logger = logging.getLogger("vllm.skyrl_plugin")

GREEDY_BELOW = 1e-5
"""vLLM's own bound: at lower temperatures vLLM takes the most likely token."""
_BLOCK_PROBABILITIES = 2**18
"""Probabilities computed at a time: 2 MiB, which fits a core's cache and takes half the time of larger blocks."""


class ScoredPrompt:
    """One request's prompt, scored in one forward pass or, with chunked prefill, in several.

    vLLM sends `token_ids` (int32) and `logprobs` (float32), [rows, columns], and `ranks` (int32), [rows], all of them
    in the host's memory. vLLM fills the `own_rows` of the prompt's own tokens; this class fills the rows after them.
    """

    def __init__(self, requested: PromptScores, prompt_tokens: int, columns: int, temperature: float) -> None:
        """`columns`: the number of tokens that vLLM keeps per row, including the prompt's own token."""
        self._requested = requested
        self.own_rows = prompt_tokens - 1
        self._next_row = 0
        self._temperature = temperature
        self._uniforms = np.random.default_rng(requested.seed).random((self.own_rows, requested.draws))
        rows = self.own_rows + requested.appended(prompt_tokens)
        self.token_ids = torch.zeros((rows, columns), dtype=torch.int32)
        # JSON has no NaN: if a row is never written, the request fails, instead of giving a wrong number.
        self.logprobs = torch.full((rows, columns), torch.nan)
        self.ranks = torch.zeros(rows, dtype=torch.int32)

    def continued_at(self, row: int) -> ScoredPrompt:
        """Set the row at which `add` continues (0 again after vLLM has preempted the request). Returns itself."""
        self._next_row = row
        return self

    def add(self, logprobs: torch.Tensor) -> None:
        """Write the requested logprobs of the next rows. `logprobs`: float32 [rows, vocabulary]."""
        first, last = self._next_row, self._next_row + logprobs.shape[0]
        self._next_row = last
        cells = np.flatnonzero((self._requested.rows >= first) & (self._requested.rows < last))
        self._write(
            torch.from_numpy(self.own_rows + cells),
            torch.from_numpy(self._requested.ids[cells].astype(np.int64)),
            logprobs,
            torch.from_numpy(self._requested.rows[cells].astype(np.int64) - first),
        )
        draws = self._requested.draws
        if draws:
            start = self.own_rows + len(self._requested.rows)
            self._write(
                torch.arange(start + first * draws, start + last * draws),
                draw(logprobs, torch.from_numpy(self._uniforms[first:last]), self._temperature).flatten(),
                logprobs,
                torch.arange(logprobs.shape[0]).repeat_interleave(draws),
            )

    def _write(self, at: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the same token into every column: vLLM's map of a row from token to logprob then has one entry."""
        self.token_ids[at] = ids.to("cpu", torch.int32)[:, None]
        self.logprobs[at] = logprobs[rows.to(logprobs.device), ids.to(logprobs.device)].cpu()[:, None]


def scored_prompt(
    xargs: Mapping[str, Any] | None, prompt_tokens: int | None, *, vocab_size: int, columns: int, temperature: float
) -> ScoredPrompt | None:
    """None when the request asks only for vLLM's own prompt logprobs, or when its `extra_args` are invalid: an
    exception here would end the engine for all requests. `prompt_tokens` is None for a prompt of embeddings."""
    if prompt_tokens is None:
        return None
    try:
        requested = PromptScores.from_extra_args(xargs, prompt_tokens, vocab_size)
    except ValueError as error:
        logger.error("a request's vllm_xargs are ignored: %s", error)
        return None
    return None if requested is None else ScoredPrompt(requested, prompt_tokens, columns, temperature)


def draw(logprobs: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> torch.Tensor:
    """Tokens from softmax(logprobs / temperature), int64 [rows, draws], one for each of `uniforms` (float64, [0, 1)).

    `logprobs`: float32 [rows, vocabulary]. The token drawn is the first whose cumulated probability is above the
    uniform number.
    """
    if temperature < GREEDY_BELOW:
        return logprobs.argmax(dim=-1, keepdim=True).expand(-1, uniforms.shape[1])
    drawn, uniforms = [], uniforms.to(logprobs.device)
    rows = max(1, _BLOCK_PROBABILITIES // logprobs.shape[1])
    for block, chances in zip(logprobs.split(rows), uniforms.split(rows), strict=True):
        cumulated = block.double().div_(temperature).softmax(dim=-1).cumsum(dim=-1)
        found = torch.searchsorted(cumulated, chances * cumulated[:, -1:], right=True)
        drawn.append(found.clamp_(max=block.shape[1] - 1))
    return torch.cat(drawn)
