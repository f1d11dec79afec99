"""An agent's chats: each request is a turn of the session that its key belongs to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skyrl.base.wire.errors import RequestError
from skyrl.chat.agents.live_sessions import RunningTurn
from skyrl.chat.agents.planning import TurnRequest
from skyrl.chat.agents.turns import TurnRunner
from skyrl.chat.dialects.dialect import AnswerEncoder, TranslatedRequest
from skyrl.server.api.call import Call
from skyrl.server.api.generating import Generating, release, spoken

RETRY_COUNT = "x-stainless-retry-count"
"""A header of the SDKs of OpenAI and Anthropic: how often they have sent this request before."""


class AgentChats:
    def __init__(self, turns: TurnRunner, generating: Generating) -> None:
        self._turns = turns
        self._generating = generating

    async def answer(self, call: Call, request: TranslatedRequest, dialect: str, size: int, turn_id: str) -> Response:
        """The answer to a turn, whole or as a stream. Raises RequestError."""
        self._generating.check_open()
        asked = _asked(call, request.chat, dialect, size, turn_id)
        release(call)
        turn = await self._turns.begin(asked)
        if request.chat.get("stream"):
            events = self._events(turn, asked, request.speaker)
            return await self._generating.stream(call, events, request.speaker)
        body = await self._generating.while_there(call, self._turns.whole(turn, asked))
        return Delivered(request.speaker.whole(body), lambda: self._turns.delivered(turn, asked))

    async def count(self, call: Call, chat: dict[str, Any], size: int) -> int:
        """How many tokens the prompt of a chat has. Raises RequestError."""
        self._generating.check_open()
        return await self._turns.count(_asked(call, chat, "messages", size, ""))

    async def history(self, call: Call, turn_id: str, field: str) -> list[dict[str, Any]]:
        """All messages up to the answer of a turn. Raises RequestError naming `field` if the session has no such
        turn."""
        found = await self._turns.history(_session_of(call), call.tenant, turn_id)
        if found is None:
            raise RequestError("no such response in this agent session", field=field, status=404)
        return found

    async def _events(
        self, turn: RunningTurn, asked: TurnRequest, speaker: AnswerEncoder
    ) -> AsyncGenerator[bytes, None]:
        async for event in spoken(self._turns.chunks(turn, asked), speaker):
            yield event
        self._turns.delivered(turn, asked)  # the last event was taken


class Delivered(Response):
    """A whole answer. `sent` is called after it was sent."""

    def __init__(self, body: bytes, sent: Callable[[], None]) -> None:
        super().__init__(body, media_type="application/json")
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        self._sent()


def _session_of(call: Call) -> str:
    session_id = call.caller.agent_session
    assert session_id is not None
    return session_id


def _asked(call: Call, chat: dict[str, Any], dialect: str, size: int, turn_id: str) -> TurnRequest:
    retried = call.received.get(RETRY_COUNT, "").lstrip("0").isdecimal()
    return TurnRequest(_session_of(call), call.tenant, chat, dialect, size, call.id, retried, turn_id)
