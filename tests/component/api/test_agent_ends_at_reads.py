"""An end of an agent session at the moment at which it is read from the database: no turn begins after the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from api_harness import BASE, Api
from router_world import until

from skyrl.api.access import tenant_of_key
from skyrl.base.wire.errors import RequestError
from skyrl.chat.agents.live_sessions import LiveSession
from tests.postgres_server import ON_BOTH, ON_POSTGRES

TENANT = tenant_of_key("tml-one")


async def created(api: Api) -> str:
    return (await api.post("agent_sessions", {"model": BASE})).json()["session_id"]


@asynccontextmanager
async def read_half(
    api: Api, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Task[LiveSession]]:
    """A session that is being opened: its row is read, its turns are not. At the end it is open in memory."""
    turns, went_on, reads = api.services.agent_turns, asyncio.Event(), []
    of: Callable[..., Any] = turns.of

    async def slow(*given: Any) -> Any:
        reads.append(given)
        if len(reads) == 1:
            await went_on.wait()
        return await of(*given)

    monkeypatch.setattr(turns, "of", slow)
    opening = asyncio.create_task(api.services.agents.live.open(session_id, TENANT))
    await until(lambda: bool(reads))
    yield opening
    went_on.set()


async def until_stored(api: Api, session_id: str) -> None:
    """Wait until the end is in the database."""
    find = api.services.agent_sessions.find
    while (session := await find(session_id)) is None or session.ended_at is None:  # noqa: ASYNC110 - a row tells
        await asyncio.sleep(0.005)


def refused(live: LiveSession) -> None:
    with pytest.raises(RequestError, match="has ended: it was ended by a call"):
        live.check_open()


@ON_BOTH
async def test_a_session_that_ends_while_it_is_read_has_ended(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id, lives = await created(api), api.services.agents.live
    async with read_half(api, session_id, monkeypatch) as opening:
        ending = asyncio.create_task(lives.end(session_id, "called"))
        await until_stored(api, session_id)
    assert await ending
    refused(await opening)


@ON_POSTGRES
async def test_a_session_that_another_process_ends_while_it_is_read_has_ended(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id, lives = await created(api), api.services.agents.live
    async with read_half(api, session_id, monkeypatch) as opening:
        assert await api.services.agent_sessions.end(session_id, "called", time.time())
        told = asyncio.create_task(lives.look_again(session_id))
        await asyncio.sleep(0)
    await told
    refused(await opening)


@ON_POSTGRES
async def test_a_turn_that_is_planned_when_another_process_ends_its_session_does_not_begin(api: Api) -> None:
    session_id, lives = await created(api), api.services.agents.live
    live = await lives.open(session_id, TENANT)  # the turn is planned from here to its second `check_open`
    assert await api.services.agent_sessions.end(session_id, "called", time.time())
    await lives.look_again(session_id)
    refused(live)
