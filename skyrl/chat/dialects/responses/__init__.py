"""OpenAI's Responses: turns a request into a chat completion's, and the answer back.

`fields` names what is read of a request, `conversation` reads its items and tools, and `answer` writes answers and
streams as OpenAI's clients read them. Knows fields; does not know sessions, models or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import structs

from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.errors import RequestError
from skyrl.chat.dialects.dialect import TranslatedRequest
from skyrl.chat.dialects.parts import in_order_of_calls
from skyrl.chat.dialects.responses.answer import ResponsesEncoder
from skyrl.chat.dialects.responses.conversation import ChatTools, Conversation, tools_in
from skyrl.chat.dialects.responses.fields import Echo, ResponsesRequest, TextFormat

_LOGPROBS = "message.output_text.logprobs"


class _Continuing(msgspec.Struct):
    previous_response_id: str | None = None


def previous_response_id(body: bytes) -> str | None:
    """The response that a request continues. Raises RequestError."""
    return decode_json(_Continuing, body).previous_response_id


def to_chat(body: bytes, previous: Sequence[dict[str, Any]] | None, new_id: str) -> TranslatedRequest:
    """`previous` are the messages of the chat up to the previous response's answer, with that answer. `new_id` becomes
    the response's id (`resp_...`).

    `instructions` are the first message. They take the place of the previous request's, as in OpenAI's own server; a
    request without instructions keeps those. `max_output_tokens` becomes `max_completion_tokens`, which may be more
    than fits the context. Raises RequestError naming the field of the Responses request.
    """
    given = decode_json(ResponsesRequest, body)
    _check_supported(given)
    left_out: list[str] = []
    tools = ChatTools(given.tools or (), left_out, tools_in(given.input))
    conversation = Conversation(tools, left_out)
    conversation.add(given.input)
    given = structs.replace(given, **conversation.settings)
    messages = in_order_of_calls([*_continued(previous or (), given.instructions), *conversation.messages])
    if not messages:
        raise RequestError("must hold at least one item", field="input")
    chat: dict[str, Any] = {"messages": messages, "stream": bool(given.stream)}
    if given.model is not None:
        chat["model"] = given.model
    if tools.chat:
        chat["tools"] = tools.chat
        if given.parallel_tool_calls is not None:
            chat["parallel_tool_calls"] = given.parallel_tool_calls
    if given.tool_choice is not None:
        chat |= tools.choice(given.tool_choice)
    chat |= _options(given)
    if given.include is not None and _LOGPROBS in given.include:
        left_out.append("include: answers of this dialect have no logprobs")
    if given.truncation == "auto":
        left_out.append("truncation: a conversation that does not fit the context is refused, not cut")
    encoder = ResponsesEncoder(new_id, given.model or "", decode_json(Echo, body).fields(), tools)
    return TranslatedRequest(chat, encoder, tuple(left_out))


def _check_supported(given: ResponsesRequest) -> None:
    if given.background:
        raise RequestError("is not supported: ask for a stream, or wait for the answer", field="background")
    for name in ("conversation", "prompt"):
        if getattr(given, name) is not None:
            raise RequestError("is not supported: send the messages in input", field=name)


def _continued(previous: Sequence[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The messages before those of `input`."""
    if instructions is None:
        return list(previous)
    first = {"role": "system", "content": instructions}
    return [first, *(previous[1:] if previous and previous[0]["role"] == "system" else previous)]


def _options(given: ResponsesRequest) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_completion_tokens": given.max_output_tokens,
        "temperature": given.temperature,
        "top_p": given.top_p,
        "reasoning_effort": None if given.reasoning is None else given.reasoning.effort,
    }
    if given.text is not None and given.text.format is not None:
        options["response_format"] = _response_format(given.text.format)
    return {name: value for name, value in options.items() if value is not None}


def _response_format(given: TextFormat) -> dict[str, Any] | None:
    if given.type != "json_schema":
        return None if given.type == "text" else {"type": given.type}
    if given.schema is None:
        raise RequestError("is missing", field="text.format.schema")
    told = {"name": given.name, "description": given.description, "schema": given.schema, "strict": given.strict}
    return {"type": "json_schema", "json_schema": {name: part for name, part in told.items() if part is not None}}


__all__ = ["ResponsesRequest", "previous_response_id", "to_chat"]
