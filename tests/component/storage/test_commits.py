"""An answer of the API waits for the commit on which it rests: with a slow commit it comes late, without a commit
never."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from api_harness import Api, Serve, sample_body, tokens
from fake_upstream import FakeUpstream, after, complete
from sqlalchemy import func, select

from skyrl.storage.db import database as database_module
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import futures
from tests.databases import hold_records
from tests.postgres_server import ON_BOTH

pytestmark = ON_BOTH

OTHER_REQUESTS = 50
"""The number of later requests that are answered before the check. On a slow machine they slow down as much as an
answer that does not wait for its commit."""


@contextmanager
def commits_held(database: Database) -> Iterator[None]:
    """Another process holds the write lock, and what is written without it."""
    with database.writer.begin() as connection:
        hold_records(connection)
        yield


@pytest.fixture
def no_lock_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that waits for the lock fails at once."""
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_MS", 20)


def statuses(database: Database) -> dict[str, int]:
    query = select(futures.c.status, func.count()).group_by(futures.c.status)
    return {row[0]: row[1] for row in database.read(lambda c: list(c.execute(query)))}


async def is_early(task: asyncio.Task[object], api: Api) -> bool:
    """Whether the task has ended after later requests, which read the database, were answered."""
    for _ in range(OTHER_REQUESTS):
        assert (await api.http.get("/api/v1/sessions")).status_code == 200
    return task.done()


async def test_the_check_notices_an_answer_that_waits_for_no_commit(api: Api, database: Database) -> None:
    """This test shows that the tests below would notice an answer that does not wait. A result that is stored already
    is such an answer, however long a commit takes: it comes while the commit is held."""
    request_id = (await api.sample(await api.sampler(), 1))["request_id"]
    await api.result(request_id)
    with commits_held(database):
        hearing = asyncio.create_task(api.result(request_id))
        async with asyncio.timeout(60):  # on a busy machine the answer may need more time than 50 others
            while not await is_early(hearing, api):
                pass
    assert tokens(await hearing) == [[0, 1, 2]]


async def test_a_sample_is_acknowledged_and_forwarded_after_its_commit(
    api: Api, upstream: FakeUpstream, database: Database
) -> None:
    sampler = await api.sampler()
    with commits_held(database):
        asking = asyncio.create_task(api.sample(sampler, 1))
        assert not await is_early(asking, api)
        assert not upstream.completions
    promise = await asking
    assert tokens(await api.result(promise["request_id"])) == [[0, 1, 2]]


@pytest.mark.usefixtures("no_lock_wait")
async def test_a_sample_that_cannot_be_stored_is_refused_and_may_be_sent_again(
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


async def test_a_result_is_answered_after_its_commit(api: Api, upstream: FakeUpstream, database: Database) -> None:
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


@pytest.mark.usefixtures("no_lock_wait")
async def test_a_result_that_cannot_be_stored_is_answered_once_it_is_stored(
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
    assert len(upstream.completions) == 1, "the result was kept and not sampled again"
