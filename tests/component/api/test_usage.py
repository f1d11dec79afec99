"""Usage and the audit log: amounts equal what clients sent and received, and each tenant reads its own only."""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from api_harness import BASE, Api, Serve, session_of
from engine_harness import Harness, Trainer, data
from fake_upstream import FakeUpstream, complete, error
from sqlalchemy import event as sql_event
from sqlalchemy import insert, select
from sqlalchemy.exc import OperationalError

from skyrl.api.access import tenant_of_key, user_urn
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db import audit
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.columns import lora_values
from skyrl.storage.db.database import Database
from skyrl.storage.db.tables import MeterRow
from skyrl.storage.db.usage import (
    HOUR_S,
    UsageCounter,
    UsageKey,
    UsageKind,
    add,
    add_once,
    add_storage,
    bucket_of,
    metered_storage,
    usage,
)
from skyrl.storage.db.writer import GroupCommitWriter
from tests.postgres_server import ON_BOTH

TENANT, OTHER = tenant_of_key("tml-one"), {"X-API-Key": "tml-two"}


def meter(database: Database, now: float) -> None:
    for metered in database.read(lambda c: metered_storage(c, now)):
        assert len({key.bucket for key in metered.amounts}) <= 1  # a transaction has the rows of one hour
        database.write(partial(add_storage, metered=metered))


def hour(seconds: float) -> str:
    return datetime.fromtimestamp(bucket_of(seconds), UTC).isoformat().replace("+00:00", "Z")


async def events(api: Api, **headers: str) -> dict[str, Any]:
    """The usage of the last and the current hour."""
    await api.usage.flush()
    window = {"starting_on": hour(time.time() - HOUR_S), "ending_before": hour(time.time() + HOUR_S)}
    answer = await api.http.get("/api/v1/billing/usage/events", params=window, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_by_kind(answer: dict[str, Any], session: str) -> dict[tuple[str, bool | None], int]:
    """Token counts by type and, for prefill, by whether the tokens were cached."""
    sums: Counter[tuple[str, bool | None]] = Counter()
    for event in answer["data"]:
        if event["session_id"] == session:
            sums[(event["event_info"]["type"], event["event_info"].get("cached"))] += event["event_info"]["token_count"]
    return dict(sums)


def cached(count: int, *found: int) -> Any:
    """An answer whose usage says `count`, and of whose sequences each says what it has `found`."""

    def change(body: Any) -> None:
        body["usage"].update(prompt_tokens_details={"cached_tokens": count})
        for choice, each in zip(body["choices"], found, strict=False):
            choice["cached_prompt_tokens"] = each

    return complete(change)


# Sampling


@ON_BOTH
async def test_usage_of_samples_counts_the_tokens_sent_and_received(api: Api, upstream: FakeUpstream) -> None:
    sampler, other = await api.sampler(), await api.sampler()
    theirs = await api.sampler(**OTHER)
    upstream.script.extend([cached(0), cached(2, 0, 2, 2), error(400, "no")])
    received = 0
    for seq_id, (prompt, n) in enumerate([([5, 6, 7], 1), ([5, 6, 7, 8], 3), ([1, 2], 1)]):
        request_id = (await api.sample(sampler, seq_id, prompt=prompt, num_samples=n))["request_id"]
        result = await api.result(request_id, Accept="application/json")
        received += sum(len(sequence["tokens"]) for sequence in result.json().get("sequences", []))
    await api.result((await api.sample(other, 0))["request_id"])
    assert received == 3 + 3 * 3
    usage_events = await events(api)
    shown = (await api.http.get("/ui/api/usage")).json()["usage"]
    assert [(line["prompt"], line["cached"], line["computed"]) for line in shown] == [(5 + 3, 2, 3 + 4 + 2 + 2 + 3)]
    assert tokens_by_kind(usage_events, session_of(sampler)) == {
        ("sampling_prefill", False): 3 + 2,
        ("sampling_prefill", True): 2,
        ("sampling_sample", None): received,
    }
    assert tokens_by_kind(usage_events, session_of(other)) == {
        ("sampling_prefill", False): 3,
        ("sampling_sample", None): 3,
    }
    assert set(usage_events["sessions"]) == {session_of(sampler), session_of(other)}
    assert await events(api, **OTHER) == {"data": [], "sessions": {}}
    assert session_of(theirs) not in usage_events["sessions"]


async def test_a_usage_event_names_tenant_and_time_and_no_price(api: Api) -> None:
    made = await api.post("create_session", {"user_metadata": {"run": 7}, "project_id": "blue"})
    session = made.json()["session_id"]
    wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = (await api.post("create_sampling_session", wanted)).json()["sampling_session_id"]
    before = time.time()
    await api.result((await api.sample(sampler, 0))["request_id"])
    said = await events(api)
    assert said["sessions"] == {session: {"user_metadata": {"run": "7"}}}
    assert len(said["data"]) == 2
    for event in said["data"]:
        start = datetime.fromisoformat(event["bucket_start"])
        assert start.timestamp() in (bucket_of(before), bucket_of(time.time()))
        assert datetime.fromisoformat(event["bucket_end"]) - start == timedelta(hours=1)
        named = {"base_model": BASE, "user_id": user_urn(TENANT), "session_id": session, "project_id": "blue"}
        assert named.items() <= event.items()
        assert not [name for name in event if "cost" in name or "rate" in name]
    counts = [event["event_info"]["token_count"] for event in said["data"]]
    assert counts == sorted(counts, reverse=True)


@ON_BOTH
async def test_counts_survive_a_restart_and_go_on(serve: Serve) -> None:
    async with serve() as api:
        sampler = await api.sampler()
        await api.result((await api.sample(sampler, 0))["request_id"])
    async with serve() as api:  # no flush by hand: the end of the process has written the counts
        assert tokens_by_kind(await events(api), session_of(sampler))[("sampling_sample", None)] == 3
        for seq_id in (1, 2):
            await api.result((await api.sample(sampler, seq_id))["request_id"])
        assert tokens_by_kind(await events(api), session_of(sampler))[("sampling_sample", None)] == 9


@ON_BOTH
async def test_the_window_covers_whole_hours_in_utc(api: Api, database: Database) -> None:
    now = bucket_of(time.time())
    for ago in (0, 1, 2, 14 * 24):
        key = UsageKey(TENANT, now - ago * HOUR_S, "", "", BASE, UsageKind.TRAINING)
        database.write(lambda c, key=key, ago=ago: add(c, {key: ago + 1}))

    async def counts(start: str, end: str) -> list[int]:
        window = {"starting_on": start, "ending_before": end}
        answer = await api.http.get("/api/v1/billing/usage/events", params=window)
        return [event["event_info"]["token_count"] for event in answer.json()["data"]]

    assert await counts(hour(now - 2 * HOUR_S), hour(now)) == [3, 2], "the window excludes its end"
    assert await counts(hour(now - 14 * 24 * HOUR_S), hour(now)) == [14 * 24 + 1, 3, 2]
    assert await counts(hour(now), hour(now + HOUR_S)) == [1]
    elsewhere = datetime.fromtimestamp(now, UTC).astimezone(datetime.strptime("+0200", "%z").tzinfo).isoformat()
    assert await counts(elsewhere, hour(now + HOUR_S)) == [1]
    assert await counts(hour(now).removesuffix("Z"), hour(now + HOUR_S)) == [1], "a time without offset is UTC"


# Storage


def saved(name: str, size: int, created_at: float, **more: Any) -> dict[str, Any]:
    shape = lora_values(LoraSpec(8, 32.0, 1))
    row = {"tenant": TENANT, "model_id": "m", "kind": "weights", "name": name, "base_model": BASE, **shape}
    return row | {"store_key": name, "size_bytes": size, "public": False, "created_at": created_at} | more


@ON_BOTH
def test_storage_is_size_times_time_split_by_the_hour(database: Database) -> None:
    start = bucket_of(time.time()) - 10 * HOUR_S + 1800.0
    rows = [
        saved("all", 10**9, start - 5 * HOUR_S),
        saved("made", 4 * 10**9, start + 900),
        saved("gone", 10**9, start - 9, expires_at=start + 1800),
        saved("before", 10**9, start - 9 * HOUR_S, expires_at=start - HOUR_S),
    ]
    for row in rows:
        database.write(lambda c, row=row: c.execute(insert(checkpoints), row))
    meter(database, start)
    assert database.read(lambda c: c.execute(select(usage)).all()) == [], "no usage is known before the first reading"
    for now in (start + 60, start + 60, start + 2000, start + 1900, start + 5400):
        meter(database, now)
    found = database.read(lambda c: c.execute(select(usage).order_by(usage.c.bucket)).all())
    assert {row.kind for row in found} == {"storage"}
    assert {(row.tenant, row.session_id, row.base_model) for row in found} == {(TENANT, "", BASE)}
    hours = [row.bucket for row in found]
    assert hours == [bucket_of(start), bucket_of(start) + HOUR_S]
    # First hour: 30 min of 1 GB, 15 min of 4 GB, 30 min of 1 GB; second: 60 min of 5 GB.
    assert [row.amount for row in found] == pytest.approx([0.5 + 1.0 + 0.5, 5.0])


@ON_BOTH
def test_checkpoints_that_live_through_a_minute_are_added_up_by_the_database(database: Database) -> None:
    """However many there are, and without the write lock."""
    start = bucket_of(time.time()) - HOUR_S
    rows = [saved(str(number), 10**9, start - number) for number in range(50)]
    rows.append(saved("gone", 10**9, start - 9, expires_at=start + 30))
    database.write(lambda c: c.execute(insert(checkpoints), [{"expires_at": None} | row for row in rows]))
    meter(database, start)
    sent: list[tuple[str, Any]] = []

    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        sent.append((statement, parameters))

    sql_event.listen(database.reader, "before_cursor_execute", note)
    meter(database, start + 60)
    sql_event.remove(database.reader, "before_cursor_execute", note)
    ((query, parameters),) = [each for each in sent if "FROM checkpoints" in each[0]]
    assert len(database.read(lambda c: c.exec_driver_sql(query, parameters).all())) == 2
    (amount,) = database.read(lambda c: c.execute(select(usage.c.amount)).scalars().all())
    assert amount == pytest.approx((50 * 60 + 30) / HOUR_S)


@ON_BOTH
def test_of_two_processes_that_meter_the_same_time_one_counts(database: Database) -> None:
    start = bucket_of(time.time()) - 2 * HOUR_S
    database.write(lambda c: c.execute(insert(checkpoints), saved("all", 10**9, start - 9)))
    for at in (start, start + 1800):
        both = [[*database.read(lambda c, at=at: metered_storage(c, at))] for _ in range(2)]
        assert [len(each) for each in both] == [1, 1]
        for (metered,) in both:
            database.write(partial(add_storage, metered=metered))
    (amount,) = database.read(lambda c: c.execute(select(usage.c.amount)).scalars().all())
    assert amount == pytest.approx(0.5)


async def test_storage_is_reported_without_a_session(api: Api, database: Database) -> None:
    now = float(bucket_of(time.time()))
    database.write(lambda c: c.execute(insert(checkpoints), saved("a", 3 * 10**9, now - 100)))
    for at in (now, now + 360):
        meter(database, at)
    (event,) = (await events(api))["data"]
    assert event["event_info"] == {"type": "storage", "gigabyte_hours": pytest.approx(0.3)}
    assert event["session_id"] is None
    assert event["project_id"] is None


@ON_BOTH
async def test_current_storage_is_reported_by_project(api: Api, database: Database) -> None:
    model_ids = []
    for project in ("blue", None):
        session = (await api.post("create_session", {"project_id": project})).json()["session_id"]
        model = await api.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": BASE})
        model_ids.append(model.json()["model_id"])
    now = time.time()
    rows = [
        saved("a", 2_000_000_000, now, model_id=model_ids[0]),
        saved("b", 500_000_000, now, model_id=model_ids[0]),
        saved("c", 7, now, model_id=model_ids[1]),
        saved("old", 10**9, now - 9, model_id=model_ids[1], expires_at=now - 1),
        saved("theirs", 10**9, now, model_id="x", tenant="somebody"),
    ]
    for row in rows:
        database.write(lambda c, row=row: c.execute(insert(checkpoints), row))

    async def current(**query: str) -> list[dict[str, Any]]:
        answer = await api.http.get("/api/v1/billing/usage/checkpoints/current", params=query)
        return answer.json()["data"]

    blue = {
        "project_id": "blue",
        "org_user_urn": user_urn(TENANT),
        "checkpoint_count": 2,
        "size_bytes": 2_500_000_000,
        "size_gigabytes": 2.5,
    }
    free = blue | {"project_id": None, "checkpoint_count": 1, "size_bytes": 7, "size_gigabytes": 7e-9}
    assert sorted(await current(), key=lambda row: row["size_bytes"]) == [free, blue]
    assert await current(project_id="blue") == [blue]
    assert await current(project_id="default") == [free]
    assert await current(project_id="green") == []


# Training


def amounts(harness: Harness, session: str) -> dict[str, float]:
    query = select(usage).where(usage.c.session_id == session)
    sums: Counter[str] = Counter()
    for row in harness.database.read(lambda c: c.execute(query).all()):
        sums[row.kind] += row.amount
    return dict(sums)


async def test_usage_counts_the_tokens_of_successful_passes(harness: Harness) -> None:
    one, two = await Trainer.create(harness), await Trainer.create(harness, model_seq_id=0)
    await one.result(await one.forward_backward(1, None, 9, 14))
    await one.result(await one.send(Kind.FORWARD, forward_input={"data": data(2, 5), "loss_fn": "cross_entropy"}))
    await one.fails(Kind.FORWARD_BACKWARD, forward_backward_input={"data": data(3, 7), "loss_fn": "no such loss"})
    await one.result(await one.optim_step())
    await two.result(await two.forward_backward(4, None, 6))
    assert amounts(harness, one.session.id) == {"training": 9 + 14 + 5}
    assert amounts(harness, two.session.id) == {"training": 6}


async def test_named_saves_count_as_checkpoints(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.do(Kind.SAVE_WEIGHTS, path="a")
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="a")
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    await trainer.fails(Kind.SAVE_WEIGHTS, path="a")
    assert amounts(harness, trainer.session.id) == {"checkpoint": 2}


# Commits with a lost answer


LOST = OperationalError("COMMIT", None, Exception("server closed the connection unexpectedly"))


@ON_BOTH
async def test_a_sample_whose_commit_seemed_lost_counts_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = GroupCommitWriter(database)
    counter, neighbour = UsageCounter(writer), UsageCounter(writer)
    key = UsageKey(TENANT, bucket_of(time.time()), "session", "", BASE, UsageKind.SAMPLE)
    original_transact = writer.transact

    async def commit_and_lose_the_answer(change: Any) -> None:
        await original_transact(change)
        raise LOST

    async def fail_before_commit(_: Any) -> None:
        raise LOST

    counted = 0
    for number, answer in enumerate(
        (commit_and_lose_the_answer, fail_before_commit, fail_before_commit, commit_and_lose_the_answer), 1
    ):
        for one in (counter, neighbour):
            one.count({key: number})
            counted += number
            with monkeypatch.context() as broken:
                broken.setattr(writer, "transact", answer)
                with pytest.raises(OperationalError):
                    await one.flush()
    for one in (counter, neighbour):
        await one.flush()
        await one.flush()
    assert database.read(lambda c: c.execute(select(usage.c.amount)).scalars().all()) == [counted]
    await writer.close()


@ON_BOTH
def test_the_counters_of_ended_processes_leave_no_rows(database: Database) -> None:
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
    for name, at in (("gone", noon), ("there", noon + HOUR_S), ("new", noon + 25 * HOUR_S - 1)):
        database.write(lambda c, name=name, at=at: add_once(c, name, at, {}, {}))
    meter(database, noon)
    names = select(MeterRow.__table__.c.name)  # type: ignore[attr-defined]
    assert set(database.read(lambda c: c.execute(names).scalars().all())) == {
        "samples there",
        "samples new",
        UsageKind.STORAGE,
    }


# The audit log


@ON_BOTH
async def test_the_audit_log_is_read_by_day_kind_and_tenant(api: Api, database: Database) -> None:
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
    at = [noon - 12 * HOUR_S - 0.001, noon - 12 * HOUR_S, noon, noon + 12 * HOUR_S - 0.001, noon + 12 * HOUR_S]
    names = ["checkpoint_created", "checkpoint_deleted", "project_session_assigned", "checkpoint_created", "x_y"]
    for when, name in zip(reversed(at), reversed(names), strict=True):
        path = f"tinker://m/weights/{when}"
        row = {"at": when, "tenant": TENANT, "event": name, "details": {"tinker_path": path, "model_id": "m"}}
        database.write(lambda c, row=row: c.execute(insert(audit.audit_events), row))

    async def read(**query: str) -> list[str]:
        answer = await api.http.get("/api/v1/audit", params=query)
        assert answer.status_code == 200, answer.text
        return [entry["event"] for entry in answer.json()["entries"]]

    assert await read(day="2026-03-01") == names[1:4]
    assert await read(day="2026-03-01", event_type="checkpoints") == ["checkpoint_deleted", "checkpoint_created"]
    assert await read(day="2026-03-01", event_type="projects") == ["project_session_assigned"]
    assert await read(day="2026-03-01", event_type="teams") == []
    assert await read(day="2026-02-28") == names[:1]
    assert await read() == []
    answer = await api.http.get("/api/v1/audit?day=2026-03-01", headers=OTHER)
    assert answer.json() == {"entries": []}
    entry = (await api.http.get("/api/v1/audit?day=2026-03-02")).json()["entries"][0]
    path = f"tinker://m/weights/{at[4]}"
    assert entry == {
        "timestamp": "2026-03-02T00:00:00+00:00",
        "event": "x_y",
        "event_details": {"tinker_path": path, "model_id": "m"},
        "model_id": "m",
        "tinker_path": path,
    }


@ON_BOTH
async def test_sampling_from_a_checkpoint_is_in_the_audit_log_of_its_owner(api: Api, database: Database) -> None:
    weights = AdapterVersion("m@1")
    version_directory(api.services.config.state_dir, weights).mkdir(parents=True)
    adapter = {
        "kind": "sampler_weights",
        "weights": weights,
        "public": True,
    }
    row = saved("a", 1, time.time()) | adapter
    database.write(lambda c: c.execute(insert(checkpoints), row))
    path = "tinker://m/sampler_weights/a"
    for headers in ({}, OTHER):
        session = (await api.post("create_session", {}, **headers)).json()["session_id"]
        wanted = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        for _ in range(2):  # the repeated request is the same sample
            assert (await api.post("create_sampling_session", wanted, **headers)).status_code == 200
    again = wanted | {"sampling_session_seq_id": 1}
    assert (await api.post("create_sampling_session", again, **OTHER)).status_code == 200, "no second event"
    own, foreign = (await api.http.get("/api/v1/audit")).json()["entries"]
    assert own["event"] == foreign["event"] == "checkpoint_sampled"
    assert own["tinker_path"] == foreign["tinker_path"] == path
    assert "reader" not in own["event_details"]
    assert foreign["event_details"]["reader"] == tenant_of_key("tml-two")
    assert (await api.http.get("/api/v1/audit", headers=OTHER)).json() == {"entries": []}
