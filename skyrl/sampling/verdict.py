"""The verdict on an answer of the inference server.

A verdict is the action that follows from an answer's status, or from the one code of skyrl's router that says more than
its status; docs/how-it-works/forwarding.md has the table. Does not know how often a sample was sent: the client counts
that, and may fail a sample although the verdict is to send it again.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.http.answers import Answer

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


class Verdict(Enum):
    """The action that follows from an answer."""

    READ = "the answer is a completion: decode it"
    WAIT = "the server, or a proxy before it, does not take the sample now: wait, and send the sample again"
    WAIT_LONGER = "a proxy got no answer from the server: wait, longer than for WAIT, and send the sample again"
    INTERRUPTED = "the replica behind the router broke off: count an interruption, and send the sample again"
    LOAD_ADAPTER = "the server does not know the adapter: load the adapter, and send the sample again"
    REFUSE = "the sample cannot be computed as it was asked for: fail it, category user"
    ASK_HEALTH = "the server failed: ask its /health whether it is dying, and send the sample again"
    FAIL = "sending the sample again would not help: fail it, category server"


_BY_STATUS = {
    401: Verdict.FAIL,
    403: Verdict.FAIL,
    405: Verdict.FAIL,
    408: Verdict.WAIT,
    429: Verdict.WAIT,
    502: Verdict.WAIT_LONGER,
    503: Verdict.WAIT,
    504: Verdict.WAIT_LONGER,
}


class _Error(msgspec.Struct):
    code: str | int | None = None


class _Refusal(msgspec.Struct):
    error: _Error


_decode_refusal = msgspec.json.Decoder(_Refusal).decode
WORKER_INTERRUPTED = "worker_interrupted"
"""The code of skyrl's router for a request that a replica may have processed, and did not answer."""


def verdict_of(answer: Answer, *, has_adapter: bool) -> Verdict:
    """`has_adapter`: whether the sample needs an adapter, which the server may have lost."""
    status = answer.status
    if 200 <= status < 300:
        return Verdict.READ
    if status == 404 and has_adapter:
        return Verdict.LOAD_ADAPTER
    if status == 502 and _code_of(answer) == WORKER_INTERRUPTED:
        return Verdict.INTERRUPTED
    if (verdict := _BY_STATUS.get(status)) is not None:
        return verdict
    if status >= 500:
        return Verdict.ASK_HEALTH
    return Verdict.REFUSE if status >= 400 else Verdict.FAIL


def _code_of(answer: Answer) -> str | int | None:
    """The code of an error in the router's form; None for any other body."""
    try:
        return _decode_refusal(answer.body).error.code
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
