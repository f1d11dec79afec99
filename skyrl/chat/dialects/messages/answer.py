"""Answers of a chat, and errors, in the shape of Anthropic's Messages, whole or as a stream of events.

The input of a call goes out in one piece, when it is complete: only then it is known to be a JSON object. Until then
pings keep the connection alive.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from skyrl.base.wire.errors import RequestError
from skyrl.chat.dialects.dialect import Block, Blocks, ChatAnswer, Finish, Step, named_event, read_answer
from skyrl.chat.dialects.parts import as_object, is_object
from skyrl.chat.openai.errors import TOO_LONG, OpenAIError
from skyrl.sampling.completion import AnswerUsage

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


SIGNATURE = "c2t5cmw="
"""Of thinking. Anthropic's server signs it; some clients send no thinking back that is not signed. Nobody reads it."""
_encode = msgspec.json.Encoder().encode
_DELTAS = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}


class MessagesEncoder:
    def __init__(self) -> None:
        self._blocks = Blocks()
        self._finish = Finish()
        self._begun = False

    def whole(self, answer: bytes) -> bytes:
        """Raises RequestError if the answer is no chat completion."""
        chat = read_answer(answer)
        self._finish.read(chat)
        for choice in chat.choices:
            if choice.message is not None:
                self._blocks.add(choice.message)
        content = [_whole_block(block) for block in self._blocks.all]
        usage = _usage(self._finish.usage)
        return _encode(_message(chat) | {"content": content, "usage": usage} | self._stop())

    def events(self, chunk: bytes) -> bytes:
        """Raises RequestError if the chunk is none of a chat completion."""
        chat = read_answer(chunk)
        self._finish.read(chat)
        framed: list[bytes] = []
        if not self._begun:
            self._begun = True
            framed.append(named_event("message_start", {"message": _message(chat) | self._nothing_yet()}))
        for choice in chat.choices:
            if choice.delta is not None:
                framed += (_event(step) for step in self._blocks.add(choice.delta))
        return b"".join(framed)

    def end(self) -> bytes:
        framed = [_event(step) for step in self._blocks.end()]
        framed.append(named_event("message_delta", {"delta": self._stop(), "usage": _usage(self._finish.usage)}))
        framed.append(named_event("message_stop", {}))
        return b"".join(framed)

    def failed(self, error: RequestError) -> bytes:
        code = error.code if isinstance(error, OpenAIError) else None
        body = error_body(error.status, error.message, error.field, code)
        return named_event("error", {"error": body.error})

    def _nothing_yet(self) -> dict[str, Any]:
        nothing = {"content": [], "stop_reason": None, "stop_sequence": None}
        return nothing | {"usage": _usage(self._finish.usage)}

    def _stop(self) -> dict[str, Any]:
        """Why the answer ended. A stop string that cuts a call off wins over the call, which must not be run."""
        calls = [block for block in self._blocks.all if block.kind == "call"]
        complete = bool(calls) and all(is_object(call.text or "{}") for call in calls)
        reason, stop_string = self._finish.reason, self._finish.stop_string
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if stop_string is not None and not complete:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
        return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}


def _message(chat: ChatAnswer) -> dict[str, Any]:
    return {
        "id": "msg_" + chat.id.removeprefix("chatcmpl-"),
        "type": "message",
        "role": "assistant",
        "model": chat.model,
    }


def _usage(usage: AnswerUsage) -> dict[str, Any]:
    """Anthropic's `input_tokens` are those that no cache had."""
    used = usage.used()
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.sampled_tokens,
    }


def _whole_block(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    return _call(block, msgspec.Raw(as_object(block.text)))


def _empty_block(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return _call(block, msgspec.Raw("{}"))


def _call(block: Block, given: msgspec.Raw) -> dict[str, Any]:
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}


def _event(step: Step) -> bytes:
    """The framed events for a step of a stream."""
    block = step.block
    if step.what == "begin":
        return named_event("content_block_start", {"index": block.number, "content_block": _empty_block(block)})
    if step.what == "more":
        if block.kind == "call":
            return named_event("ping", {})
        kind, key = _DELTAS[block.kind]
        return _delta(block, {"type": kind, key: step.more})
    last = b""
    if block.kind == "call":
        last = _delta(block, {"type": "input_json_delta", "partial_json": as_object(block.text)})
    elif block.kind == "thinking":
        last = _delta(block, {"type": "signature_delta", "signature": SIGNATURE})
    return last + named_event("content_block_stop", {"index": block.number})


def _delta(block: Block, delta: dict[str, Any]) -> bytes:
    return named_event("content_block_delta", {"index": block.number, "delta": delta})
