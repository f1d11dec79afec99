"""Errors of the OpenAI-compatible routes: their codes, and the body that OpenAI clients read.

One rule holds for a full context in all dialects: a prompt must leave room for one token, or it is refused with
TOO_LONG_CODE; `max_tokens` above what fits is cut (`skyrl.chat.openai.generation`, and vLLM itself).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.wire.errors import RequestError
from skyrl.http.answers import Answer
from skyrl.sampling.servers import error_in

TOO_LONG = "This model's maximum context length is"
"""The beginning of vLLM's sentence about a prompt that does not fit. litellm recognizes the error by these words."""
TOO_LONG_CODE = "context_length_exceeded"
_NO_ROOM = re.compile(
    r"^max_tokens must be at least 1, |exceeds model's maximum context length|is longer than the maximum model length"
)
"""vLLM's other sentences about a prompt that fills the context. The first is also about a request for no tokens."""
_LENGTH = re.compile(r"[Ll]ength \(?(\d+)\)")
_TOGETHER = "However, you requested"
"""In TOO_LONG of servers that refuse a prompt that fits because of `max_tokens`."""
_CODES = {401: "invalid_api_key", 403: "insufficient_permissions", 413: "request_too_large", 429: "rate_limit_exceeded"}


class OpenAIError(RequestError):
    """A refusal with OpenAI's `code`. The message does not begin with the field, because clients show `param`
    beside it. With `final` clients do not send the request again by themselves."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, final: bool = False
    ) -> None:
        super().__init__(message, status=status)
        self.field = param
        self.code = code
        self._final = final

    @property
    def headers(self) -> dict[str, str]:
        return super().headers | ({"x-should-retry": "false"} if self._final else {})


class DoesNotFit(OpenAIError):
    """The inference server refuses prompt and `max_tokens` together; fewer tokens may fit."""


class ErrorDetail(msgspec.Struct):
    """OpenAI's error: `param` names the field at fault, `code` is a word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """Every answer of 400 and above of the OpenAI-compatible routes."""

    error: ErrorDetail


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    """The body of an answer, or the last event of a stream that failed."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return ErrorBody(ErrorDetail(message, kind, param, code or _CODES.get(status)))


def model_not_found(name: str) -> OpenAIError:
    """One sentence for an unknown model, another tenant's checkpoint, and a checkpoint that nobody can sample from."""
    return OpenAIError(
        f"The model {name!r} does not exist or you do not have access to it.",
        status=404,
        param="model",
        code="model_not_found",
    )


def too_long(tokens: int, limits: ContextLimits, field: str = "messages") -> OpenAIError:
    """For a prompt that leaves no room to sample, in vLLM's words, which clients know."""
    return OpenAIError(
        f"{TOO_LONG} {limits.max_context} tokens. However, your prompt contains {tokens} input tokens, and the answer "
        f"needs one. Please reduce the length of the {field}{limits.bound}.",
        param=field,
        code=TOO_LONG_CODE,
    )


def impossible_shape(field: str) -> OpenAIError:
    """For a request that failed on an inference server of good health, and says what its answer must look like."""
    return OpenAIError(
        "The inference server failed at this request twice, and is well otherwise: probably no text of the model's "
        "tokens has the shape that the answer must have.",
        param=field,
        code="invalid_value",
    )


_PARSER_KEY = "generator.inference_engine.engine_init_kwargs"
_FLAGS: Mapping[str, tuple[str, str]] = {
    "--tool-call-parser": (
        "tools",
        "this model is not served with tools: its chat template has none, or the server knows no parser for its calls. "
        f'An operator names a parser with "{_PARSER_KEY}": {{"tool_call_parser": ...}}; without tools, or with '
        "tool_choice 'none', the model answers",
    ),
    "--reasoning-parser": (
        "thinking_token_budget",
        "this model is not served with thoughts: its chat template has none, or the server knows no parser for them. "
        f'An operator names a parser with "{_PARSER_KEY}": {{"reasoning_parser": ...}}',
    ),
}
"""Options of vLLM that its refusals name, each with the field at fault and the sentence in place of vLLM's: tenants
cannot set an option, and operators set it with a key of this server."""


_NO_TEMPLATE = "must provide a chat template"
"""In vLLM's refusal of a chat, which advises to send a template; tenants cannot."""
_WITHOUT_TEMPLATE = (
    "this model has no chat template, as base models have none: ask /v1/completions with a text, or sample with the "
    "Tinker SDK. An operator gives it one as chat_template.jinja in the model's directory"
)


_UNKNOWN = ContextLimits()


def refusal_of(
    answer: Answer,
    hidden: str,
    shown: str,
    limits: ContextLimits = _UNKNOWN,
    field: str = "prompt",
    max_tokens: int | None = None,
) -> OpenAIError:
    """The inference server's refusal. Its name `hidden` for the model becomes the caller's name `shown`. `field` is
    the request's field for the prompt, `max_tokens` what the request asks for."""
    if answer.status == 404:
        return model_not_found(shown)
    error = error_in(answer)
    message, param = error.message.replace(hidden, shown), error.param
    for flag, (at_fault, sentence) in _FLAGS.items():
        if flag in message:
            return OpenAIError(sentence, status=answer.status, param=at_fault)
    if _NO_TEMPLATE in message:
        return OpenAIError(_WITHOUT_TEMPLATE, status=answer.status, param="messages")
    if max_tokens != 0 and limits.max_context is not None and _NO_ROOM.search(message):
        length = _LENGTH.search(message)
        return too_long(limits.max_context if length is None else int(length[1]), limits, field)
    if TOO_LONG in message:
        kind = DoesNotFit if _TOGETHER in message else OpenAIError
        return kind(message.rstrip(".") + f"{limits.bound}.", status=answer.status, param=field, code=TOO_LONG_CODE)
    return OpenAIError(message, status=answer.status, param=param)


def code_in(event: bytes) -> int:
    """The HTTP status that an error event of the inference server stands for; 500 if it names none."""
    try:
        code: Any = msgspec.json.decode(event)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return 500
    return code if isinstance(code, int) and 400 <= code < 600 else 500
