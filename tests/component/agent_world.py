"""Agents with sessions at an API process on a real socket, before a vLLM that answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from api_harness import Api, Serve
from chatting_upstream import ChattingUpstream
from fake_upstream import FakeUpstream
from router_world import PromptServer

from skyrl.api.app import create_app
from skyrl.api.direct_http import protocol_with
from skyrl.base.tiny.tools import make
from skyrl.chat.agents.live_sessions import LiveSession
from skyrl.runtime.processes.ports import listen
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import publish_training

TENANT = {"X-API-Key": "tml-one"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CONTEXT = 4_000_000
VOCABULARY, END = 512, 2
"""Of the tiny model: its number of tokens, and the one that ends an answer."""


@dataclass(frozen=True)
class Agent:
    """A session, and a client with its key."""

    id: str
    key: str
    http: httpx.AsyncClient

    async def ask(self, path: str, **fields: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}"}
        return await self.http.post(path, json={"model": "any", "max_tokens": 9} | fields, headers=headers)

    async def say(self, messages: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The answer to a chat."""
        answer = await self.ask(CHAT, messages=messages, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    async def get(self, path: str = "") -> Any:
        """The tenant's view of the session."""
        answer = await self.http.get(f"/api/v1/agent_sessions/{self.id}{path}", headers=TENANT)
        assert answer.status_code == 200, answer.text
        return answer.json()


@dataclass(frozen=True)
class Server:
    """An API process on a real socket, before a server that answers chats."""

    api: Api
    vllm: ChattingUpstream
    http: httpx.AsyncClient
    model: str

    async def agent(self, **options: Any) -> Agent:
        body = {"model": self.model, **options}
        answer = await self.http.post("/api/v1/agent_sessions", json=body, headers=TENANT)
        assert answer.status_code == 200, answer.text
        made = answer.json()
        return Agent(made["session_id"], made["key"], self.http)

    async def end(self, agent: Agent) -> None:
        answer = await self.http.post(f"/api/v1/agent_sessions/{agent.id}/end", headers=TENANT)
        assert answer.status_code == 200, answer.text

    def live(self, agent: Agent) -> LiveSession | None:
        return self.api.services.agents.live.peek(agent.id)

    async def shrink(self) -> None:
        """As it happens every ten seconds."""
        await self.api.services.agents.live.shrink()


@asynccontextmanager
async def agent_server(
    serve: Serve, database: Database, upstream: FakeUpstream, directory: Path
) -> AsyncIterator[Server]:
    """`directory` is empty, and gets the model."""
    make(directory, CONTEXT)
    database.write(lambda c: publish_training(c, ready=True, reason="", vocab_size=VOCABULARY, max_context=CONTEXT))
    sockets = listen("127.0.0.1", 0)
    async with serve(base_model=str(directory)) as api:
        app = create_app(api.services)
        app.prepare()
        running = PromptServer(app, drain_s=1, http=protocol_with(app))
        serving = asyncio.create_task(running.serve(sockets))
        url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
                yield Server(api, ChattingUpstream(upstream, END, str(directory)), http, str(directory))
        finally:
            running.should_exit = True
            await serving


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
