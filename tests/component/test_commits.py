"""What the API says waits for the commit that makes it true: with a slow commit it is said late, with none never."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from api_harness import Api, Serve, sample_body, tokens
from fake_upstream import FakeUpstream, after, complete
from sqlalchemy import func, select

from skyrl.db import database as database_module
from skyrl.db.database import Database
from skyrl.db.futures import futures
from tests.postgres_server import ON_BOTH

pytestmark = ON_BOTH

OTHER_REQUESTS = 50
"""So many others are answered meanwhile, one after the other: on a slow machine they take as much longer as an answer
that does not wait for its commit would."""


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


async def is_early(task: asyncio.Task[object], api: Api) -> bool:
    """Whether it has ended after other requests, which came later and read the database, were answered."""
    for _ in range(OTHER_REQUESTS):
        assert (await api.http.get("/api/v1/sessions")).status_code == 200
    return task.done()


async def test_an_answer_that_waits_for_no_commit_is_seen_to_be_early(api: Api) -> None:
    """Without it, the tests below could pass on a server that waits for nothing."""
    sampler = await api.sampler()
    assert await is_early(asyncio.create_task(api.sample(sampler, 1)), api)


async def test_a_sample_is_acknowledged_and_sent_on_once_it_is_stored(
    api: Api, upstream: FakeUpstream, database: Database
) -> None:
    sampler = await api.sampler()
    with commits_held(database):
        asking = asyncio.create_task(api.sample(sampler, 1))
        assert not await is_early(asking, api)
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
            refused = await api.post("asample", sample_body(sampler, 1))
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
        assert not await is_early(hearing, api)
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
            assert not await is_early(hearing, api)
        assert tokens(await hearing) == [[0, 1, 2]]
        assert statuses(database) == {"done": 1}
    assert len(upstream.completions) == 1, "the answer was kept, not asked for again"
