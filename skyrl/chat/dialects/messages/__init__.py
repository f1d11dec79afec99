"""Anthropic's Messages: turns a request into a chat completion's, and the answer back.

`conversation` has the fields of a request and reads its messages and tools; `answer` writes answers, streams and errors
as Anthropic's clients read them. Knows fields; does not know sessions, models or HTTP.
"""

from __future__ import annotations

from typing import Any

from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.errors import RequestError
from skyrl.chat.dialects.dialect import TranslatedRequest
from skyrl.chat.dialects.messages.answer import AnthropicError, MessagesEncoder, error_body
from skyrl.chat.dialects.messages.conversation import (
    Counted,
    MessagesRequest,
    chat_choice,
    chat_messages,
    chat_tools,
    system_message,
    tools_in,
)
from skyrl.chat.dialects.parts import in_order_of_calls


def to_chat(body: bytes) -> TranslatedRequest:
    """`max_tokens` becomes `max_completion_tokens`, which may be more than fits the context: agents send a constant.
    Raises RequestError naming the field of the Messages request."""
    given = decode_json(MessagesRequest, body)
    left_out: list[str] = []
    chat = _prompt(given, left_out)
    chat["max_completion_tokens"] = given.max_tokens
    chat["stream"] = bool(given.stream)
    for name in ("temperature", "top_p", "top_k"):
        if (value := getattr(given, name)) is not None:
            chat[name] = value
    if given.stop_sequences:
        chat["stop"] = given.stop_sequences
    if given.output_config is not None and given.output_config.format is not None:
        shape = {"name": "answer", "schema": given.output_config.format.schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": shape}
    return TranslatedRequest(chat, MessagesEncoder(), tuple(left_out))


def to_count(body: bytes) -> dict[str, Any]:
    """The fields of the chat whose prompt is to be counted. Raises RequestError naming the field."""
    return _prompt(decode_json(Counted, body), [])


def _prompt(given: Counted, left_out: list[str]) -> dict[str, Any]:
    """The fields of the chat that its prompt is made of."""
    if not given.messages:
        raise RequestError("must hold at least one message", field="messages")
    first = None if given.system is None else system_message(given.system, left_out)
    messages = in_order_of_calls(chat_messages(given.messages, left_out))
    chat: dict[str, Any] = {"model": given.model, "messages": messages if first is None else [first, *messages]}
    own = [(f"tools[{number}]", tool) for number, tool in enumerate(given.tools or ())]
    tools = chat_tools([*own, *tools_in(given.messages)], left_out)
    if tools:
        chat["tools"] = tools
    if given.tool_choice is not None:
        chat |= chat_choice(given.tool_choice, tools)
    if given.messages[-1].role == "assistant":  # the answer goes on where this message ends
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if given.thinking is not None and given.thinking.type == "disabled":
        chat["chat_template_kwargs"] = {"enable_thinking": False}
    if given.output_config is not None and given.output_config.effort is not None:
        chat["reasoning_effort"] = given.output_config.effort
    if given.mcp_servers:
        left_out.append("mcp_servers: this server connects to no MCP server")
    return chat


__all__ = ["AnthropicError", "MessagesRequest", "error_body", "to_chat", "to_count"]
