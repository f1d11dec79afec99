"""A client cancels its samples: vLLM is free at once, the future has failed, and nothing else changes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from api_harness import Api, Serve, session_of, tokens
from fake_upstream import FakeUpstream, after, complete, never
from sqlalchemy import select

from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import SETTLE, Outcome, futures, settlement
from skyrl.storage.db.models import bodies

CANCELLED = {"error": "cancelled by the client", "category": "user"}


async def cancel(api: Api, request_id: str, **headers: str) -> httpx.Response:
    return await api.post("cancel_future", {"request_id": request_id}, **headers)


def statuses(database: Database) -> list[tuple[str, str]]:
    columns = select(futures.c.kind, futures.c.status).order_by(futures.c.n)
    return [(kind, status) for kind, status in database.read(lambda c: list(c.execute(columns)))]


async def test_cancelling_a_sample_frees_the_inference_server_at_once(
    api: Api, upstream: FakeUpstream, database: Database
) -> None:
    upstream.default = never
    request_id = (await api.sample(await api.sampler(), 1))["request_id"]
    poll = asyncio.create_task(api.result(request_id))
    await upstream.until(lambda server: server.busy == 1)
    assert (await cancel(api, request_id)).status_code == 200
    # the upstream never answers, so only the client can have left
    await upstream.until(lambda server: server.busy == 0)
    assert upstream.disconnects == 1
    assert (await poll).json() == CANCELLED
    assert statuses(database) == [("EXTERNAL", "failed")]
    assert api.services.sampling.in_flight == 0
    assert api.services.futures.pending == 0


async def test_cancelling_again_gives_the_same_answer_even_after_a_restart(
    serve: Serve, upstream: FakeUpstream
) -> None:
    upstream.default = never
    async with serve() as api:
        request_id = (await api.sample(await api.sampler(), 1))["request_id"]
        for _ in range(2):
            assert (await cancel(api, request_id)).status_code == 200
            assert (await api.result(request_id)).json() == CANCELLED
    asked = len(upstream.completions)
    async with serve() as api:
        assert (await cancel(api, request_id)).status_code == 200
        assert (await api.result(request_id)).json() == CANCELLED
    assert len(upstream.completions) == asked, "a cancelled sample is not forwarded again"


async def test_cancelling_a_finished_sample_changes_nothing(serve: Serve, database: Database) -> None:
    async with serve() as api:
        request_id = (await api.sample(await api.sampler(), 1))["request_id"]
        assert tokens(await api.result(request_id)) == [[0, 1, 2]]
        assert (await cancel(api, request_id)).status_code == 200
        assert tokens(await api.result(request_id)) == [[0, 1, 2]]
    async with serve() as api:  # the new process reads the outcome from the database
        assert (await cancel(api, request_id)).status_code == 200
        assert tokens(await api.result(request_id)) == [[0, 1, 2]]
    assert statuses(database) == [("EXTERNAL", "done")]


async def test_another_tenant_can_neither_see_nor_cancel_a_sample(api: Api, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    request_id = (await api.sample(await api.sampler(), 1))["request_id"]
    refused = await cancel(api, request_id, **{"X-API-Key": "tml-two"})
    assert refused.status_code == 404
    assert refused.json()["field"] == "request_id"
    go.set()
    assert tokens(await api.result(request_id)) == [[0, 1, 2]]


async def test_cancelling_a_training_command_is_refused_and_the_command_goes_on(api: Api, database: Database) -> None:
    sampler = await api.sampler()
    wanted = {"session_id": session_of(sampler), "model_seq_id": 0, "base_model": "acme/base"}
    request_id = (await api.post("create_model", wanted)).json()["request_id"]
    refused = await cancel(api, request_id)
    assert refused.status_code == 400
    assert refused.json()["field"] == "request_id"
    assert "only samples" in refused.json()["detail"]
    assert statuses(database) == [("CREATE_MODEL", "pending")]


async def test_a_cancelled_sample_keeps_its_number_and_other_samples_go_on(api: Api, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    sampler = await api.sampler()
    first, second = [(await api.sample(sampler, seq_id))["request_id"] for seq_id in (1, 2)]
    await upstream.until(lambda server: server.busy == 2)
    await cancel(api, first)
    await upstream.until(lambda server: server.busy == 1)
    go.set()
    assert tokens(await api.result(second)) == [[0, 1, 2]]
    assert (await api.sample(sampler, 1))["request_id"] == first, "a repeated request gets the cancelled sample"


async def test_a_result_that_arrives_during_cancellation_is_dropped(api: Api, upstream: FakeUpstream) -> None:
    """Outcomes are final: a client that was told of a cancellation must not find a result later, nor the reverse."""
    sampler = await api.sampler()
    for seq_id in range(30):
        request_id = (await api.sample(sampler, seq_id))["request_id"]
        await asyncio.sleep(seq_id * 0.0003)
        await cancel(api, request_id)
        seen = {(await api.result(request_id)).content for _ in range(3)}
        assert len(seen) == 1, seq_id


@pytest.fixture
def colocated(database: Database) -> dict[str, Any]:
    """Options of an API that leaves samples to the engine. No engine runs."""
    return {"backend_config": {"trainer.placement.colocate_all": True}}


async def test_the_engine_does_not_run_a_cancelled_sample(
    serve: Serve, colocated: dict[str, Any], database: Database
) -> None:

    async with serve(**colocated) as api:
        sampler = await api.sampler()
        kept, taken_back = [(await api.sample(sampler, seq_id))["request_id"] for seq_id in (1, 2)]
        assert (await cancel(api, taken_back)).status_code == 200
        assert (await api.result(taken_back)).json() == CANCELLED
        assert (await cancel(api, taken_back)).status_code == 200
    assert statuses(database) == [("SAMPLE", "pending"), ("SAMPLE", "failed")]
    assert set(database.read(lambda c: bodies(c, [kept, taken_back], pending=True))) == {kept}


async def test_a_sample_that_the_engine_has_just_settled_keeps_its_result(
    serve: Serve, colocated: dict[str, Any], database: Database
) -> None:
    """The ring about the outcome was lost, so the API process must read the row."""

    async with serve(**colocated) as api:
        request_id = (await api.sample(await api.sampler(), 1))["request_id"]
        done = settlement(request_id, Outcome(b"", "proto:sample"), time.time())
        database.write(lambda c: SETTLE.execute(c, [done]))
        assert (await cancel(api, request_id)).status_code == 200
        assert tokens(await api.result(request_id)) == []
    assert statuses(database) == [("SAMPLE", "done")]


@pytest.mark.usefixtures("drain_at_once")
async def test_a_sample_of_a_time_when_the_server_forwarded_fails_where_the_engine_samples(
    serve: Serve, colocated: dict[str, Any], upstream: FakeUpstream, database: Database
) -> None:
    """Nobody would run it, and its client would wait for ever."""
    upstream.default = never
    async with serve() as api:
        request_id = (await api.sample(await api.sampler(), 1))["request_id"]
    assert statuses(database) == [("EXTERNAL", "pending")]
    async with serve(**colocated) as api:
        says = "this server now samples in its engine; send the sample again"
        assert (await api.result(request_id)).json() == {"error": says, "category": "server"}


async def test_the_server_tells_clients_that_samples_can_be_cancelled(api: Api) -> None:
    flags = (await api.post("client/dynamic_config", {"sdk_version": "0.38.0"})).json()
    assert flags["sample_cancel_enabled"] is True
    assert flags["sample_cancel_max_batch_size"] == 64
