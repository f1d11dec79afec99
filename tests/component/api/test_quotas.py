"""Quotas of samples and models over HTTP: which requests are refused, which requests wait and why, and that other
tenants are not affected."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from api_harness import BASE, Api, Serve, sample_body, session_of, tokens
from engine_harness import data, until
from fake_upstream import FakeUpstream, after, complete, error
from sqlalchemy import Connection, event, select, update

import skyrl.api.routes.futures
import skyrl.api.server
from skyrl.api.access import tenant_of_key
from skyrl.sampling import quota_account
from skyrl.storage.db import quotas as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import futures
from skyrl.storage.db.models import models
from skyrl.storage.db.runs import open_samplers
from tests.postgres_server import ON_BOTH_SLOWLY

pytestmark = pytest.mark.usefixtures("drain_at_once")

OTHER = {"X-API-Key": "tml-two"}
ONE, TWO = tenant_of_key("tml-one"), tenant_of_key("tml-two")


@pytest.fixture(autouse=True)
def polls_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skyrl.api.routes.futures, "HOLD_S", 0.02)


async def change(api: Api, database: Database, tenant: str = ONE, **values: int | None) -> None:
    """Change the quotas as the operator does, and let the API process read them."""
    database.write(lambda c: rows.change(c, tenant, values))
    await api.services.quotas.refresh()


def recorded(database: Database) -> list[Any]:
    columns = (futures.c.tenant, futures.c.status, futures.c.created_at, futures.c.not_before)
    return database.read(lambda c: list(c.execute(select(*columns).order_by(futures.c.n))))


async def result_when_ended(api: Api, request_id: str, **headers: str) -> httpx.Response:
    while (answer := await api.result(request_id, **headers)).status_code == 408:
        pass
    return answer


async def sample_of_other(api: Api, sampler: str, seq_id: int) -> list[list[int]]:
    answer = await api.post("asample", sample_body(sampler, seq_id), **OTHER)
    return tokens(await result_when_ended(api, answer.json()["request_id"], **OTHER))


def refused(answer: httpx.Response) -> str:
    assert answer.status_code == 429, answer.text
    assert 0 < float(answer.headers["Retry-After"]) <= 60
    return answer.json()["detail"]


def refused_until_the_tenant_acts(answer: httpx.Response) -> str:
    """Waiting does not help here, so the answer does not ask for a retry: SDKs raise a 403 at once."""
    assert answer.status_code == 403, answer.text
    assert "Retry-After" not in answer.headers
    return answer.json()["detail"]


# Requests in flight


async def test_samples_above_the_quota_are_refused_and_not_recorded(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    async with serve(quota_requests_in_flight=2) as api:
        mine, theirs = await api.sampler(), await api.sampler(**OTHER)
        promises = [await api.sample(mine, seq_id) for seq_id in (1, 2)]
        assert "has 2 samples in flight" in refused(await api.post("asample", sample_body(mine, 3)))
        assert len(recorded(database)) == 2
        other = (await api.post("asample", sample_body(theirs, 1), **OTHER)).json()
        await upstream.until(lambda server: server.busy == 3)
        go.set()
        for promise in promises:
            await result_when_ended(api, promise["request_id"])
        await result_when_ended(api, other["request_id"], **OTHER)
        assert await result_when_ended(api, (await api.sample(mine, 3))["request_id"])
        status = (await api.http.get("/statusz")).json()["quotas"]
        assert status == {"refused": {"requests_in_flight": 1}, "paused": 0, "waiting": 0, "exceptions": 0}


async def test_failed_and_cancelled_samples_do_not_count_as_in_flight(serve: Serve, upstream: FakeUpstream) -> None:
    upstream.script.append(error(400, "no"))
    async with serve(quota_requests_in_flight=1) as api:
        sampler = await api.sampler()
        failed = await result_when_ended(api, (await api.sample(sampler, 1))["request_id"])
        assert failed.json()["category"] == "user"
        upstream.default = after(asyncio.Event(), complete())
        waits = await api.sample(sampler, 2)
        refused(await api.post("asample", sample_body(sampler, 3)))
        await api.post("cancel_future", {"request_id": waits["request_id"]})
        assert (await api.post("asample", sample_body(sampler, 3))).status_code == 200


async def test_a_repeated_sample_counts_once(serve: Serve, upstream: FakeUpstream, database: Database) -> None:
    upstream.default = after(asyncio.Event(), complete())
    async with serve(quota_requests_in_flight=2, quota_tokens_per_minute=12) as api:
        sampler = await api.sampler()
        promises = [await api.sample(sampler, 1) for _ in range(5)]
        assert len({promise["request_id"] for promise in promises}) == 1
        assert recorded(database)[0].not_before is None
        await api.sample(sampler, 2)
        assert recorded(database)[1].not_before is None, "five repeats of a sample of 6 tokens took no tokens"


async def test_a_sample_of_the_engine_counts_as_in_flight_until_it_ends(serve: Serve, database: Database) -> None:
    colocated = {"trainer.placement.colocate_all": True}
    async with serve(quota_requests_in_flight=1, backend_config=colocated) as api:
        sampler = await api.sampler()
        promise = await api.sample(sampler, 1)
        refused(await api.post("asample", sample_body(sampler, 2)))
        await api.post("cancel_future", {"request_id": promise["request_id"]})
        assert (await api.post("asample", sample_body(sampler, 2))).status_code == 200
    assert [row.status for row in recorded(database)] == ["failed", "pending"]


# Tokens per minute


@ON_BOTH_SLOWLY
async def test_a_sample_beyond_the_tokens_per_minute_waits_and_gives_the_reason(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    upstream.default = after(asyncio.Event(), complete())
    async with serve() as api:
        mine, theirs = await api.sampler(), await api.sampler(**OTHER)
        await change(api, database, tokens_per_minute=6)
        first, second = [await api.sample(mine, seq_id) for seq_id in (1, 2)]
        assert (await api.result(first["request_id"])).json()["queue_state"] == "active", (
            "the first sample is being forwarded"
        )
        poll = await api.result(second["request_id"])
        assert poll.status_code == 408
        assert poll.json()["queue_state"] == "paused_rate_limit"
        assert "the quota of 6 tokens per minute is used up" in poll.json()["queue_state_reason"]
        await upstream.until(lambda server: bool(server.completions))
        assert len(upstream.completions) == 1
        upstream.default = complete()
        assert await sample_of_other(api, theirs, 1) == [[0, 1, 2]], "samples of other tenants do not wait"
        assert (await api.result(second["request_id"])).json()["queue_state"] == "paused_rate_limit"
        assert (await api.http.get("/statusz")).json()["quotas"] == {
            "refused": {},
            "paused": 1,
            "waiting": 1,
            "exceptions": 1,
        }
        await change(api, database, tokens_per_minute=None)
        assert tokens(await result_when_ended(api, second["request_id"])) == [[0, 1, 2]], (
            "without a quota the sample does not wait"
        )
    paused = [row for row in recorded(database) if row.not_before is not None]
    assert [row.tenant for row in paused] == [ONE]
    assert 50 < paused[0].not_before - paused[0].created_at <= 60


async def test_a_waiting_sample_runs_once_enough_tokens_were_added(
    serve: Serve, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(quota_tokens_per_minute=600) as api:
        sampler = await api.sampler()
        stopped: float | None = time.monotonic()  # no tokens are added until both samples have been sent
        monkeypatch.setattr(api.services.quotas, "_clock", lambda: time.monotonic() if stopped is None else stopped)
        large = {"prompt": [1] * 90, "sampling_params": {"max_tokens": 4}}
        promises = [await api.sample(sampler, 1, num_samples=105, **large)]  # 510 of 600 tokens
        # 98 more tokens, and 10 are added per second
        promises.append(await api.sample(sampler, 2, num_samples=2, **large))
        stopped = None
        for promise, count in zip(promises, (105, 2), strict=True):
            assert len(tokens(await result_when_ended(api, promise["request_id"]))) == count
    first, second = recorded(database)
    assert first.not_before is None
    assert second.not_before is not None


async def test_unused_tokens_are_returned(serve: Serve, upstream: FakeUpstream, database: Database) -> None:
    go = asyncio.Event()
    upstream.script.append(after(go, complete()))
    async with serve(quota_tokens_per_minute=100) as api:
        sampler = await api.sampler()
        long = {"sampling_params": {"max_tokens": 97}}  # the upstream samples 4 of them
        first, second = [await api.sample(sampler, seq_id, **long) for seq_id in (1, 2)]
        assert (await api.result(second["request_id"])).json()["queue_state"] == "paused_rate_limit"
        go.set()
        await result_when_ended(api, first["request_id"])
        answer = await api.result(second["request_id"])
        remaining = answer.json()["queue_state_reason"] if answer.status_code == 408 else "about 0 s"
        assert int(remaining.partition("about ")[2].removesuffix(" s")) <= 10, (
            "the wait has become shorter than a minute"
        )


async def test_samples_that_would_wait_too_long_are_refused(
    serve: Serve, upstream: FakeUpstream, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_account, "MAX_PAUSE_S", 90.0)
    upstream.default = after(asyncio.Event(), complete())
    async with serve(quota_tokens_per_minute=6) as api:
        sampler = await api.sampler()
        for seq_id in (1, 2):
            await api.sample(sampler, seq_id)
        assert "6 tokens per minute" in refused(await api.post("asample", sample_body(sampler, 3)))
        assert len(recorded(database)) == 2
        huge = await api.post("asample", sample_body(await api.sampler(**OTHER), 1, prompt=[1] * 60), **OTHER)
        assert huge.status_code == 200, "a sample of any size is accepted if no sample waits before it"
        status = (await api.http.get("/statusz")).json()["quotas"]["refused"]
        assert status == {"tokens_per_minute": 1}


@ON_BOTH_SLOWLY
async def test_a_restart_gives_no_tenant_new_tokens(serve: Serve, database: Database) -> None:
    async with serve() as api:
        sampler = await api.sampler()
        await change(api, database, tokens_per_minute=6)
        promises = [await api.sample(sampler, seq_id) for seq_id in (1, 2)]
        await result_when_ended(api, promises[0]["request_id"])
        await api.services.sampling.drain(1e9)  # waiting samples are not drained
    before = recorded(database)[1].not_before
    async with serve() as api:
        assert (await api.result(promises[1]["request_id"])).json()["queue_state"] == "paused_rate_limit"
        third = await api.sample(sampler, 3)
        assert recorded(database)[1].not_before == before
        assert recorded(database)[2].not_before > before + 30, (
            "the new sample waits behind the samples from before the restart"
        )
        await change(api, database, tokens_per_minute=-1)
        for promise in (promises[1], third):
            assert tokens(await result_when_ended(api, promise["request_id"])) == [[0, 1, 2]]


async def test_the_end_of_the_session_fails_its_waiting_samples(serve: Serve) -> None:
    async with serve(quota_tokens_per_minute=60) as api:
        sampler, again = await api.sampler(), await api.sampler()
        for seq_id in (1, 2):
            await api.sample(sampler, seq_id, prompt=[1] * 90)
        await api.finish(sampler)
        await until(lambda: not api.services.quotas.waiting and api.services.sampling.in_flight == 0)
        assert (await api.post("asample", sample_body(again, 1))).status_code == 200


async def test_the_default_quota_holds_for_tenants_without_their_own(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    upstream.default = after(asyncio.Event(), complete())
    async with serve(quota_requests_in_flight=1) as api:
        mine, theirs = await api.sampler(), await api.sampler(**OTHER)
        await change(api, database, requests_in_flight=-1)
        for seq_id in range(3):
            await api.sample(mine, seq_id)
        answers = [await api.post("asample", sample_body(theirs, seq_id), **OTHER) for seq_id in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        await change(api, database, requests_in_flight=None)
        answers = [await api.post("asample", sample_body(mine, seq_id)) for seq_id in (3, 4)]
        assert [answer.status_code for answer in answers] == [200, 429], "samples from before the quota are not counted"


async def test_a_running_server_soon_learns_of_changed_quotas(
    serve: Serve, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skyrl.api.server, "QUOTAS_S", 0.01)
    async with serve() as api:
        database.write(lambda c: rows.change(c, ONE, {"models": 0}))
        await until(lambda: api.services.quotas.of(ONE).models == 0)
        database.write(lambda c: rows.clear(c, ONE))
        await until(lambda: not api.services.quotas.in_use)


# Models


async def create(api: Api, session: str, number: int, **headers: str) -> httpx.Response:
    wanted = {"session_id": session, "model_seq_id": number, "base_model": BASE, "lora_config": {"rank": 4}}
    return await api.post("create_model", wanted, **headers)


@ON_BOTH_SLOWLY
async def test_models_above_the_quota_are_refused(serve: Serve, database: Database) -> None:
    async with serve(quota_models=2) as api:
        session = session_of(await api.sampler())
        made = [await create(api, session, number) for number in (0, 1)]
        assert [answer.status_code for answer in made] == [200, 200]
        sentence = refused_until_the_tenant_acts(await create(api, session, 2))
        assert sentence.startswith("models: this API key's tenant may have 2 in training, and has 2: unload one")
        assert (await create(api, session, 1)).json() == made[1].json(), "a repeated request makes no new model"
        other = session_of(await api.sampler(**OTHER))
        assert (await create(api, other, 0, **OTHER)).status_code == 200
        closed = update(models).where(models.c.id == f"{session}:train:0").values(status="closed")
        database.write(lambda c: c.execute(closed))
        assert (await create(api, session, 2)).status_code == 200


@ON_BOTH_SLOWLY
async def test_models_requested_at_once_are_counted_one_by_one(serve: Serve) -> None:
    async with serve(quota_models=3) as api:
        session = session_of(await api.sampler())
        answers = await asyncio.gather(*(create(api, session, number) for number in range(8)))
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [403] * 5


@ON_BOTH_SLOWLY
async def test_a_refused_model_leaves_no_rows(serve: Serve, database: Database) -> None:
    async with serve(quota_models=0) as api:
        session = session_of(await api.sampler())
        refused_until_the_tenant_acts(await create(api, session, 0))
    assert database.read(lambda c: c.execute(select(models.c.id)).all()) == []
    assert recorded(database) == []


# Bounds of every tenant


@ON_BOTH_SLOWLY
async def test_the_number_of_sessions_of_a_tenant_is_bounded(serve: Serve) -> None:
    async with serve(max_sessions_per_tenant=2) as api:
        made = [(await api.post("create_session", {})).json()["session_id"] for _ in range(2)]
        sentence = refused_until_the_tenant_acts(await api.post("create_session", {}))
        assert sentence == (
            "max_sessions_per_tenant: a tenant may have at most 2, and this API key's tenant has 2 active sessions: "
            "finish those that are done"
        )
        assert (await api.post("create_session", {}, **OTHER)).status_code == 200
        await api.post(f"sessions/{made[0]}/finish", {})
        assert (await api.post("create_session", {})).status_code == 200
        answers = await asyncio.gather(*(api.post("create_session", {}, **OTHER) for _ in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, *[403] * 4], (
            "concurrent requests are counted one by one"
        )
        assert (await api.http.get("/statusz")).json()["quotas"]["refused"] == {"sessions": 5}


@ON_BOTH_SLOWLY
async def test_the_number_of_sampling_sessions_of_a_tenant_is_bounded(serve: Serve) -> None:
    async def add(api: Api, session: str, number: int, **headers: str) -> httpx.Response:
        wanted = {"session_id": session, "sampling_session_seq_id": number, "base_model": BASE}
        return await api.post("create_sampling_session", wanted, **headers)

    async with serve(max_sampling_sessions_per_tenant=3) as api:
        one, two = session_of(await api.sampler()), session_of(await api.sampler())
        assert (await add(api, one, 1)).status_code == 200
        for session in (one, two):
            sentence = refused_until_the_tenant_acts(await add(api, session, 2))
            assert sentence.startswith("max_sampling_sessions_per_tenant: a tenant may have at most 3, and")
        assert (await add(api, one, 1)).status_code == 200, "a repeated request makes no new sampling session"
        other = session_of(await api.sampler(**OTHER))
        assert (await add(api, other, 1, **OTHER)).status_code == 200
        await api.post(f"sessions/{one}/finish", {})
        assert (await add(api, two, 2)).status_code == 200


async def test_the_number_of_models_of_a_tenant_is_bounded_whatever_its_quota(serve: Serve, database: Database) -> None:
    async with serve(max_models_per_tenant=1) as api:
        await change(api, database, models=-1)
        session = session_of(await api.sampler())
        assert (await create(api, session, 0)).status_code == 200
        sentence = refused_until_the_tenant_acts(await create(api, session, 1))
        assert sentence == (
            "max_models_per_tenant: a tenant may have at most 1, and this API key's tenant has 1 models in training: "
            "unload one"
        )


LIVING = ("creating", "ready")


@pytest.mark.sqlite
def test_counting_active_sessions_does_not_read_ended_sessions(database: Database) -> None:
    """Sessions are counted at every new session, sampling session and model. The cost must not grow with the
    history."""
    plans: list[str] = []

    def explain(connection: Connection) -> None:
        for count, more in ((rows.active_sessions, ()), (rows.living_samplers, ()), (rows.living_models, LIVING)):
            count(connection, "t")
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statements[-1]}", ("t", *more))
            plans.append(" | ".join(row.detail for row in plan))

    statements: list[str] = []
    event.listen(database.reader, "before_cursor_execute", lambda *call: statements.append(call[2]))
    database.read(explain)
    assert all("ix_sessions_active_tenant" in plan for plan in plans), plans
    assert "SCAN sampling_sessions" not in plans[1]
    assert "ix_models_session_id" in plans[2] or "ix_models_status" in plans[2], plans[2]


@pytest.mark.sqlite
def test_the_status_page_reads_no_sampling_sessions_of_other_tenants(database: Database) -> None:
    statements: list[tuple[str, Any]] = []
    event.listen(database.reader, "before_cursor_execute", lambda *call: statements.append((call[2], call[3])))
    assert database.read(lambda c: open_samplers(c, "t", 100)) == []

    def explain(connection: Connection) -> str:
        [(statement, parameters)] = [each for each in statements if "FROM sampling_sessions" in each[0]]
        return " | ".join(
            row.detail for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        )

    plan = database.read(explain)
    assert "ix_sessions_active_tenant" in plan, plan
    assert "SEARCH sampling_sessions" in plan, plan


# Training


async def test_passes_take_tokens_and_are_never_refused(serve: Serve, database: Database) -> None:
    async with serve(quota_tokens_per_minute=10) as api:
        session = session_of(await api.sampler())
        model_id = (await create(api, session, 0)).json()["model_id"]

        async def train(seq_id: int, *lengths: int, path: str = "forward_backward") -> str:
            given = {"data": data(1, *lengths), "loss_fn": "cross_entropy"}
            body = {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": given}
            if path == "forward":
                body["forward_input"] = body.pop("forward_backward_input")
            answer = await api.post(path, body)
            assert answer.status_code == 200, answer.text
            return answer.json()["request_id"]

        started = time.time()
        await train(1, 4, 3)
        assert await train(1, 4, 3) == await train(1, 4, 3), "repeated passes take no tokens"
        await train(2, 7, path="forward")
        await train(3, 1000)
        step = {"model_id": model_id, "seq_id": 4, "adam_params": {}}
        assert (await api.post("optim_step", step)).status_code == 200
        waits = await train(5, 5)
        unread = await api.post("forward", {"model_id": model_id, "seq_id": 6, "forward_input": {"data": "?"}})
        assert unread.status_code == 200, "an unreadable pass is accepted and fails its future"
        poll = await api.post("retrieve_future", {"request_id": waits})
        assert poll.json()["queue_state"] == "paused_rate_limit"
        assert poll.json()["queue_state_reason"].startswith("the quota of 10 tokens per minute is used up")
        wrong = await api.post("forward", {"model_id": model_id, "seq_id": 5, "forward_input": {"data": []}})
        assert wrong.status_code == 400
    created, first, second, third, optim, fifth, unreadable = [row.not_before for row in recorded(database)]
    assert (created, first, optim, unreadable) == (None, None, None, None)
    assert 20 < second - started <= 24 + 5, "7 of 10 tokens were taken, and 7 more are needed"
    assert third > second
    assert fifth > third + 900 / 10 * 60


async def test_protobuf_passes_are_counted(serve: Serve, database: Database) -> None:
    from skyrl.base.wire import tinker_pb2 as pb

    async with serve(quota_tokens_per_minute=10) as api:
        session = session_of(await api.sampler())
        model_id = (await create(api, session, 0)).json()["model_id"]
        for seq_id in (1, 2):
            body = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
            for _ in range(2):
                body.data.add().model_input.add().encoded_text.tokens = bytes(4 * 4)
            headers = {"Content-Type": "application/x-protobuf"}
            answer = await api.http.post("/api/v1/forward_backward", content=body.SerializeToString(), headers=headers)
            assert answer.status_code == 200, answer.text
    assert [row.not_before is None for row in recorded(database)] == [True, True, False]
