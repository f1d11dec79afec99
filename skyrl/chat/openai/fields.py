"""The fields that a request may have, and the small objects inside them. A field that is not listed here is refused.

A field that changes the meaning of a request must not be ignored, as vLLM ignores unknown ones. The structs are the
list: their fields go to vLLM as the client wrote them, but for keys that say nothing. docs/howto/openai.md has the same
list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from skyrl.base.wire.decoding import raw_value
from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai.answer_shape import ResponseFormat, StructuredOutputs, Tool


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False
    """OpenAI pads its events with it. No event is padded here."""


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """Part of a message."""

    id: str
    type: Literal["function"]
    function: FunctionCall


ECHOED = frozenset(
    {"annotations", "cache_control", "extra_content", "index", "parsed", "parsed_arguments", "phase"}
    | {"prompt_cache_breakpoint", "provider_specific_fields", "reasoning_details", "thinking_blocks"}
)
"""Keys of messages, parts, calls and tools that say nothing to the model: hints to other servers' caches, and what
clients' libraries add to an answer and send back with it. They are dropped."""


def without_echoes(value: Any) -> Any:
    """A message's part, call or tool without the keys of `ECHOED`, its `function` likewise."""
    if not isinstance(value, dict):
        return value
    kept = {key: each for key, each in value.items() if key not in ECHOED}
    return kept | {"function": without_echoes(kept["function"])} if "function" in kept else kept


def tools_without_echoes(tools: Any) -> Any:
    """The tools of a request, which are not checked yet."""
    return [without_echoes(tool) for tool in tools] if isinstance(tools, list) else tools


def checked_tool_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """The calls of a message, as they go on. Raises RequestError naming the part of `field` that is wrong."""
    calls = [without_echoes(call) for call in value] if isinstance(value, list) else value
    try:
        msgspec.convert(calls, list[ToolCall])
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        raise RequestError(problem, field=field + path.rstrip("`")) from error
    return calls


WITHOUT_EFFECT = frozenset(
    {"cache_control", "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    | {"safety_identifier", "user", "verbosity"}
)
"""Accepted and not forwarded: they say something about the caller, or to caches and models of other servers, and
nothing about the answer here."""

_UNSAFE = "is not accepted: it could reach what belongs to the server or to other tenants"
_MEDIA = "is not accepted: this server takes text alone"
_ONE_SPELLING = (
    "is not accepted: vLLM bans a word at the beginning of a text, and where its tokens differ it lets the same word "
    "after a space through; end the answer with stop, or name token ids in logit_bias with -100"
)
Refusals = Mapping[str, tuple[tuple[Any, ...], str]]
REFUSED: Refusals = {
    "audio": ((), _MEDIA),
    "bad_words": (([],), _ONE_SPELLING),
    "best_of": ((1,), "is not supported; ask for n and choose among the choices"),
    "cache_salt": ((), _UNSAFE),
    "chat_template": ((), "is not accepted: chats are rendered with the model's own template"),
    "function_call": (("none",), "is not supported; use tool_choice"),
    "functions": (([],), "is not supported; use tools"),
    "kv_transfer_params": ((), _UNSAFE),
    "lora_path": ((), _UNSAFE),
    "media_io_kwargs": ((), _MEDIA),
    "mm_processor_kwargs": ((), _MEDIA),
    "modalities": ((["text"],), _MEDIA),
    "prediction": ((), "is not supported"),
    "priority": ((0,), "is not accepted: the server decides the order of requests"),
    "prompt_embeds": ((), "is not accepted; send text or token ids"),
    "request_id": ((), "is not accepted; send the header X-Request-Id"),
    "service_tier": (("auto", "default"), "is not supported: there is one tier"),
    "session_id": ((), _UNSAFE),
    "stop_regex": (([], ""), "is not supported; name the texts in stop, or the tokens in stop_token_ids"),
    "store": ((False,), "is not supported: this server keeps no completions"),
    "suffix": (("",), "is not supported"),
    "use_beam_search": ((False,), "is not supported"),
    "vllm_xargs": ((), _UNSAFE),
    "web_search_options": ((), "is not supported"),
} | {
    f"guided_{kind}": ((), "was removed from vLLM; use response_format or structured_outputs")
    for kind in ("choice", "decoding_backend", "grammar", "json", "regex", "whitespace_pattern")
}
"""Fields of OpenAI or vLLM that are refused: the values that change nothing and are accepted, and the reason."""


Int32 = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
"""vLLM fails with an internal error for larger numbers."""


class Sampling(msgspec.Struct, kw_only=True):
    """How tokens are sampled, on every route."""

    n: int = 1
    max_tokens: int | None = None
    stop: str | list[str] = msgspec.field(default_factory=list)
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: Int32 | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Int32 | None = None
    stream_interval: Int32 | None = None


class CommonFields(Sampling, kw_only=True):
    model: str | None = None
    """The only base model if it is left out."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprob_token_ids: list[int] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int32 | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None


class CompletionFields(CommonFields, kw_only=True):
    """The body of `completions`. `prompt` is a text, the ids of its tokens, or a list of either."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: int | None = None


class ChatFields(CommonFields, kw_only=True):
    """The body of `chat/completions`. `skyrl.chat.openai.messages` checks the messages."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    echo: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, str]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None


class SamplingParams(Sampling, kw_only=True):
    """The `sampling_params` of `generate`. `logprobs` are those of the best tokens beside the sampled one."""

    logprobs: int | None = None
    routed_experts_prompt_start: Int32 | None = None


class GenerateFields(msgspec.Struct, kw_only=True):
    """The body of `generate`."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    token_ids: list[int]
    sampling_params: SamplingParams
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"


_RENDERED = "is not accepted: it is what vLLM's own route for rendering says of a prompt"
REFUSED_OF_GENERATE: Refusals = {name: REFUSED[name] for name in ("cache_salt", "kv_transfer_params", "priority")} | {
    "request_id": REFUSED["request_id"],
    "content_parts": (([],), "is not accepted: only chats take pictures here"),
    "ec_transfer_params": ((), _UNSAFE),
    "features": ((), "is not accepted: only chats take pictures here"),
    "reasoning_ended": ((), _RENDERED),
    "reasoning_parser_kwargs": ((), _RENDERED),
    "token_offsets": ((), _RENDERED),
}
REFUSED_OF_SAMPLING: Refusals = {
    "bad_words": REFUSED["bad_words"],
    "detokenize": ((True,), "is not supported; output_mode says whether the answer has texts"),
    "extra_args": ((), _UNSAFE),
    "flat_logprobs": ((False,), "is not supported"),
    "logprob_token_ids": ((), "is not supported here: vLLM leaves out the last of them; ask a completion"),
    "output_kind": ((), "is not supported; use stream"),
    "prompt_logprob_start": ((), "is not supported; use prompt_logprobs"),
    "prompt_logprob_token_ids": ((), "is not supported; use prompt_logprobs"),
    "repetition_detection": ((), "is not supported"),
    "skip_clone": ((False,), _UNSAFE),
    "skip_reading_prefix_cache": ((), "is not supported: it changes no token"),
    "trace_decode_token_ids": ((), "is not supported: tokens are sampled here"),
    "watermarking": ((), "is not supported"),
}
"""As REFUSED, for the two levels of `generate`."""


def accepted(
    fields: dict[str, msgspec.Raw], known: type[msgspec.Struct], refused: Refusals = REFUSED, within: str = ""
) -> dict[str, msgspec.Raw]:
    """The fields of a body that mean something, undecoded: null means the default. Raises RequestError naming a field
    that is unknown or refused. `within`: where the fields are in the body, with a dot at its end."""
    kept: dict[str, msgspec.Raw] = {}
    for name, raw in fields.items():
        if name in WITHOUT_EFFECT or bytes(raw) == b"null":
            continue
        if name in known.__struct_fields__:
            kept[name] = raw
        elif name in refused:
            harmless, reason = refused[name]
            if not _is_one_of(raw_value(raw, within + name), harmless):
                raise RequestError(reason, field=within + name)
        else:
            raise RequestError("is not a field that this server knows", field=within + name)
    return kept


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Whether the value equals one of these, with its type: `false` is not 0."""
    return any(type(value) is type(other) and value == other for other in harmless)
