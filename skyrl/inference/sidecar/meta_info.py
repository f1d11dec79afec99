"""One sample as SGLang answers it: text, ids, and `meta_info`. Numbers that vLLM did not report are left out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from skyrl.inference.sidecar.completion import Collected
from skyrl.inference.sidecar.errors import VllmBroke
from skyrl.inference.sidecar.generate_request import Logprobs

ABORTED = "Aborted"
ABORTED_WAITING = "Abort in waiting queue"
Texts = Mapping[int, str] | None
"""The text of each token id; None if the triples have no text."""


def finish_reason(collected: Collected, *, aborted: bool, scoring: bool) -> dict[str, Any] | None:
    """`scoring`: the client asked for no tokens. Raises VllmBroke."""
    if collected.finish == "abort" or (aborted and collected.finish is None):
        message = ABORTED if collected.tokens else ABORTED_WAITING
        return {"type": "abort", "message": message, "status_code": None, "err_type": None}
    if collected.finish is None:
        return None
    if scoring:
        return {"type": "length", "length": 0}
    if collected.finish == "length":
        return {"type": "length", "length": len(collected.tokens)}
    # vLLM does not name the token if the model's own end token was sampled
    matched = collected.tokens[-1] if collected.matched is None else collected.matched
    if isinstance(matched, bool) or not isinstance(matched, int | str):
        raise VllmBroke(f"vLLM's stop_reason is {matched!r}")
    return {"type": "stop", "matched": matched}


def basics(
    name: str,
    finish: dict[str, Any] | None,
    prompt_tokens: int,
    collected: Collected,
    version: str | None,
    started: float,
    *,
    scoring: bool = False,
) -> dict[str, Any]:
    """What every sample tells. `version`: of the weights, if vLLM tells it; `started`: when the request came, on the
    clock of `time.monotonic`."""
    meta: dict[str, Any] = {
        "id": name,
        "finish_reason": finish,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 0 if scoring else len(collected.tokens),
    }
    if collected.cached_tokens is not None:
        meta["cached_tokens"] = collected.cached_tokens
    if version is not None:
        meta["weight_version"] = version
    if collected.versions is not None and not scoring:
        meta["weight_versions"] = collected.versions
    meta["e2e_latency"] = time.monotonic() - started
    if finish is not None:
        meta["response_sent_to_client_ts"] = time.time()
    return meta


def logprob_lists(
    wanted: Logprobs, collected: Collected, prompt: list[int], texts: Texts, *, scoring: bool
) -> dict[str, Any]:
    """The lists of logprobs. The prompt's lists are there, and may be empty, whenever logprobs are wanted."""
    sampled = [] if scoring else list(zip(collected.logprobs, collected.tokens, strict=True))
    lists: dict[str, Any] = {
        "input_token_logprobs": [],
        "output_token_logprobs": [triple(logprob, token, texts) for logprob, token in sampled],
    }
    rows = [] if scoring else collected.alternatives
    if wanted.top:
        lists["input_top_logprobs"] = []
        lists["output_top_logprobs"] = [[triple(*pair, texts) for pair in row[: wanted.top]] for row in rows]
    if wanted.ids:
        lists["input_token_ids_logprobs"] = []
        lists["output_token_ids_logprobs"] = [_named(row, wanted.ids, texts) for row in rows]
    if collected.prompt is not None:
        start = wanted.start
        pairs = [(row.get(token), token) for row, token in zip(collected.prompt, prompt, strict=True)][start:]
        if pairs:  # the first has no logprob, also where the prompt has tokens before it
            pairs[0] = (None, pairs[0][1])
        lists["input_token_logprobs"] = [triple(logprob, token, texts) for logprob, token in pairs]
        if wanted.top:
            likely = [
                sorted(((value, token) for token, value in row.items()), reverse=True) for row in collected.prompt
            ]
            tops: list[Any] = [[triple(*pair, texts) for pair in row[: wanted.top]] for row in likely][start:]
            lists["input_top_logprobs"] = [None, *tops[1:]] if tops else []
    return lists


def triple(logprob: float | None, token: int, texts: Texts) -> list[Any]:
    return [logprob, token, None if texts is None else texts[token]]


def _named(row: list[tuple[float, int]], ids: tuple[int, ...], texts: Texts) -> list[list[Any]]:
    """The logprobs of the named tokens, in their order; null for a token that cannot be sampled."""
    values = {token: logprob for logprob, token in row}
    return [triple(values.get(token), token, texts) for token in ids]
