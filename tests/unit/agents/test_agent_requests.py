"""Which failures of the server are tried again, and what is raised."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
from aiohttp import web

from skyrl.agents import AgentServer, BadAnswer, RequestRefused, ServerUnavailable
from skyrl.agents.runs import is_servers

CREATED = {"session_id": "s1", "key": "ska-s1", "base_url": "http://127.0.0.1"}


@asynccontextmanager
async def server(answers: list[web.Response], patience_s: float = 20.0) -> AsyncIterator[tuple[AgentServer, list[str]]]:
    """A client of a server that gives each answer once, and the requests that have come. None left: it hangs up."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(f"{request.method} {request.path_qs}")
        if not answers:
            assert request.transport is not None
            request.transport.abort()
        return answers.pop(0) if answers else web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with AgentServer(
            f"http://127.0.0.1:{runner.addresses[0][1]}/", "tml-key", patience_s=patience_s
        ) as client:
            yield client, asked
    finally:
        await runner.cleanup()


def json(body: object, status: int = 200, **headers: str) -> web.Response:
    content = msgspec.json.encode(body)
    return web.Response(body=content, status=status, headers=headers, content_type="application/json")


async def test_a_server_that_is_busy_or_restarts_is_asked_again() -> None:
    answers = [json({"detail": "busy"}, 429), web.Response(status=502, text="<html>"), json(CREATED)]
    async with server(answers) as (client, asked):
        session = await client.session(model="tiny")
    assert session.key == "ska-s1"
    assert asked == ["POST /api/v1/agent_sessions"] * 3


async def test_the_pause_is_as_long_as_the_server_asks() -> None:
    async with server([json({"detail": "busy"}, 503, **{"Retry-After": "1"}), json(CREATED)]) as (client, _):
        began = time.monotonic()
        await client.session(model="tiny")
        assert time.monotonic() - began >= 1


async def test_a_server_that_stays_away_is_given_up_with_the_last_failure() -> None:
    async with server([], patience_s=0.5) as (client, asked):
        with pytest.raises(ServerUnavailable, match=r"POST /api/v1/agent_sessions: no answer within 0\.5 s; last: \w+"):
            await client.session(model="tiny")
    assert len(asked) > 1


async def test_a_refusal_is_raised_at_once_with_the_servers_sentence() -> None:
    async with server([json({"detail": "model: not found", "field": "model"}, 404)]) as (client, asked):
        with pytest.raises(RequestRefused, match="HTTP 404: model: not found") as refused:
            await client.session(model="none")
    assert refused.value.status == 404
    assert len(asked) == 1


async def test_an_answer_without_a_key_is_an_error_of_the_server() -> None:
    async with server([json({"session_id": "s1"})]) as (client, _):
        with pytest.raises(BadAnswer, match="key"):
            await client.session(model="tiny")


async def test_all_pages_of_turns_are_read() -> None:
    first = {"rows": [{"id": "a"}, {"id": "b"}], "total": 3, "next_offset": "2-3-00"}
    pages = [json(first), json({"rows": [{"id": "c"}], "total": 3, "next_offset": None})]
    async with server([json(CREATED), *pages]) as (client, asked):
        turns = await (await client.session(model="tiny")).turns()
    assert [turn["id"] for turn in turns] == ["a", "b", "c"]
    assert asked[-1] == "GET /api/v1/agent_sessions/s1/turns?offset=2-3-00&limit=64"


async def test_pages_that_end_too_soon_are_an_error() -> None:
    async with server([json(CREATED), json({"rows": [], "total": 3})]) as (client, _):
        session = await client.session(model="tiny")
        with pytest.raises(BadAnswer, match="0 of 3"):
            await session.turns()


class Status(Exception):
    """As the SDKs of OpenAI and Anthropic have it."""

    def __init__(self, status_code: int) -> None:
        super().__init__(status_code)
        self.status_code = status_code


def test_the_server_is_to_blame_for_its_5xx_and_the_agent_for_what_it_asked() -> None:
    assert is_servers(Status(503))
    assert is_servers(ExceptionGroup("two tools", [ValueError(), Status(500)]))
    assert not is_servers(Status(400))
    assert not is_servers(ValueError("no number"))


@pytest.mark.parametrize("sdk", [openai.OpenAI, anthropic.Anthropic])
def test_the_server_is_to_blame_for_a_connection_that_an_sdk_cannot_make(sdk: Any) -> None:
    with (
        sdk(base_url="http://127.0.0.1:9", api_key="ska-s1", max_retries=0) as away,
        pytest.raises((openai.APIConnectionError, anthropic.APIConnectionError)) as error,
    ):
        away.models.list()
    assert is_servers(error.value)


def test_the_server_is_to_blame_for_a_status_that_httpx_raises() -> None:
    request = httpx.Request("POST", "http://127.0.0.1/v1/chat/completions")
    with pytest.raises(httpx.HTTPStatusError) as error:
        httpx.Response(502, request=request).raise_for_status()
    assert is_servers(error.value)
