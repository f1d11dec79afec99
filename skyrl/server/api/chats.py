"""The routes of chats: OpenAI's chat completions and Responses, and Anthropic's Messages, of tenants and of agents.

Each dialect is turned into a chat completion and back. An agent's request is a turn of its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

from skyrl.base.types.requests import new_request_id
from skyrl.base.wire.decoding import raw_fields, raw_value
from skyrl.base.wire.errors import RequestError
from skyrl.chat.dialects import messages, responses
from skyrl.chat.dialects.dialect import ChatEncoder, TranslatedRequest
from skyrl.chat.openai.errors import TOO_LONG_CODE, OpenAIError
from skyrl.chat.openai.fields import ChatFields
from skyrl.chat.openai.generation import chat
from skyrl.server.api.agent_chats import AgentChats
from skyrl.server.api.call import Call
from skyrl.server.api.generating import Generating
from skyrl.server.api.openai import MESSAGES, PREFIXES
from skyrl.server.api.reply import reply
from skyrl.server.api.route import Body
from skyrl.server.api.routes import Routes
from skyrl.server.api.services import Services
from skyrl.storage.futures.entries import LARGE_BODY_BYTES

COUNT, RESPONSES = f"{MESSAGES}/count_tokens", "/v1/responses"
RESPONSE_ID = "resp_"
LEFT_OUT = "X-Skyrl-Left-Out"
"""A header of an answer: what of the request had no effect."""


async def _read(body: bytes, read: Callable[..., Any], *more: Any) -> Any:
    """`read` of a body; of a large one in a thread."""
    return await asyncio.to_thread(read, body, *more) if len(body) > LARGE_BODY_BYTES else read(body, *more)


def router(services: Services) -> Routes:
    routes = Routes("chats", prefix="")
    generating = Generating(services)
    agents = AgentChats(services.agents, generating)

    async def chat_completions(call: Call, body: bytes) -> Response:
        """The chat is rendered with the model's own template."""
        if call.caller.agent_session is None:
            return await generating.answer(call, body, chat, ChatEncoder())
        fields = await _read(body, _chat_fields)
        return await agents.answer(call, TranslatedRequest(fields, ChatEncoder()), "chat", len(body), new_request_id())

    async def anthropic_messages(call: Call, body: bytes) -> Response:
        return await answer(call, await _read(body, messages.to_chat), "messages", len(body), new_request_id())

    async def count_tokens(call: Call, body: bytes) -> Response:
        fields = await _read(body, messages.to_count)
        if call.caller.agent_session is not None:
            count = await agents.count(call, fields, len(body))
        else:
            count = await generating.count(call, msgspec.json.encode(fields))
        return reply({"input_tokens": count})

    async def openai_responses(call: Call, body: bytes) -> Response:
        before = None
        if (previous := responses.previous_response_id(body)) is not None:
            if call.caller.agent_session is None:
                raise RequestError(
                    "needs an agent session: this server keeps no responses; send all items in input",
                    field="previous_response_id",
                )
            turn = previous.removeprefix(RESPONSE_ID)
            before = await agents.history(call, turn, "previous_response_id")
        new_id = new_request_id()
        spoken = await _read(body, responses.to_chat, before, RESPONSE_ID + new_id)
        try:
            return await answer(call, spoken, "responses", len(body), new_id)
        except OpenAIError as error:
            if spoken.chat.get("stream") and error.code == TOO_LONG_CODE:  # Codex compacts only where a stream says so
                return Response(spoken.speaker.failed(error), media_type="text/event-stream")
            raise

    async def answer(call: Call, spoken: TranslatedRequest, dialect: str, size: int, turn_id: str) -> Response:
        if call.caller.agent_session is not None:
            return _noted(await agents.answer(call, spoken, dialect, size, turn_id), spoken)
        if spoken.chat.get("stream"):
            spoken.chat["stream_options"] = {"include_usage": True}
        body = msgspec.json.encode(spoken.chat)
        return _noted(await generating.answer(call, body, chat, spoken.speaker), spoken)

    for prefix in PREFIXES:
        body = Body(ChatFields, read_as=bytes, bound="sample")
        routes.post(f"{prefix}/chat/completions", scope="agent", body=body)(chat_completions)
    body = Body(messages.MessagesRequest, read_as=bytes, bound="sample")
    routes.post(MESSAGES, scope="agent", body=body)(anthropic_messages)
    routes.post(COUNT, scope="agent", body=body)(count_tokens)
    body = Body(responses.ResponsesRequest, read_as=bytes, bound="sample")
    routes.post(RESPONSES, scope="agent", body=body)(openai_responses)
    return routes


def _chat_fields(body: bytes) -> dict[str, Any]:
    return {name: raw_value(raw, name) for name, raw in raw_fields(body).items()}


def _noted(answer: Response, spoken: TranslatedRequest) -> Response:
    if spoken.left_out:
        answer.headers[LEFT_OUT] = "; ".join(spoken.left_out)[:1000].encode("ascii", "replace").decode()
    return answer
