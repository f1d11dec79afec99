"""Checks a request of vLLM's route for token ids (`/inference/v1/generate`), and makes the body for the inference
server. The checks and bounds are those of a completion.

Knows fields and numbers. Does not know tenants, which model exists, or how a request is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from skyrl.base.wire.decoding import decode_json, decode_part, raw_fields
from skyrl.base.wire.errors import RequestError
from skyrl.server.openai.bounds import Size, check_size
from skyrl.server.openai.errors import OpenAIError, too_long
from skyrl.server.openai.fields import (
    REFUSED_OF_GENERATE,
    REFUSED_OF_SAMPLING,
    GenerateFields,
    SamplingParams,
    accepted,
)
from skyrl.server.openai.generation import GENERATE, Generation, check_ids, check_sampling, check_stream
from skyrl.server.sampling.job import ContextLimits

PARAMS = "sampling_params"


def generate(body: bytes, limits: ContextLimits, *, grammars: bool = False) -> Generation:
    """`grammars`: whether regular expressions and grammars are accepted. Raises RequestError naming the field."""
    fields = accepted(raw_fields(body), GenerateFields, REFUSED_OF_GENERATE)
    params = decode_part(dict[str, msgspec.Raw], fields.get(PARAMS, msgspec.Raw()), PARAMS)
    params = accepted(params, SamplingParams, REFUSED_OF_SAMPLING, f"{PARAMS}.")
    fields[PARAMS] = msgspec.Raw(msgspec.json.encode(params))
    given = decode_json(GenerateFields, msgspec.json.encode(fields))
    if not given.token_ids:
        raise RequestError("must not be empty", field="token_ids")
    check_ids(given.token_ids, "token_ids", limits)
    asked, length = given.sampling_params, len(given.token_ids)
    sampling: dict[str, Any] = {**params}
    with _named():
        check_sampling(asked, sampling, limits, grammars=grammars)
        fits = _fitting(asked.max_tokens, length, limits)
        size = Size(
            prompts=1,
            n=asked.n,
            most_prompt=length,
            likely_prompt=length,
            max_tokens=fits,
            topk=asked.logprobs or 0,
            prompt_topk=asked.prompt_logprobs,
            topk_field="logprobs",
        )
        check_size(size, None)
    options = check_stream(given, asked.prompt_logprobs, f"{PARAMS}.prompt_logprobs")
    if fits is not None:
        sampling["max_tokens"] = fits
    left_out = ("model", "stream", "stream_options")
    return Generation(
        path=GENERATE,
        fields={name: value for name, value in fields.items() if name not in left_out} | {PARAMS: sampling},
        size=size,
        stream=given.stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        scores_prompt=size.prompt_topk is not None,
        shape=f"{PARAMS}.structured_outputs" if asked.structured_outputs is not None else None,
        limits=limits,
    )


def _fitting(asked: int | None, length: int, limits: ContextLimits) -> int | None:
    """The tokens that the answer may have: as many as fit, if it asks for more or for no number. None if the context is
    unknown; vLLM then fills it. Raises OpenAIError if none fits."""
    if limits.max_context is None:
        return asked
    left = limits.max_context - length
    if left < 1:
        raise too_long(length, limits, "token_ids")
    return left if asked is None else min(asked, left)


@contextmanager
def _named() -> Iterator[None]:
    """Name the field of an error as this route has it."""
    try:
        yield
    except OpenAIError:
        raise
    except RequestError as error:
        name = error.field or ""
        field = "token_ids" if name == "prompt" else f"{PARAMS}.{name}"
        raise RequestError(error.message.removeprefix(f"{name}: "), field=field) from error
