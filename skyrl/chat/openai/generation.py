"""Checks an OpenAI request, or one of vLLM's route for token ids, and makes the body for the inference server.

Knows fields and numbers. Does not know tenants, which model exists, or how a request is sent. A text's tokens are not
counted here: a text has at most as many tokens as bytes, and the inference server checks the exact number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.wire.decoding import decode_json, decode_part, raw_fields, raw_value
from skyrl.base.wire.errors import RequestError, whose_vocabulary
from skyrl.chat.openai.answer_shape import (
    Size,
    check_prompt,
    check_response_format,
    check_size,
    check_structured_outputs,
    check_tools,
)
from skyrl.chat.openai.errors import OpenAIError, too_long
from skyrl.chat.openai.fields import (
    REFUSED_OF_GENERATE,
    REFUSED_OF_SAMPLING,
    ChatFields,
    CommonFields,
    CompletionFields,
    GenerateFields,
    Sampling,
    SamplingParams,
    StreamOptions,
    accepted,
    tools_without_echoes,
)
from skyrl.chat.openai.messages import (
    EFFORT_FIELDS,
    ChatPicture,
    check_template_arguments,
    checked_messages,
    for_template,
    with_taken_effort,
    without_the_role,
)
from skyrl.sampling.job import MAX_SEED, MAX_STOP_STRINGS

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
_PROMPTS = {COMPLETIONS: "prompt", CHAT: "messages", GENERATE: "token_ids"}
"""The field of the prompt, by the route."""
DEFAULT_MAX_TOKENS = 16
"""Of a completion, by OpenAI and vLLM. A chat without a number may fill the context."""
MAX_PROMPTS = 1024
"""vLLM's own bound."""
RENDERED = ("add_generation_prompt", "continue_final_message", "documents", "add_special_tokens", "messages")
"""Fields that say how messages become tokens."""
BYTES_PER_TOKEN = 4
"""Of a text, on average: for the order of requests, which need not be exact."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request. `path` is the inference server's route; `fields` is the body without what depends on the
    server."""

    path: str
    fields: dict[str, Any]
    size: Size
    stream: bool
    include_usage: bool
    continuous_usage: bool
    scores_prompt: bool
    """Whether the answer has logprobs of the prompt."""
    shape: str | None
    """The field that says what the answer must look like; None if it may be any text."""
    strict_tools: bool = False
    """Whether a call must follow its tool's schema, where the answer may have none."""
    pictures: tuple[ChatPicture, ...] = ()
    """Of all messages. `size` does not count their tokens, before `with_pictures`."""
    limits: ContextLimits = ContextLimits()
    """Those that the request was checked against."""

    @property
    def has_grammar(self) -> bool:
        """Whether vLLM forbids tokens while it samples the answer."""
        return self.shape is not None or self.strict_tools

    @property
    def prompt_field(self) -> str:
        return _PROMPTS[self.path]

    @property
    def prompt_tokens(self) -> int:
        """About how many tokens all prompts have together; see `skyrl.sampling.gate.Work`."""
        return self.size.likely_prompt

    @property
    def num_samples(self) -> int:
        return self.size.sequences

    @property
    def prompt_cells(self) -> int:
        """vLLM repeats the logprobs of a prompt for each of its sequences."""
        topk = self.size.prompt_topk
        return 0 if topk is None else self.size.n * self.size.likely_prompt * (1 + topk)

    @property
    def max_tokens(self) -> int | None:
        return self.size.max_tokens

    def with_pictures(self, tokens: int) -> Generation:
        """The same request whose size counts the `tokens` of its pictures. Raises RequestError if it is too large."""
        most, likely = self.size.most_prompt + tokens, self.size.likely_prompt + tokens
        size = replace(self.size, most_prompt=most, likely_prompt=likely)
        check_prompt(size)
        return replace(self, size=size)

    def with_prompt(self, tokens: Sequence[int], max_tokens: int | None, experts_from: int = 0) -> Generation:
        """The same request for a prompt of exactly these tokens (ids), in place of its messages, whose answer has at
        most `max_tokens`. vLLM takes the tokens as they are, and reads the answer as one to a chat all the same. If it
        tells routed experts, those of the first `experts_from` tokens are left out."""
        left_out = ("max_tokens", "max_completion_tokens", *RENDERED)
        fields = {name: value for name, value in self.fields.items() if name not in left_out}
        fields |= {"messages": [{"role": "user", "content": "-"}], "kv_transfer_params": {"prompt_token_ids": tokens}}
        if experts_from:
            fields["routed_experts_prompt_start"] = experts_from
        size = replace(self.size, most_prompt=len(tokens), likely_prompt=len(tokens))
        return replace(self, fields=fields, size=size).at_most(max_tokens)

    def without_system_role(self) -> Generation:
        """The same request for a chat template that knows no system messages."""
        if self.path != CHAT:
            return self
        messages = without_the_role(self.fields["messages"])
        return replace(self, fields=self.fields | {"messages": messages})

    def with_effort(self, taken: Sequence[str]) -> Generation:
        """The same request for a chat template that takes these values of `reasoning_effort` alone; any if empty."""
        if not taken or self.path != CHAT or "reasoning_effort" not in self.fields:
            return self
        given = {name: raw_value(self.fields[name], name) for name in EFFORT_FIELDS if name in self.fields}
        others = {name: value for name, value in self.fields.items() if name not in EFFORT_FIELDS}
        return replace(self, fields={**others, **with_taken_effort(given, taken)})

    def at_most(self, max_tokens: int | None) -> Generation:
        """The same request for at most `max_tokens` tokens; None: the context is the bound."""
        fields = {name: value for name, value in self.fields.items() if name != "max_completion_tokens"}
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
        return replace(self, fields=fields, size=replace(self.size, max_tokens=max_tokens))

    def body(self, served_name: str, priority: int | None) -> bytes:
        """The body for a server that knows the weights as `served_name`, and orders requests if `priority` is given.

        A stream has its usage in each event, so that a stream that breaks off is counted, too."""
        fields = self.fields | {"model": served_name, "stream": self.stream}
        if self.stream:
            fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if priority is not None:
            fields["priority"] = priority
        return msgspec.json.encode(fields)


class _Named(msgspec.Struct):
    model: str | None = None


def model_in(body: bytes) -> str | None:
    """The name of the model that a request asks for, if it names one. Raises RequestError."""
    return decode_json(_Named, body).model


def completion(body: bytes, limits: ContextLimits, *, grammars: bool = False) -> Generation:
    """`grammars`: whether regular expressions and grammars are accepted. Raises RequestError naming the field."""
    fields, given = _decode(body, CompletionFields)
    if given.echo and given.return_token_ids:
        raise RequestError("has no text with return_token_ids; read prompt_token_ids", field="echo")
    prompts = _prompts(given.prompt, limits)
    longest = limits.max_context
    echoed = given.logprobs if given.echo else None
    size = Size(
        prompts=len(prompts),
        n=given.n,
        most_prompt=sum(_most_tokens(prompt, longest) for prompt in prompts),
        likely_prompt=sum(_likely_tokens(prompt) for prompt in prompts),
        max_tokens=DEFAULT_MAX_TOKENS if given.max_tokens is None else given.max_tokens,
        topk=given.logprobs or 0,
        prompt_topk=echoed if given.prompt_logprobs is None else given.prompt_logprobs,
        topk_field="logprobs",
    )
    request = _generation(COMPLETIONS, given, fields, size, limits, grammars)
    if given.truncate_prompt_tokens is None:
        _check_room(prompts, limits)
    return request


def chat(body: bytes, limits: ContextLimits, *, grammars: bool = False) -> Generation:
    """See `completion`."""
    fields, given = _decode(body, ChatFields)
    check_template_arguments(given.chat_template_kwargs)
    if given.tools and given.tool_choice != "none":
        check_tools(given.tools, must_call=_must_call(given), grammars=grammars)
    messages, pictures = checked_messages(given.messages)
    text = sum(len(fields[name]) for name in ("messages", "tools", "documents") if name in fields)
    text -= sum(len(picture.base64) for picture in pictures)
    longest = limits.max_context
    echoed = (given.top_logprobs or 0) if given.echo else None  # as vLLM reads it
    tokens_field = "max_tokens" if given.max_completion_tokens is None else "max_completion_tokens"
    asked: int | None = getattr(given, tokens_field)
    size = Size(
        prompts=1,
        n=given.n,
        most_prompt=text if longest is None else min(text, longest),
        likely_prompt=text // BYTES_PER_TOKEN,
        max_tokens=longest if asked is None else asked,
        topk=given.top_logprobs or 0,
        prompt_topk=echoed if given.prompt_logprobs is None else given.prompt_logprobs,
        topk_field="top_logprobs",
        tokens_field=tokens_field,
    )
    checked: dict[str, Any] = {**fields, "messages": for_template(messages)}
    return _generation(CHAT, given, checked, size, limits, grammars, pictures)


def _decode(body: bytes, kind: type[Any]) -> tuple[dict[str, Any], Any]:
    """The accepted fields, undecoded and decoded."""
    fields = accepted(raw_fields(body), kind)
    if "tools" in fields:
        fields["tools"] = _plain_tools(fields["tools"])
    return {**fields}, decode_json(kind, msgspec.json.encode(fields))


def _plain_tools(given: msgspec.Raw) -> msgspec.Raw:
    """The tools without keys that say nothing to the model: a template may write out all that a tool has."""
    tools = raw_value(given, "tools")
    kept = tools_without_echoes(tools)
    return given if kept == tools else msgspec.Raw(msgspec.json.encode(kept))


def _generation(
    path: str,
    given: CommonFields,
    fields: dict[str, Any],
    size: Size,
    limits: ContextLimits,
    grammars: bool,
    pictures: tuple[ChatPicture, ...] = (),
) -> Generation:
    check_sampling(given, fields, limits, grammars=grammars)
    check_ids(given.logprob_token_ids or [], "logprob_token_ids", limits)
    if given.response_format is not None:
        check_response_format(given.response_format, grammars=grammars)
    options = check_stream(given, given.prompt_logprobs)
    size = cut(size, fields, limits)
    check_size(size, given.logprob_token_ids)
    return Generation(
        path=path,
        fields={name: value for name, value in fields.items() if name not in ("model", "stream", "stream_options")},
        size=size,
        stream=given.stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        scores_prompt=size.prompt_topk is not None,
        shape=_shape(given),
        strict_tools=isinstance(given, ChatFields) and any(tool.function.strict for tool in given.tools or ()),
        pictures=pictures,
        limits=limits,
    )


def check_sampling(given: Sampling, fields: dict[str, Any], limits: ContextLimits, *, grammars: bool) -> None:
    """Check what all routes have, and put the seed into `fields`. Raises RequestError naming the field."""
    _check_stops(given, limits)
    if given.structured_outputs is not None:
        check_structured_outputs(given.structured_outputs, grammars=grammars)
    if given.seed is not None:
        if not -(2**63) <= given.seed < 2**64:
            raise RequestError("must fit 64 bits", field="seed")
        fields["seed"] = given.seed % MAX_SEED


def check_stream(
    given: CommonFields | GenerateFields, prompt_logprobs: int | None, field: str = "prompt_logprobs"
) -> StreamOptions:
    """What the caller wants of a stream. vLLM's streams have no logprobs of the prompt, which `field` asks for. Raises
    RequestError naming the field."""
    if given.stream and prompt_logprobs is not None:
        raise RequestError("is not in the events of a stream; ask for a whole answer", field=field)
    if given.stream_options is not None and not given.stream:
        raise RequestError("applies to streams; set stream too", field="stream_options")
    return given.stream_options or StreamOptions()


def cut(size: Size, fields: dict[str, Any], limits: ContextLimits) -> Size:
    """The size with `max_tokens` cut to the context, also in `fields`: vLLM refuses a larger number, and cuts a smaller
    one to what fits after the prompt."""
    longest = limits.max_context
    if longest is None or size.max_tokens is None or size.max_tokens <= longest:
        return size
    fields |= {name: longest for name in ("max_tokens", "max_completion_tokens") if name in fields}
    return replace(size, max_tokens=longest)


def _must_call(given: ChatFields) -> bool:
    """Whether the answer must call a tool."""
    return bool(given.tools) and given.tool_choice not in (None, "none", "auto")


def _shape(given: CommonFields) -> str | None:
    """See `Generation.shape`."""
    if given.structured_outputs is not None:
        return "structured_outputs"
    if given.response_format is not None and given.response_format.type != "text":
        return "response_format"
    return "tools" if isinstance(given, ChatFields) and _must_call(given) else None


def _check_stops(given: Sampling, limits: ContextLimits) -> None:
    strings = [given.stop] if isinstance(given.stop, str) else given.stop
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"must hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}", field="stop")
    if "" in strings:
        raise RequestError("must not hold the empty string", field="stop")
    for field in ("stop_token_ids", "allowed_token_ids"):
        check_ids(getattr(given, field) or [], field, limits)


def check_ids(ids: list[int], field: str, limits: ContextLimits) -> None:
    """Raises RequestError naming `field`."""
    highest = 2**31 if limits.vocab_size is None else limits.vocab_size
    if ids and (min(ids) < 0 or max(ids) >= highest):
        bad = next(token for token in ids if not 0 <= token < highest)
        raise RequestError(f"token id {bad} is not in [0, {highest}){whose_vocabulary(limits.base_model)}", field=field)


def _prompts(prompt: str | list[Any], limits: ContextLimits) -> list[str | list[int]]:
    """The prompts of a request: texts or lists of token ids. Raises RequestError."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif prompt and all(isinstance(token, int) for token in prompt):
        prompts = [prompt]
    else:
        prompts = prompt
    if not prompts or not all(prompts):
        raise RequestError("must not be empty", field="prompt")
    if len({type(each) for each in prompts}) > 1 or isinstance(prompts[0], int):
        raise RequestError("must be a text, the ids of its tokens, or a list of either", field="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"must hold at most {MAX_PROMPTS} prompts, got {len(prompts)}", field="prompt")
    if isinstance(prompts[0], list):
        for ids in prompts:
            check_ids(ids, "prompt", limits)
    return prompts


def _check_room(prompts: list[str | list[int]], limits: ContextLimits) -> None:
    """Prompts of token ids alone: the inference server counts the tokens of a text. Raises OpenAIError."""
    tokens = max((len(prompt) for prompt in prompts if isinstance(prompt, list)), default=0)
    if limits.max_context is not None and tokens >= limits.max_context:
        raise too_long(tokens, limits, "prompt")


def _most_tokens(prompt: str | list[int], longest: int | None) -> int:
    if isinstance(prompt, list):
        return len(prompt)
    most = len(prompt.encode())
    return most if longest is None else min(most, longest)


def _likely_tokens(prompt: str | list[int]) -> int:
    return len(prompt) if isinstance(prompt, list) else len(prompt) // BYTES_PER_TOKEN


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
