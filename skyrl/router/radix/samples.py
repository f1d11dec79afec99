"""Turns a worker's answer to `/generate` into a sample, if everything in it agrees; otherwise raises Unverified.

It knows SGLang's answer format and the tokenizer, and not the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from skyrl.router.radix.trajectory import Sample

STOP_TOKEN = "stop_token"
"""What some workers say for "stop" where a token ended the sample."""
_UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are not a whole character."""


class Unverified(Exception):
    """The answer does not show which tokens its text stands for."""


def is_aborted(answer: Any) -> bool:
    """Whether the worker gave the sample up."""
    return _finish(answer).get("type") == "abort"


def read_sample(answer: Any, tokenizer: Tokenizer) -> tuple[Sample, str | None]:
    """The sampled span and its weight version; None if the worker does not tell it. A version that is a number is the
    same as its text. Raises Unverified."""
    finish = _finish(answer)
    if finish.get("type") not in ("stop", "length"):
        raise Unverified("finish_reason")
    text, ids, meta = answer.get("text"), answer.get("output_ids"), answer["meta_info"]
    version = meta.get("weight_version")
    if type(version) is int:
        version = str(version)
    if not isinstance(text, str) or not (version is None or isinstance(version, str)):
        raise Unverified("text or weight_version")
    if not isinstance(ids, list) or not all(_is_id(token) for token in ids):
        raise Unverified("output_ids")
    if meta.get("completion_tokens", len(ids)) != len(ids):
        raise Unverified("completion_tokens")  # a part of a sample: a stream of differences
    logprobs = _logprobs(meta.get("output_token_logprobs"), ids)
    for skipped in (False, True):
        if (sample := _spelled(text, ids, logprobs, finish, tokenizer, skipped)) is not None:
            return sample, version
    raise Unverified("text")


def _finish(answer: Any) -> dict[str, Any]:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(finish, dict):
        return {}
    return finish | {"type": "stop"} if finish.get("type") == STOP_TOKEN else finish


def _is_id(token: object) -> bool:
    return type(token) is int and 0 <= token < 2**31


def _logprobs(entries: Any, ids: Sequence[int]) -> list[float]:
    if not isinstance(entries, list) or len(entries) != len(ids):
        raise Unverified("output_token_logprobs")
    logprobs = []
    for entry, token in zip(entries, ids, strict=True):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            raise Unverified("output_token_logprobs")
        value = entry[0]
        if type(value) not in (int, float) or not math.isfinite(value):
            raise Unverified("output_token_logprobs")
        logprobs.append(float(value))
    return logprobs


def _spelled(
    text: str, ids: list[int], logprobs: list[float], finish: dict[str, Any], tokenizer: Tokenizer, skipped: bool
) -> Sample | None:
    """The sample, if `text` is the decoded `ids` (special tokens left out if `skipped`) without a trimmed end."""
    whole = tokenizer.decode(ids, skip_special_tokens=skipped)
    if not whole.startswith(text):
        return None
    cuts = [(length, count) for length, count in _ends(ids, whole, tokenizer, skipped) if length <= len(text)]
    if whole == text and (not cuts or cuts[-1][0] < len(text)) and text:
        cuts.append((len(text), len(ids)))  # the sample ends within a character: the span is usable as a whole
    shown = next((count for length, count in cuts if length == len(text)), 0)
    aligned = shown > 0 or not text
    rest = tokenizer.decode(ids[shown:], skip_special_tokens=False) if aligned else whole[len(text) :]
    if not _may_be_trimmed(rest, ids, finish, tokenizer):
        return None
    if not aligned or not rest or _UNFINISHED in rest:
        return Sample(text, ids, logprobs, cuts)
    ends = _ends(ids[shown:], rest, tokenizer, False)
    tail = [(len(text) + length, shown + count) for length, count in ends]
    return Sample(text, ids, logprobs, cuts + tail, rest)


def _may_be_trimmed(rest: str, ids: list[int], finish: dict[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether a worker leaves `rest`, the end of the decoded tokens, out of its text."""
    if not rest.strip(_UNFINISHED):
        return True  # nothing, or the bytes of an unfinished character
    if not tokenizer.decode(tokenizer.encode(rest, add_special_tokens=False).ids, skip_special_tokens=True):
        return True  # special tokens alone
    if finish.get("type") != "stop":
        return False
    matched = finish.get("matched")
    if isinstance(matched, str):
        return bool(matched) and rest.startswith(matched)
    if type(matched) is int:
        return bool(ids) and ids[-1] == matched and rest == tokenizer.decode([matched], skip_special_tokens=False)
    return False


def _ends(ids: Sequence[int], whole: str, tokenizer: Tokenizer, skipped: bool) -> list[tuple[int, int]]:
    """(characters of `whole`, number of tokens) at the tokens after which the text is exact, ascending and distinct.
    `whole` is the text of `ids`; the list ends where the stream of texts leaves it."""
    stream, length, ends = DecodeStream(skip_special_tokens=skipped), 0, []
    for count, token in enumerate(ids, 1):
        chunk = stream.step(tokenizer, token)
        if chunk:
            if not whole.startswith(chunk, length):
                break
            length += len(chunk)
            ends.append((length, count))
    return ends
