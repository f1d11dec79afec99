"""What the API says waits for the commit that makes it true: with a slow commit it is said late, with none never."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from api_harness import Api, Serve, asked, tokens
from fake_upstream import FakeUpstream, after, complete
from sqlalchemy import func, select

from skyrl.db import database as database_module
from skyrl.db.database import Database
from skyrl.db.futures import futures
from tests.postgres_server import ON_BOTH

pytestmark = ON_BOTH

OTHERS = 40
"""Requests that read the database. An answer that waits for nothing takes as many steps as one of them."""


@contextmanager
def commits_held(database: Database) -> Iterator[None]:
    """Somebody else has the write lock."""
    with database.writer.begin():
        yield


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the write lock gives up at once: a commit that must wait fails."""
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_MS", 20)


def statuses(database: Database) -> dict[str, int]:
    query = select(futures.c.status, func.count()).group_by(futures.c.status)
    return {row[0]: row[1] for row in database.read(lambda c: list(c.execute(query)))}


async def is_early(api: Api, task: asyncio.Task[object]) -> bool:
    """Whether it ends while others come and go: no matter of time, so it holds on a slow machine too."""
    for _ in range(OTHERS):
        assert (await api.http.get("/api/v1/sessions")).status_code == 200
    return task.done()


async def test_a_sample_is_acknowledged_and_sent_on_once_it_is_stored(
    api: Api, upstream: FakeUpstream, database: Database
) -> None:
    sampler = await api.sampler()
    with commits_held(database):
        asking = asyncio.create_task(api.sample(sampler, 1))
        assert not await is_early(api, asking)
        assert not upstream.completions
    promise = await asking
    assert tokens(await api.result(promise["request_id"])) == [[0, 1, 2]]


@pytest.mark.usefixtures("impatient")
async def test_a_sample_that_cannot_be_stored_is_not_acknowledged_and_may_be_sent_again(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    async with serve() as api:
        sampler = await api.sampler()
        with commits_held(database):
            refused = await api.post("asample", asked(sampler, 1))
        assert refused.status_code >= 500
        assert statuses(database) == {}
        assert not upstream.completions
        promise = await api.sample(sampler, 1)
        assert tokens(await api.result(promise["request_id"])) == [[0, 1, 2]]


async def test_a_result_is_told_once_it_is_stored(api: Api, upstream: FakeUpstream, database: Database) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    request_id = (await api.sample(await api.sampler(), 1))["request_id"]
    with commits_held(database):
        hearing = asyncio.create_task(api.result(request_id))
        go.set()
        assert not await is_early(api, hearing)
        assert statuses(database) == {"pending": 1}
    assert tokens(await hearing) == [[0, 1, 2]]
    assert statuses(database) == {"done": 1}


@pytest.mark.usefixtures("impatient")
async def test_a_result_that_cannot_be_stored_is_told_when_it_can(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    async with serve() as api:
        request_id = (await api.sample(await api.sampler(), 1))["request_id"]
        with commits_held(database):
            hearing = asyncio.create_task(api.result(request_id))
            go.set()
            assert not await is_early(api, hearing)
        assert tokens(await hearing) == [[0, 1, 2]]
        assert statuses(database) == {"done": 1}
    assert len(upstream.completions) == 1, "the answer was kept, not asked for again"
