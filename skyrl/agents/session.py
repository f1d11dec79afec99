"""Sessions of agents: make one, give it to an agent, reward it, end it, and read its trajectory.

Knows the server's routes for sessions. An agent itself needs none of this: it has `Session.environment`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, Required, Self, TypedDict, Unpack

import msgspec

from skyrl.agents.errors import AgentsError, BadAnswer
from skyrl.agents.requests import Requests, decoded
from skyrl.agents.trajectories import Row, rows_of

ROUTE = "/api/v1/agent_sessions"
PAGE = 64
"""Rows or turns of one request. A row has one trajectory's tokens, so a page may have some megabytes."""
END_S = 10.0
"""How long the end of a session may take if its agent has failed or was cancelled. Its limits end it otherwise."""

Format = Literal["datums", "samples", "verl", "jsonl"]


class Limits(TypedDict, total=False):
    """When the server ends a session. `tokens` are those sampled and those new in prompts; `seconds` is from its
    creation, `idle_s` from its last request. A limit that is left out is the server's."""

    turns: int
    tokens: int
    seconds: float
    idle_s: float


class SessionOptions(TypedDict, total=False):
    """What a session is made with.

    `model` is a served name, a checkpoint's path (`tinker://<run>/sampler_weights/<name>`) or a run's
    (`tinker://<run>`: its newest sampler weights). With `follows="newest"` each turn is sampled from the weights that
    the model then has, otherwise all turns from those that it had at the creation. `sampling` are fields of a chat
    completion that hold where a request has none, such as `{"temperature": 1.0, "max_tokens": 512}`. With
    `thinking="keep"` earlier answers are continued with their thinking, though the agent or the model's template drops
    it; with `"template"`, the default, such a turn forks. `routed_experts` keeps the experts of a mixture for the
    trainer.
    """

    model: Required[str]
    name: str
    follows: Literal["pinned", "newest"]
    limits: Limits
    sampling: Mapping[str, Any]
    metadata: Mapping[str, Any]
    thinking: Literal["template", "keep"]
    routed_experts: bool


class _Created(msgspec.Struct):
    session_id: str
    key: str
    base_url: str


class _Page(msgspec.Struct):
    rows: list[dict[str, Any]]
    total: int
    next_offset: str | int | None = None


class AgentServer:
    """The server, for one tenant. Use as an asynchronous context manager.

    Failed connections, 429 and 5xx are tried again for up to `patience_s`. Errors of all methods, and of those of a
    session: RequestRefused (the server's status and sentence), ServerUnavailable, BadAnswer.
    """

    def __init__(self, base_url: str, api_key: str, *, patience_s: float = 60.0) -> None:
        self._requests = Requests(base_url.rstrip("/"), api_key, patience_s)

    async def __aenter__(self) -> Self:
        await self._requests.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._requests.__aexit__(*error)

    async def session(self, **options: Unpack[SessionOptions]) -> Session:
        """A new session. If the connection breaks before the answer arrives, the server may have made another one,
        which nobody uses; it ends when it has been idle."""
        created = decoded(_Created, await self._requests.send("POST", ROUTE, body=options))
        return Session(self._requests, created.session_id, created.key, created.base_url, options["model"])


class Session:
    """One agent's session. As an asynchronous context manager it ends the session, also if the agent is cancelled."""

    def __init__(self, requests: Requests, session_id: str, key: str, base_url: str, model: str) -> None:
        self._requests = requests
        self.id = session_id
        self.key = key
        """The agent's API key. It can sample in this session, and nothing else."""
        self.base_url = base_url
        """The server's origin, which is the base URL for clients of Anthropic's API."""
        self.model = model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *error: object) -> None:
        if kind is None:
            await self.end()
            return
        with suppress(AgentsError, TimeoutError):  # the error that ended the block is the one to raise
            async with asyncio.timeout(END_S):
                await self.end()

    @property
    def openai_base_url(self) -> str:
        """The base URL for clients of OpenAI's API."""
        return f"{self.base_url}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which agents and SDKs find the server. Each key that they know is set, so that none that the
        caller has for another server is sent to this one. Whichever of Anthropic's two a client takes, it is valid."""
        return {
            "OPENAI_BASE_URL": self.openai_base_url,
            "OPENAI_API_BASE": self.openai_base_url,  # litellm and older clients
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_AUTH_TOKEN": self.key,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_MODEL": self.model,
        }

    async def reward(self, reward: float) -> None:
        """Keep the reward with the session. It must be finite."""
        await self._send("POST", "/reward", body={"reward": float(reward)})

    async def end(self) -> None:
        """End the session: its key samples nothing more. A session that has ended stays as it is."""
        await self._send("POST", "/end")

    async def trajectory(self, format: Format = "datums") -> list[dict[str, Any]]:
        """All rows of the trajectory, in the server's JSON for `format`."""
        return await self._pages("/trajectory", {"format": format})

    async def turns(self) -> list[dict[str, Any]]:
        """All turns, in the order in which they ended."""
        return await self._pages("/turns", {})

    async def rows(self) -> list[Row]:
        """The tokens to train on: every sampled token is trained in exactly one row."""
        return rows_of(await self.trajectory("datums"))

    async def _send(self, method: str, path: str, **request: Any) -> bytes:
        return await self._requests.send(method, f"{ROUTE}/{self.id}{path}", **request)

    async def _pages(self, path: str, query: dict[str, str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        offset: str | int | None = 0
        while offset is not None:
            asked = {**query, "offset": offset, "limit": PAGE}
            page = decoded(_Page, await self._requests.send("GET", f"{ROUTE}/{self.id}{path}", query=asked))
            found += page.rows
            offset = page.next_offset
            if len(found) != page.total if offset is None else not page.rows:
                raise BadAnswer(f"{path}: {len(found)} of {page.total} rows, and then none")
        return found
