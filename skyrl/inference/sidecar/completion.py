"""vLLM's answers of `/v1/completions` for one sample, a whole answer or the chunks of a stream, and the sample as
SGLang answers it: text, ids, and `meta_info`.

Every number is checked. What is missing, too short, or not a number is an error, because a client would train on it.
Numbers that vLLM did not report are left out of `meta_info`. The experts that computed each token are vLLM's `.npy`
file in base64, and become SGLang's int32 numbers in base64."""

from __future__ import annotations

import base64
import binascii
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skyrl.inference.sidecar.errors import NotOffered, VllmBroke
from skyrl.inference.sidecar.generate_request import Logprobs

Rows = list[list[tuple[float, int]]]
"""For each token, pairs of a logprob and a token id."""
LOWEST = -9999.0
"""vLLM's number for "impossible"."""
HIGHEST = 1e-3
"""A probability is at most 1, but for rounding."""
FINISHES = ("stop", "length", "abort")


@dataclass(slots=True)
class Collected:
    """What vLLM has sampled so far. `prompt` holds a row for each prompt token; its first row is empty."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: Rows = field(default_factory=list)
    prompt: list[dict[int, float]] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    routed_experts: str | None = None
    versions: list[dict[str, Any]] | None = None
    """Which weights sampled which tokens: `{"version", "start", "end"}`, in order. None if vLLM does not tell."""
    finish: str | None = None
    """One of FINISHES; None while vLLM samples."""
    matched: int | str | None = None

    def add_answer(self, answer: Any, *, logprobs: bool, prompt: list[int] | None) -> None:
        """Read the whole answer. `prompt` is given if its logprobs are wanted. Raises VllmBroke."""
        choice = _choice(answer)
        self._add_choice(choice, logprobs)
        if self.finish is None:
            raise VllmBroke("vLLM's answer has no finish_reason")
        if prompt is not None and not (self.finish == "abort" and choice.get("prompt_logprobs") is None):
            self.prompt = _prompt_rows(choice.get("prompt_logprobs"), prompt)
        self.routed_experts = choice.get("routed_experts")
        self._add_usage(answer.get("usage"))

    def add_chunk(self, chunk: Any, *, logprobs: bool) -> None:
        """Read one chunk of a stream. The last one has the usage and no choice. Raises VllmBroke."""
        if not isinstance(chunk, dict):
            raise VllmBroke("vLLM's stream has a chunk that is no object")
        if "error" in chunk:
            error = chunk["error"]
            raise VllmBroke(f"vLLM: {error.get('message', error) if isinstance(error, dict) else error}")
        if chunk.get("choices"):
            self._add_choice(_choice(chunk), logprobs)
        if chunk.get("usage"):
            self._add_usage(chunk["usage"])

    def _add_choice(self, choice: dict[str, Any], logprobs: bool) -> None:
        tokens, text = choice.get("token_ids") or [], choice.get("text") or ""
        if not all(type(token) is int for token in tokens):
            raise VllmBroke("vLLM's token_ids are not token ids")
        if not tokens and text and not self.tokens:
            raise VllmBroke("vLLM's answer has text without token_ids")
        if logprobs and tokens:
            self._add_logprobs(choice.get("logprobs"), tokens)
        self.text += text
        self.tokens += tokens
        finish = choice.get("finish_reason")
        if finish is None:
            return
        if finish not in FINISHES:
            raise VllmBroke(f"vLLM ended the sample with the finish_reason {finish!r}")
        if not self.tokens and finish != "abort":
            raise VllmBroke(f"vLLM's answer has no tokens, and the finish_reason {finish!r}")
        self.finish, self.matched = finish, choice.get("stop_reason")
        self.versions = _versions(choice.get("weight_versions"), len(self.tokens))

    def _add_logprobs(self, given: Any, tokens: list[int]) -> None:
        if not isinstance(given, dict) or not isinstance(given.get("token_logprobs"), list):
            raise VllmBroke("vLLM's answer has no logprobs, though they were asked for")
        values, tops = given["token_logprobs"], given.get("top_logprobs")
        if len(values) != len(tokens):
            raise VllmBroke(f"vLLM's answer has {len(values)} logprobs for {len(tokens)} tokens")
        if not isinstance(tops, list) or len(tops) != len(tokens):
            raise VllmBroke("vLLM's answer has no top_logprobs for some tokens")
        self.logprobs += [_logprob(value) for value in values]
        self.alternatives += [_alternatives(row) for row in tops]

    def _add_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict) or type(usage.get("prompt_tokens")) is not int:
            raise VllmBroke("vLLM's answer has no usage")
        self.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        self.cached_tokens = cached if type(cached) is int else None


def _choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise VllmBroke("vLLM's answer does not have one choice")
    return choices[0]


def _versions(given: Any, tokens: int) -> list[dict[str, Any]] | None:
    """The spans, which must cover all tokens, each once."""
    if given is None or given == []:
        return None
    end = 0
    try:
        for span in given:
            if type(span["start"]) is not int or type(span["end"]) is not int or not isinstance(span["version"], str):
                raise VllmBroke(f"vLLM's weight_versions have the span {span!r}")
            if span["start"] != end or not end < span["end"]:
                raise VllmBroke(f"vLLM's weight_versions have the span {span!r} after token {end}")
            end = span["end"]
    except (TypeError, KeyError) as error:
        raise VllmBroke(f"vLLM's weight_versions are no spans of tokens: {given!r}") from error
    if end != tokens:
        raise VllmBroke(f"vLLM's weight_versions cover {end} of {tokens} tokens")
    return given


def _logprob(value: Any) -> float:
    """A sampled token, or a token of the prompt, has a finite logprob."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not LOWEST < value <= HIGHEST:
        raise VllmBroke(f"vLLM's answer has the logprob {value!r}")
    return float(value)


def _is_impossible(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and value <= LOWEST)


def _alternatives(row: Any) -> list[tuple[float, int]]:
    """Pairs from {"token_id:5": -0.1}, likely ones first. Impossible tokens are left out: vLLM masks the tokens that
    top_k or top_p exclude."""
    if not isinstance(row, dict):
        raise VllmBroke("vLLM's answer has no top_logprobs for some tokens")
    pairs = []
    for key, value in row.items():
        token = key.removeprefix("token_id:")
        if token == key or not token.isdigit():
            raise VllmBroke(f"vLLM's top_logprobs have the key {key!r}")
        if _is_impossible(value):
            continue
        pairs.append((_logprob(value), int(token)))
    return sorted(pairs, key=lambda pair: -pair[0])


def _prompt_rows(given: Any, prompt: list[int]) -> list[dict[int, float]]:
    if not isinstance(given, list) or len(given) != len(prompt):
        count = len(given) if isinstance(given, list) else None
        raise VllmBroke(f"vLLM's answer has {count} prompt logprobs for {len(prompt)} prompt tokens")
    rows: list[dict[int, float]] = [{}]
    for token, row in zip(prompt[1:], given[1:], strict=True):
        if not isinstance(row, dict) or str(token) not in row:
            raise VllmBroke(f"vLLM's prompt logprobs do not have the prompt's token {token}")
        read = {}
        for key, cell in row.items():
            value = cell.get("logprob") if isinstance(cell, dict) else None
            if not key.isdigit():
                raise VllmBroke(f"vLLM's prompt logprobs have the key {key!r}")
            if key != str(token) and _is_impossible(value):
                continue
            read[int(key)] = _logprob(value)
        rows.append(read)
    return rows


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


def meta_info(
    name: str,
    finish: dict[str, Any] | None,
    prompt: list[int],
    collected: Collected,
    version: str | None,
    started: float,
    *,
    logprobs: Logprobs | None,
    texts: Texts = None,
    experts_start: int | None,
    scoring: bool = False,
    kept: int = 0,
) -> dict[str, Any]:
    """What is told of a sample. `version`: of the weights, if vLLM tells it; `started`: when the request came, on the
    clock of `time.monotonic`; `logprobs` and `experts_start`: None if they are not wanted. Raises NotOffered,
    VllmBroke."""
    meta: dict[str, Any] = {
        "id": name,
        "finish_reason": finish,
        "prompt_tokens": len(prompt),
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
    if logprobs is not None:
        meta |= logprob_lists(logprobs, collected, prompt, texts, scoring=scoring)
    if experts_start is not None and finish is not None:
        meta |= _routed_experts(collected, len(prompt), experts_start, scoring=scoring)
    if kept and finish is not None and not scoring:
        meta |= kept_tokens(collected, kept)
    return meta


def kept_tokens(collected: Collected, kept: int) -> dict[str, str]:
    """The tokens that top-k, top-p and min-p have kept at each step, by id, as slime's SGLang tells them: int32 in
    base64, and where those of each step begin and end. vLLM was asked for `kept` alternatives, and gave those that are
    possible. Nothing if no token was sampled. Raises VllmBroke if there are as many: then there may be more."""
    ids: list[int] = []
    ends = [0]
    if not collected.tokens:
        return {}
    for place, (row, token) in enumerate(zip(collected.alternatives, collected.tokens, strict=True)):
        own = sorted({token, *(each for _, each in row)})
        if len(own) >= kept:
            raise VllmBroke(
                f"return_top_p_token_ids: at token {place} the logits of {len(own)} or more tokens equal the least one "
                "that top_k keeps, and vLLM does not tell them all"
            )
        ids += own
        ends.append(len(ids))
    return {"top_p_token_ids": _base64_int32(ids), "top_p_token_offsets": _base64_int32(ends)}


def _base64_int32(numbers: list[int]) -> str:
    return base64.b64encode(np.array(numbers, "<i4").tobytes()).decode()


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


def _routed_experts(collected: Collected, prompt: int, start: int, *, scoring: bool) -> dict[str, Any]:
    """The experts of a prompt and its sample, without the first `start` rows; nothing if no token has been computed.
    `scoring`: without the rows of the sample. Raises NotOffered if vLLM does not record the experts, VllmBroke if they
    do not fit the tokens."""
    sampled = len(collected.tokens)
    if collected.routed_experts is None:
        if sampled:
            raise NotOffered("return_routed_experts: vLLM was started without --enable-return-routed-experts")
        return {}
    rows = prompt + sampled - 1 - start
    try:
        experts = to_int32(collected.routed_experts, rows, rows - sampled if scoring else rows)
    except VllmBroke:
        if collected.finish != "abort":
            raise
        return {}  # an aborted request is always answered: a client would sample it again after an error
    return {"routed_experts": experts, "routed_experts_start_len": start}


def to_int32(encoded: str, rows: int, kept: int) -> str:
    """`encoded` holds an array of integers [rows, layers, experts per token] in base64 of an `.npy` file. Returns the
    first `kept` rows as little-endian int32 in C order, in base64. Raises VllmBroke if the array has another shape."""
    try:
        array = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise VllmBroke(f"vLLM's routed_experts cannot be read: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 3 or array.shape[0] != rows:
        raise VllmBroke(f"vLLM's routed_experts have the shape {getattr(array, 'shape', None)} for {rows} tokens")
    if array.dtype.kind not in "iu" or (array.size and int(array.max()) > np.iinfo(np.int32).max):
        raise VllmBroke(f"vLLM's routed_experts are {array.dtype}, not numbers of experts")
    return base64.b64encode(np.ascontiguousarray(array[:kept], "<i4").tobytes()).decode()
