"""Logprobs under a grammar: the model's own, and a mark at each token whose choice the grammar has narrowed.

vLLM forbids tokens by setting their logits to minus infinity, and takes logprobs of what is left: up to the whole
logprob of a forced token is missing. The plugin keeps the logits from before, and puts the model's own logprobs, after
the temperature alone, in place of vLLM's. What the grammar forbids stays at minus infinity among the alternatives.

The mark travels to vLLM's API server as the rank of the sampled token: `~rank`, which is negative. Chats tell it as
`constrained` in each token's logprob: where it is true, and everywhere in requests whose tokens are named by id, so
that a client knows whose logprobs it has. Other routes have the model's logprobs without a mark. With speculative
decoding, or where vLLM gives logits for logprobs, vLLM's numbers stay, and nothing is told.

vLLM's mode `raw_logprobs` is no way: it, too, looks at the logits after the grammar, and at those before the
temperature for all requests. Scoring such an answer again would be a second pass over its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

FIELD = "constrained"
GREEDY_BELOW = 1e-5
"""vLLM's own bound: at lower temperatures logprobs are those at 1."""
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
    """Patch this process, which is vLLM's API server. A second call changes nothing."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.v1.engine import logprobs

    engine_logprobs: Any = logprobs
    append, chat = engine_logprobs.append_logprobs_for_next_position, OpenAIServingChat._create_chat_logprobs
    generated = ServingTokens._create_tokens_logprobs
    if chat.__module__ == __name__:
        return

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
                    setattr(content, FIELD, marked)
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
