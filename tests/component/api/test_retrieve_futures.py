"""One long poll for all samples of a sampling client: which ends it reports, how often, and what it costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
import pytest
from api_harness import LONG_S, Api, Serve, sample_body, tokens
from engine_harness import until
from fake_upstream import FakeUpstream, after, complete, error, never
from sqlalchemy import select

import skyrl.api.routes.futures
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import SETTLE, Outcome, futures, settlement
from skyrl.storage.futures.completion_feed import CLONE_BLOCK
from tests.postgres_server import ON_BOTH_SLOWLY

pytestmark = ON_BOTH_SLOWLY

T = TypeVar("T")


async def ask(api: Api, sampler: str, cursor: int = 0, clone: int = 0, **more: Any) -> httpx.Response:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
    return await api.post(
        "retrieve_futures", {"target": target, "prev_cursor": cursor, "retrieved_request_ids": []} | more
    )


async def poll(
    api: Api, sampler: str, cursor: int = 0, clone: int = 0, **more: Any
) -> tuple[int, list[dict[str, Any]]]:
    answer = await ask(api, sampler, cursor, clone, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["cursor"], answer.json()["completions"]


async def start_held_poll(api: Api, asking: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A poll, returned once the poll waits for an end."""
    task = asyncio.create_task(asking)
    await until(lambda: api.services.futures.ends.held > 0)
    return task


async def gather(api: Api, sampler: str, count: int, cursor: int = 0, clone: int = 0) -> tuple[int, list[str]]:
    """Poll again and again, from the last cursor, until `count` samples were reported, each once."""
    ids: list[str] = []
    while len(ids) < count:
        cursor, reported = await asyncio.wait_for(poll(api, sampler, cursor, clone), LONG_S)
        ids += [end["request_id"] for end in reported]
    assert len(set(ids)) == len(ids)
    return cursor, ids


async def test_each_ended_sample_is_reported_once_with_its_size(api: Api, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    sampler = await api.sampler()
    wanted = [(await api.sample(sampler, seq_id, num_samples=seq_id + 1))["request_id"] for seq_id in range(5)]
    held = await start_held_poll(api, poll(api, sampler))
    go.set()
    cursor, reported = await held
    while len(reported) < 5:
        cursor, more = await poll(api, sampler, cursor)
        reported += more
    assert sorted(end["request_id"] for end in reported) == sorted(wanted)
    for end in reported:
        assert end["state"] == "finished"
        result = await api.result(end["request_id"])
        assert end["response_payload_uncompressed_size"] == len(result.content)
    assert await poll(api, sampler, cursor, timeout=0) == (cursor, [])


async def test_a_poll_is_held_until_a_sample_ends(api: Api, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    sampler = await api.sampler()
    request_id = (await api.sample(sampler, 1))["request_id"]
    held = await start_held_poll(api, poll(api, sampler))
    await upstream.until(lambda server: server.busy == 1)
    await asyncio.sleep(0.05)
    assert not held.done()
    go.set()
    _, reported = await asyncio.wait_for(held, LONG_S)
    assert [end["request_id"] for end in reported] == [request_id]


@pytest.mark.usefixtures("drain_at_once")
async def test_a_poll_with_timeout_zero_answers_at_once_and_a_long_timeout_is_cut(
    api: Api, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.default = never
    sampler = await api.sampler()
    await api.sample(sampler, 1)
    monkeypatch.setattr(skyrl.api.routes.futures, "HOLD_S", 600)
    assert await asyncio.wait_for(poll(api, sampler, timeout=0), LONG_S) == (0, [])
    monkeypatch.setattr(skyrl.api.routes.futures, "HOLD_S", 0.05)
    assert await asyncio.wait_for(poll(api, sampler, timeout=600), LONG_S) == (0, [])
    assert await asyncio.wait_for(poll(api, sampler, 7), LONG_S) == (7, [])


async def test_failed_and_cancelled_samples_are_reported_as_failed(api: Api, upstream: FakeUpstream) -> None:
    sampler = await api.sampler()
    upstream.script.extend([error(400, "no"), never])
    failed = (await api.sample(sampler, 1))["request_id"]
    cursor, reported = await poll(api, sampler)
    assert reported == [{"state": "failed", "request_id": failed}]
    cancelled = (await api.sample(sampler, 2))["request_id"]
    await api.post("cancel_future", {"request_id": cancelled})
    assert (await poll(api, sampler, cursor))[1] == [{"state": "failed", "request_id": cancelled}]
    assert "no" in (await api.result(failed)).json()["error"]


async def test_the_samples_of_a_lost_answer_are_reported_again(api: Api) -> None:
    sampler = await api.sampler()
    wanted = {(await api.sample(sampler, seq_id))["request_id"] for seq_id in range(3)}
    cursor, ids = await gather(api, sampler, 3)
    assert set(ids) == wanted
    again, more = await poll(api, sampler, 0)
    assert {end["request_id"] for end in more} == wanted
    assert again >= cursor


async def test_each_clone_of_a_client_gets_its_own_samples(api: Api) -> None:
    sampler = await api.sampler()
    first = (await api.sample(sampler, 0))["request_id"]
    copy = (await api.sample(sampler, 3 * CLONE_BLOCK + 5))["request_id"]
    last = (await api.sample(sampler, 4 * CLONE_BLOCK - 1))["request_id"]
    unnumbered = (await api.post("asample", sample_body(sampler, None))).json()["request_id"]
    assert set((await gather(api, sampler, 2))[1]) == {first, unnumbered}
    assert set((await gather(api, sampler, 2, clone=3))[1]) == {copy, last}
    assert (await poll(api, sampler, clone=4, timeout=0))[1] == []


async def test_a_cursor_stays_valid_after_a_restart(serve: Serve, upstream: FakeUpstream) -> None:
    """The poll does not report samples that ended before the cursor again; it reports those that ended after it, or
    while no client polled."""
    async with serve() as api:
        sampler = await api.sampler()
        seen = {(await api.sample(sampler, seq_id))["request_id"] for seq_id in range(3)}
        cursor, ids = await gather(api, sampler, 3)
        assert set(ids) == seen
        not_reported = {(await api.sample(sampler, seq_id))["request_id"] for seq_id in range(3, 6)}
        await api.services.sampling.drain(LONG_S)
    async with serve() as api:
        reported, at = set(), cursor
        while not not_reported <= reported:
            at, more = await asyncio.wait_for(poll(api, sampler, at), LONG_S)
            reported |= {end["request_id"] for end in more}
        assert at > cursor
        late = (await api.sample(sampler, 6))["request_id"]
        _, ids = await gather(api, sampler, 1, at)
        assert ids == [late]


async def test_samples_that_ended_long_ago_are_not_reported_after_a_restart(serve: Serve) -> None:
    async with serve() as api:
        sampler = await api.sampler()
        for seq_id in range(3):
            await api.sample(sampler, seq_id)
        await api.services.sampling.drain(LONG_S)
        await asyncio.sleep(0.01)
        cursor = time.time_ns() // 1000
    async with serve() as api:
        assert (await poll(api, sampler, cursor, timeout=0))[1] == []
        assert len((await poll(api, sampler, 0, timeout=0))[1]) == 3


async def test_samples_from_before_and_during_the_first_poll_are_all_reported(
    api: Api, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some samples are written, some are being written, some end while the database is read: the poll reports them
    all."""
    read = api.services.futures._database.read_async

    async def slowly(query: Callable[[Any], Any]) -> Any:
        found = await read(query)
        await asyncio.sleep(0.05)
        return found

    sampler = await api.sampler()
    wanted = {(await api.sample(sampler, seq_id))["request_id"] for seq_id in range(20)}
    monkeypatch.setattr(api.services.futures._database, "read_async", slowly)

    async def more() -> None:
        for seq_id in range(20, 60):
            wanted.add((await api.sample(sampler, seq_id))["request_id"])

    sending = asyncio.create_task(more())
    _, ids = await gather(api, sampler, 60)
    await sending
    assert set(ids) == wanted


async def test_results_stay_readable_after_they_were_reported_and_read(api: Api) -> None:
    sampler = await api.sampler()
    request_id = (await api.sample(sampler, 1))["request_id"]
    cursor, _ = await gather(api, sampler, 1)
    first = await api.result(request_id)
    await poll(api, sampler, cursor, timeout=0, retrieved_request_ids=[request_id, "unknown"])
    assert (await api.result(request_id)).content == first.content
    assert tokens(first) == [[0, 1, 2]]


async def test_memory_holds_unreported_ends_only_and_nothing_after_the_session(api: Api) -> None:
    ends = api.services.futures.ends
    sampler, silent = await api.sampler(), await api.sampler()
    cursor = 0
    for seq_id in range(50):
        await api.sample(sampler, seq_id)
        await api.sample(silent, seq_id)
        cursor, _ = await gather(api, sampler, 1, cursor)
    await poll(api, sampler, cursor, timeout=0)
    assert ends.kept == 0
    assert len(ends) == 1, "nothing is kept for a client that never polls"
    await api.finish(sampler)
    assert len(ends) == 0


async def test_the_end_of_the_session_ends_the_poll(api: Api, upstream: FakeUpstream) -> None:
    upstream.default = never
    sampler = await api.sampler()
    await api.sample(sampler, 1)
    held = await start_held_poll(api, ask(api, sampler))
    await api.finish(sampler)
    for answer in (await asyncio.wait_for(held, LONG_S), await ask(api, sampler)):
        assert answer.status_code == 404
        assert answer.json()["field"] == "target.sampling_session_id"


@pytest.mark.usefixtures("drain_at_once")
async def test_the_end_of_the_process_ends_the_poll(api: Api, upstream: FakeUpstream) -> None:
    upstream.default = never
    sampler = await api.sampler()
    await api.sample(sampler, 1)
    held = await start_held_poll(api, poll(api, sampler, 5))
    api.services.futures.release_waiters()
    assert await asyncio.wait_for(held, LONG_S) == (5, [])


async def test_samples_of_the_engine_are_reported_even_from_before_a_restart(serve: Serve, database: Database) -> None:
    """No client polls for these samples one by one, so the first poll for all makes the process wait for them."""
    colocated: dict[str, Any] = {"backend_config": {"trainer.placement.colocate_all": True}}
    async with serve(**colocated) as api:
        sampler = await api.sampler()
        before = (await api.sample(sampler, 1))["request_id"]
    async with serve(**colocated) as api:
        cursor, reported = await poll(api, sampler, timeout=0)
        assert reported == []
        during = (await api.sample(sampler, 2))["request_id"]
        held = await start_held_poll(api, gather(api, sampler, 2, cursor))
        done = [settlement(each, Outcome(b"abc", "proto:sample"), time.time()) for each in (before, during)]
        database.write(lambda c: SETTLE.execute(c, done))
        await api.services.futures.read_outcomes([before, during])
        assert set((await asyncio.wait_for(held, LONG_S))[1]) == {before, during}
    assert database.read(lambda c: c.execute(select(futures.c.status)).scalars().all()) == ["done", "done"]


@pytest.mark.parametrize("wanted", [True, False])
async def test_clients_poll_for_all_samples_only_if_the_operator_allows(serve: Serve, wanted: bool) -> None:
    async with serve(sample_use_retrieve_futures=wanted) as api:
        flags = (await api.post("client/config", {"sdk_version": "0.38.0"})).json()
    assert flags["sample_use_retrieve_futures"] is wanted
    assert flags["sample_join_sampling_session"] is True


async def test_clones_are_counted_and_the_count_is_stored(serve: Serve) -> None:
    async def join(api: Api, sampler: str) -> int:
        answer = await api.post("join_sampling_session", {"sampling_session_id": sampler})
        assert answer.json()["type"] == "join_sampling_session"
        return answer.json()["client_counter"]

    async with serve() as api:
        sampler, other = await api.sampler(), await api.sampler()
        assert sorted(await asyncio.gather(*(join(api, sampler) for _ in range(5)))) == [1, 2, 3, 4, 5]
        assert await join(api, other) == 1
    async with serve() as api:
        assert await join(api, sampler) == 6
