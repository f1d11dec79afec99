"""Errors in Anthropic's shape."""

from __future__ import annotations

import re

import msgspec

from skyrl.server.openai.errors import TOO_LONG

TOO_LONG_HERE = "prompt is too long"
"""By these words agents see that they must shorten the conversation."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_LIMIT = re.compile(re.escape(TOO_LONG) + r" (\d+) tokens")
_BOUND = re.compile(r"; the model itself takes .*$")
_LENGTH = re.compile(r"contains (?:at least )?(\d+) input tokens")


class ErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct, tag_field="type", tag="error", omit_defaults=True):
    """Every answer of 400 and above, and the content of a stream's error event."""

    error: ErrorDetail
    request_id: str | None = None


def error_body(
    status: int, message: str, field: str | None = None, code: str | None = None, request_id: str | None = None
) -> AnthropicError:
    """`field` is named in the message. `code` is OpenAI's, and says here only whether the prompt was too long."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if code == "context_length_exceeded" or TOO_LONG in message:
        message = _too_long(message)
    elif field is not None and not message.startswith(field):
        message = f"{field}: {message}"
    return AnthropicError(ErrorDetail(kind, message), request_id)


def _too_long(message: str) -> str:
    """Anthropic's sentence, with the inference server's numbers if it told both."""
    limit, length, bound = _LIMIT.search(message), _LENGTH.search(message), _BOUND.search(message)
    if limit is not None and length is not None and int(length[1]) > int(limit[1]):
        return f"{TOO_LONG_HERE}: {length[1]} tokens > {limit[1]} maximum{'' if bound is None else bound[0]}"
    return f"{TOO_LONG_HERE}: {message}"
