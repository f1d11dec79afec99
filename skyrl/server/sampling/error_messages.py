"""Error messages from answers of an inference server: its own sentence, or the status, type and an excerpt."""

from __future__ import annotations

import msgspec

from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.server.sampling.transport import Answer

BODY_EXCERPT = 200


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    type: str | None = None
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail | str


def server_failure(message: str) -> FailedRequest:
    return FailedRequest(message, ErrorCategory.SERVER)


def message_of(answer: Answer) -> str:
    """vLLM's own sentence, with the parameter that it names."""
    try:
        detail = msgspec.json.decode(answer.body, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return describe(answer)
    if isinstance(detail, str):
        return detail
    return f"{detail.param}: {detail.message}" if detail.param else detail.message or describe(answer)


def describe(answer: Answer) -> str:
    excerpt = answer.body[:BODY_EXCERPT].decode(errors="replace")
    return f"the inference server answered status {answer.status}, {answer.content_type}: {excerpt!r}"
