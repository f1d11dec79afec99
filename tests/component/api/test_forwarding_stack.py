"""Samples through a whole API process: HTTP, SQLite, and an upstream on a real socket; restarts, duplicates,
tenants."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from api_harness import BASE, LONG_S, Api, Serve, sample_body, session_of, tokens
from fake_upstream import FakeUpstream, after, complete, error, hang_up, never, reply
from sqlalchemy import delete, select, update

import skyrl.api.routes.futures
import skyrl.api.server
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import publish_training
from skyrl.storage.db.futures import futures
from skyrl.storage.db.sessions import sessions


def rows(database: Database) -> list[tuple[str, str, bool]]:
    """(kind, status, whether the body is stored) of all futures, in order of arrival."""
    columns = select(futures.c.kind, futures.c.status, futures.c.body.is_not(None)).order_by(futures.c.n)
    return [(kind, status, bool(body)) for kind, status, body in database.read(lambda c: list(c.execute(columns)))]


PENDING, DONE, FAILED = ("EXTERNAL", "pending", True), ("EXTERNAL", "done", False), ("EXTERNAL", "failed", False)


async def settled(api: Api) -> None:
    """Wait for the forwarding tasks, which write their rows when they end."""
    await api.services.sampling.drain(LONG_S)


# One sample


async def test_a_sample_is_forwarded_and_its_result_is_returned(
    api: Api, upstream: FakeUpstream, database: Database
) -> None:
    sampler = await api.sampler()
    promise = await api.sample(sampler, 1, num_samples=2)
    assert len(set(promise["sample_sequence_ids"])) == 2
    assert tokens(await api.result(promise["request_id"])) == [[0, 1, 2], [1, 2, 3]]
    (sent,) = upstream.completions
    assert sent.json["model"] == BASE
    assert sent.headers["x-session-id"] == f"{sampler}:1"
    await settled(api)
    assert rows(database) == [DONE]


async def test_a_result_can_be_read_again_in_both_formats_and_after_a_restart(
    serve: Serve, upstream: FakeUpstream
) -> None:
    async with serve() as api:
        request_id = (await api.sample(await api.sampler(), 1))["request_id"]
        first = await api.result(request_id)
        assert (await api.result(request_id)).content == first.content
    async with serve() as api:
        assert (await api.result(request_id)).content == first.content
        as_json = await api.result(request_id, Accept="application/json")
    assert as_json.json()["sequences"] == [{"stop_reason": "length", "tokens": [0, 1, 2], "logprobs": [-1, -2, -3]}]
    assert len(upstream.completions) == 1


async def test_a_poll_before_the_result_gets_408(
    api: Api, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    monkeypatch.setattr(skyrl.api.routes.futures, "HOLD_S", 0.02)
    request_id = (await api.sample(await api.sampler(), 1))["request_id"]
    early = await api.result(request_id)
    assert early.status_code == 408
    assert early.json() == {
        "type": "try_again",
        "request_id": request_id,
        "queue_state": "active",
        "queue_state_reason": "the inference server has had the sample for 1 s",
    }
    monkeypatch.setattr(skyrl.api.routes.futures, "HOLD_S", LONG_S)
    go.set()
    assert tokens(await api.result(request_id)) == [[0, 1, 2]]


async def test_several_polls_of_one_request_get_the_same_result(api: Api, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    request_id = (await api.sample(await api.sampler(), 1))["request_id"]
    polls = [asyncio.create_task(api.result(request_id)) for _ in range(5)]
    await upstream.until(lambda server: server.busy == 1)
    go.set()
    assert [tokens(poll) for poll in await asyncio.gather(*polls)] == [[[0, 1, 2]]] * 5


@pytest.mark.parametrize(
    ("answer", "category", "expected"),
    [
        (error(400, "no such thing", "top_k"), "user", "top_k: no such thing"),
        (reply(500, "broken", "text/plain"), "server", "status 500"),
        (hang_up, "server", "broke 4 times"),
    ],
)
async def test_a_failed_sample_keeps_its_error_category_after_a_restart(
    serve: Serve, upstream: FakeUpstream, database: Database, answer: Any, category: str, expected: str
) -> None:
    upstream.default = answer
    async with serve() as api:
        request_id = (await api.sample(await api.sampler(), 1))["request_id"]
        failed = (await api.result(request_id)).json()
    assert failed["category"] == category
    assert expected in failed["error"]
    assert rows(database) == [FAILED]
    async with serve() as api:
        assert (await api.result(request_id)).json() == failed


async def test_200_samples_at_once_succeed(serve: Serve, upstream: FakeUpstream, database: Database) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    async with serve(forwarding_inference_max_connections=200) as api:
        sampler = await api.sampler()
        promises = await asyncio.gather(*(api.sample(sampler, seq_id) for seq_id in range(200)))
        polls = [asyncio.create_task(api.result(promise["request_id"])) for promise in promises]
        await upstream.until(lambda server: server.busy == 200)
        go.set()
        assert [tokens(poll) for poll in await asyncio.gather(*polls)] == [[[0, 1, 2]]] * 200
        await settled(api)
        assert rows(database) == [DONE] * 200
        assert len({promise["request_id"] for promise in promises}) == 200
        assert api.services.sampling.forwarded == 200
        assert api.services.futures.pending == 0


# Rows and sessions that disappear while a sample runs


async def test_a_finished_session_drops_its_samples(api: Api, upstream: FakeUpstream) -> None:
    upstream.default = never
    sampler, other = await api.sampler(), await api.sampler()
    request_id = (await api.sample(sampler, 1))["request_id"]
    poll = asyncio.create_task(api.result(request_id))
    await upstream.until(lambda server: server.busy == 1)
    assert (await api.finish(sampler)).status_code == 200
    gone = await poll
    assert gone.status_code == 410
    assert gone.json()["field"] == "request_id"
    await upstream.until(lambda server: server.busy == 0)  # the request to vLLM was closed
    assert upstream.disconnects == 1
    await settled(api)
    upstream.default = complete()
    assert tokens(await api.result((await api.sample(other, 1))["request_id"])) == [[0, 1, 2]]


async def test_a_waiting_poll_gets_the_result_even_if_its_row_was_deleted(
    api: Api, upstream: FakeUpstream, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    sampler = await api.sampler()
    request_id = (await api.sample(sampler, 1))["request_id"]
    await upstream.until(lambda server: server.busy == 1)
    database.write(lambda c: c.execute(delete(futures)))
    poll = asyncio.create_task(api.result(request_id))
    go.set()
    assert tokens(await poll) == [[0, 1, 2]]  # the waiting poll still gets the result
    await settled(api)
    assert rows(database) == []
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
    assert tokens(await api.result((await api.sample(sampler, 2))["request_id"])) == [[0, 1, 2]]


async def test_a_poll_gets_410_if_its_sample_was_dropped_during_the_answer(
    api: Api, upstream: FakeUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer arrives before the cancellation, and the entry of the sample has been removed."""
    go = asyncio.Event()
    upstream.default = after(go, complete())
    sampler = await api.sampler()
    request_id = (await api.sample(sampler, 1))["request_id"]
    poll = asyncio.create_task(api.result(request_id))
    await upstream.until(lambda server: server.busy == 1)
    api.services.futures.drop_session(session_of(sampler))
    go.set()
    assert (await poll).status_code == 410
    await settled(api)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


# Restarts


@pytest.mark.usefixtures("drain_at_once")
async def test_samples_in_flight_are_forwarded_again_by_the_next_start(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    upstream.default = never
    async with serve() as api:
        sampler = await api.sampler()
        promises = [await api.sample(sampler, seq_id) for seq_id in (1, 2)]
        poll = asyncio.create_task(api.result(promises[0]["request_id"]))
        await upstream.until(lambda server: server.busy == 2)
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)
    await upstream.until(lambda server: server.busy == 0)
    assert rows(database) == [PENDING, PENDING]
    upstream.default = complete()
    async with serve() as api:
        for promise in promises:
            assert tokens(await api.result(promise["request_id"])) == [[0, 1, 2]]
        await settled(api)
        assert api.services.futures.pending == 0
    assert rows(database) == [DONE, DONE]
    assert sorted(sent.headers["x-session-id"] for sent in upstream.completions) == [
        f"{sampler}:{seq_id}" for seq_id in (1, 1, 2, 2)
    ]
    assert len({str(sent.json | {"priority": None}) for sent in upstream.completions}) == 1


async def test_samples_in_flight_may_end_during_the_drain(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    async with serve() as api:
        await api.sample(await api.sampler(), 1)
        await upstream.until(lambda server: server.busy == 1)
        asyncio.get_running_loop().call_later(0.05, go.set)
    assert rows(database) == [DONE]


@pytest.mark.usefixtures("drain_at_once")
async def test_a_restart_fails_the_pending_samples_of_an_ended_session(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    upstream.default = never
    async with serve() as api:
        sampler = await api.sampler()
        request_id = (await api.sample(sampler, 1))["request_id"]
        await upstream.until(lambda server: server.busy == 1)
    database.write(lambda c: c.execute(update(sessions).values(status="finished")))
    upstream.default = complete()
    async with serve() as api:
        failed = (await api.result(request_id)).json()
    assert failed["category"] == "user"
    assert "has ended" in failed["error"]
    assert len(upstream.completions) == 1
    assert rows(database) == [FAILED]


@pytest.mark.usefixtures("drain_at_once")
async def test_a_pending_sample_that_the_next_base_model_cannot_run_fails(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    """The server starts nevertheless and forwards the other sample."""
    upstream.default = never
    async with serve() as api:
        sampler = await api.sampler()
        long = (await api.sample(sampler, 1, prompt=list(range(50))))["request_id"]
        short = (await api.sample(sampler, 2))["request_id"]
        await upstream.until(lambda server: server.busy == 2)
    upstream.default = complete()
    database.write(lambda c: publish_training(c, ready=True, reason="", vocab_size=1000, max_context=40))
    async with serve() as api:
        failed = (await api.result(long)).json()
        assert tokens(await api.result(short)) == [[0, 1, 2]]
    assert failed["category"] == "user"
    assert "prompt: 50 tokens leave no room" in failed["error"]


# Duplicates


async def test_repeated_samples_do_not_count_as_waiting(serve: Serve) -> None:
    async with serve(max_pending_samples=1) as api:
        sampler = await api.sampler()
        for _ in range(3):
            await api.sample(sampler, 1)
            await settled(api)
        await api.sample(sampler, 2)


async def test_the_same_number_in_another_sampling_session_is_another_request(api: Api, upstream: FakeUpstream) -> None:
    first = await api.sample(await api.sampler(), 1)
    second = await api.sample(await api.sampler(), 1)
    assert first["request_id"] != second["request_id"]
    assert not set(first["sample_sequence_ids"]) & set(second["sample_sequence_ids"])
    await settled(api)
    assert len(upstream.completions) == 2


@pytest.mark.usefixtures("drain_at_once")
@pytest.mark.parametrize("in_flight", [False, True])
async def test_a_sample_repeated_after_a_restart_is_the_same_request(
    serve: Serve, upstream: FakeUpstream, database: Database, in_flight: bool
) -> None:
    upstream.default = never if in_flight else complete()
    async with serve() as api:
        sampler = await api.sampler()
        first = await api.sample(sampler, 1, num_samples=2)
        await upstream.until(lambda server: len(server.completions) == 1)
        if not in_flight:
            await settled(api)
    upstream.default = complete()
    async with serve() as api:
        assert await api.sample(sampler, 1, num_samples=2) == first
        refused = await api.post("asample", sample_body(sampler, 1, num_samples=1))
        assert refused.status_code == 400
        assert refused.json()["field"] == "seq_id"
        assert tokens(await api.result(first["request_id"])) == [[0, 1, 2], [1, 2, 3]]
    assert len(upstream.completions) == (2 if in_flight else 1)
    assert rows(database) == [DONE]


# Admission


async def test_samples_beyond_the_bound_get_429_and_are_not_recorded(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    async with serve(max_pending_samples=2) as api:
        sampler = await api.sampler()
        promises = [await api.sample(sampler, seq_id) for seq_id in (1, 2)]
        refused = await api.post("asample", sample_body(sampler, 3))
        assert refused.status_code == 429
        assert float(refused.headers["Retry-After"]) > 0
        assert "2 samples" in refused.json()["detail"]
        assert rows(database) == [PENDING, PENDING]
        go.set()
        for promise in promises:
            await api.result(promise["request_id"])
        await settled(api)
        await api.sample(sampler, 3)
        await settled(api)
    assert len(upstream.completions) == 3


async def test_samples_beyond_the_bound_in_bytes_get_429(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    upstream.default = never
    database.write(lambda c: publish_training(c, ready=True, reason="", vocab_size=10, max_context=2**20))
    half = sample_body("", 0, prompt=[1] * (2**18 + 1))
    async with serve(max_pending_sample_bytes=2**20) as api:
        half["sampling_session_id"] = sampler = await api.sampler()
        assert (await api.post("asample", half | {"seq_id": 1})).status_code == 200
        refused = await api.post("asample", half | {"seq_id": 2})
        assert refused.status_code == 429
        assert "Retry-After" in refused.headers
        assert rows(database) == [PENDING]
        assert (await api.post("asample", sample_body(sampler, 3))).status_code == 200
        await api.finish(sampler)
        await settled(api)


# Tenants
