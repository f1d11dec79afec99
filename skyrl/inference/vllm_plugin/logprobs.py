"""Logprobs that vLLM does not give: of prompts, computed by parts, and the model's own under a grammar.

**Rows.** vLLM keeps one adapter per request for logits, because a request samples from one row. Logits of a prompt have
one row per token. With them vLLM uses the adapters of other requests, or none, and says nothing (seen in 0.32.0 on CPUs
and GPUs). Its runners take the rows of a prompt from the tensor of the pass's hidden states, so the place of the rows
in that tensor is their place in the map from each row of the pass to its adapter. This also holds for a part of a
prompt, and for parts of several prompts together.

**Scores.** `ScoredPrompt` has the logprobs of tokens that a request names, and of tokens drawn from the model's
distribution, in the layout of the tensors that vLLM sends to its API server.

**Grammars.** vLLM forbids tokens by setting their logits to minus infinity, and takes logprobs of what is left: up to
the whole logprob of a forced token is missing. The plugin keeps the logits from before, and puts the model's own
logprobs, after the temperature alone, in place of vLLM's. What the grammar forbids stays at minus infinity among the
alternatives. The token's rank says that its choice was narrowed: `~rank`, which is negative. With speculative decoding,
or where vLLM gives logits for logprobs, vLLM's numbers stay. vLLM's mode `raw_logprobs` is no way: it, too, looks at
the logits after the grammar, and at those before the temperature for all requests. Scoring such an answer again would
be a second pass over its prompt.

Knows tensors and slots. `model_runners` calls it from vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from skyrl.inference.vllm_plugin.protocol import PromptScores

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


logger = logging.getLogger("vllm.skyrl_plugin")

GREEDY_BELOW = 1e-5
"""vLLM's own bound: at lower temperatures vLLM takes the most likely token, and logprobs are those at 1."""
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


CONSTRAINED = "constrained"
RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
_ROWS = 128
"""Rows computed at a time in float32: 78 MB with 152k tokens."""


@dataclass(frozen=True)
class Unmasked:
    """The logits [rows, vocabulary] of those `rows` of a forward pass that a grammar is about to narrow. A copy, in
    vLLM's dtype: at most what the logits of the pass take."""

    rows: torch.Tensor
    logits: torch.Tensor


def unmasked(logits: torch.Tensor, rows: Sequence[int], bitmask: npt.NDArray[np.int32]) -> Unmasked | None:
    """Call before the grammar is applied. `rows`: the row of `logits` for each row of `bitmask` [rows, words], of which
    a bit is 0 where a token is forbidden. None if nothing is forbidden."""
    narrowed = _forbids(bitmask, logits.shape[1])
    chosen = [row for row, forbids in zip(rows, narrowed.tolist(), strict=True) if forbids]
    if not chosen:
        return None
    index = torch.tensor(chosen, device=logits.device)
    return Unmasked(index, logits[index])


def _forbids(bitmask: npt.NDArray[np.int32], vocabulary: int) -> npt.NDArray[np.bool_]:
    """Which rows forbid a token of the vocabulary. Bits after it are padding."""
    whole, rest = divmod(vocabulary, 32)
    forbids = (bitmask[:, :whole] != -1).any(axis=1)
    if rest and bitmask.shape[1] > whole:
        ones = np.uint32((1 << rest) - 1)
        forbids |= (bitmask[:, whole].view(np.uint32) & ones) != ones
    return forbids


def put_own(tensors: Any, before: Unmasked, temperatures: torch.Tensor | None, mode: str) -> None:
    """Put the model's own logprobs and the marks into vLLM's `LogprobsTensors`, in which the sampled token is the first
    of each row. `temperatures`: float32 [rows of the pass]; None: all requests are greedy. `mode`: vLLM's mode of
    logprobs; nothing is put in those of logits."""
    if mode not in (RAW, PROCESSED):
        return
    if mode == RAW:
        temperatures = None
    for rows, logits in zip(before.rows.split(_ROWS), before.logits.split(_ROWS), strict=True):
        scaled = logits.float()
        if temperatures is not None:
            chosen = temperatures[rows]
            scaled = scaled / torch.where(chosen < GREEDY_BELOW, 1.0, chosen)[:, None]
        own = scaled.gather(1, tensors.logprob_token_ids[rows].long()) - scaled.logsumexp(1, keepdim=True)
        given = tensors.logprobs[rows]
        forbidden = torch.isneginf(given)
        forbidden[:, 0] = False
        tensors.logprobs[rows] = torch.where(forbidden, given, own)
    tensors.selected_token_ranks[before.rows] = ~tensors.selected_token_ranks[before.rows]


def tell_marks() -> None:
    """Tell which tokens a grammar has narrowed: `constrained` in the logprobs of chats.

    The API server gets the mark as the rank of the sampled token: `~rank`, which is negative. The field is there where
    it is true, and everywhere in requests whose tokens are named by id, so that a client knows whose logprobs it has.
    Other routes have the model's logprobs without a mark.
    """
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.v1.engine import logprobs

    engine_logprobs: Any = logprobs
    append, chat = engine_logprobs.append_logprobs_for_next_position, OpenAIServingChat._create_chat_logprobs
    generated = ServingTokens._create_tokens_logprobs

    def append_marked(kept: Any, token_ids: list[int], logprobs: list[float], texts: Any, rank: int, n: int) -> None:
        append(kept, token_ids, logprobs, texts, rank, n)
        if rank < 0 and isinstance(kept, list):
            kept[-1][token_ids[0]].rank = rank  # vLLM has overwritten it if the token is among the best, too

    def create_chat_logprobs(self: Any, token_ids: Any, top_logprobs: Any, *args: Any, **kwargs: Any) -> Any:
        created: Any = chat(self, token_ids, top_logprobs, *args, **kwargs)
        config = self.engine_client.vllm_config
        if config.speculative_config is None and config.model_config.logprobs_mode in (RAW, PROCESSED):
            for content, token, step in zip(created.content, token_ids, top_logprobs, strict=False):
                marked = _is_marked(step, token)
                if marked or kwargs.get("return_as_token_id"):
                    setattr(content, CONSTRAINED, marked)
        return created

    def create_tokens_logprobs(self: Any, *args: Any, **kwargs: Any) -> Any:
        created: Any = generated(self, *args, **kwargs)
        for content in created.content:
            for each in (content, *content.top_logprobs):
                each.rank = ~each.rank if (each.rank or 0) < 0 else each.rank
        return created

    engine_logprobs.append_logprobs_for_next_position = append_marked
    OpenAIServingChat._create_chat_logprobs = create_chat_logprobs  # type: ignore[method-assign]
    ServingTokens._create_tokens_logprobs = create_tokens_logprobs  # type: ignore[method-assign]


def _is_marked(step: Any, token: int) -> bool:
    sampled = None if step is None else step.get(token)
    return sampled is not None and (sampled.rank or 0) < 0
