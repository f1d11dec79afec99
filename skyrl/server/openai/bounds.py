"""The size of an OpenAI request, its bounds, and the largest answer that an inference server can give to it.

The bounds are those of `asample` (`skyrl.server.sampling.job`, `skyrl.server.sampling.answer_bound`), over all prompts
of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl.base.wire.errors import RequestError
from skyrl.server.sampling.answer_bound import (
    BASE_BYTES,
    ECHOED_TOKEN_BYTES,
    MAX_ANSWER_BYTES,
    PROMPT_CELL_BYTES,
    SAMPLED_TOKEN_BYTES,
    SEQUENCE_BYTES,
)
from skyrl.server.sampling.job import MAX_ECHOED, MAX_NUM_SAMPLES, MAX_PROMPT_CELLS, MAX_SAMPLED, MAX_TOPK

TOKEN_BYTES = 2 * SAMPLED_TOKEN_BYTES
"""A sampled token with its logprob, and in a stream its event: ids, names and usage come with every token. A chat also
lists the bytes of each token."""


@dataclass(frozen=True, slots=True)
class Size:
    """`most_prompt` and `likely_prompt` are numbers of tokens of all prompts together: at most, and about.
    `max_tokens` is for each sequence; None if it is not known. `topk` and `prompt_topk` are best tokens per position;
    `prompt_topk` None is no logprobs of the prompt. `topk_field` names `topk` in the request."""

    prompts: int
    n: int
    most_prompt: int
    likely_prompt: int
    max_tokens: int | None
    topk: int
    prompt_topk: int | None
    topk_field: str

    @property
    def sequences(self) -> int:
        return self.prompts * self.n

    @property
    def most_tokens(self) -> int:
        """The most tokens that the request can use; an unknown `max_tokens` counts as 0."""
        return self.most_prompt + self.sequences * (self.max_tokens or 0)

    @property
    def answer_bytes(self) -> int:
        """The largest right answer."""
        if self.max_tokens is None:
            return MAX_ANSWER_BYTES
        echoed = self.n * self.most_prompt
        cells = 0 if self.prompt_topk is None else echoed * (2 + self.prompt_topk)
        sampled = self.sequences * self.max_tokens * (1 + self.topk) * TOKEN_BYTES
        size = BASE_BYTES + self.sequences * SEQUENCE_BYTES + echoed * (ECHOED_TOKEN_BYTES + TOKEN_BYTES) + sampled
        return min(MAX_ANSWER_BYTES, size + cells * PROMPT_CELL_BYTES)


def check_size(size: Size, logprob_token_ids: Sequence[int] | None) -> None:
    """Raises RequestError naming the field."""
    _check_range("n", size.n, 1, MAX_NUM_SAMPLES)
    if size.max_tokens is not None and size.max_tokens < 0:
        raise RequestError(f"must be at least 0, got {size.max_tokens}", field="max_tokens")
    _check_range(size.topk_field, size.topk, 0, MAX_TOPK)
    _check_range("prompt_logprobs", size.prompt_topk or 0, 0, MAX_TOPK)
    if logprob_token_ids is not None and len(logprob_token_ids) > MAX_TOPK:
        raise RequestError(f"must hold at most {MAX_TOPK} ids, got {len(logprob_token_ids)}", field="logprob_token_ids")
    columns = 1 + max(size.topk, len(logprob_token_ids or ()))
    if size.sequences * (size.max_tokens or 1) * columns > MAX_SAMPLED:
        raise RequestError(
            f"{size.sequences} choices of up to {size.max_tokens} tokens, with {columns} logprobs each, are more than "
            f"the {MAX_SAMPLED} that one request may ask for",
            field="n" if size.n > 1 else "max_tokens",
        )
    check_prompt(size)


def check_prompt(size: Size) -> None:
    """What depends on the length of the prompt. Raises RequestError naming the field."""
    if size.n * size.most_prompt > MAX_ECHOED:
        raise RequestError(
            f"{size.n} choices for prompts of up to {size.most_prompt} tokens are more than one request may ask for",
            field="n",
        )
    if size.prompt_topk is not None and size.n * size.most_prompt * (1 + size.prompt_topk) > MAX_PROMPT_CELLS:
        raise RequestError(
            f"prompts of up to {size.most_prompt} tokens with {1 + size.prompt_topk} logprobs each, for {size.n} "
            f"choices, are more than the {MAX_PROMPT_CELLS} that one request may ask for",
            field="prompt",
        )


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"must be in [{low}, {high}], got {value}", field=field)
