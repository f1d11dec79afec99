"""Sessions as their owner manages them: names, projects, search, timeline. Through the API, on a real database."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from api_harness import BASE, Api, Serve, session_of
from engine_harness import until
from fake_upstream import FakeUpstream, error, never
from sqlalchemy import insert, select, update

from skyrl.api import timeline as timelines
from skyrl.api.access import tenant_of_key, user_urn
from skyrl.api.search_turns import MOST
from skyrl.base.types.weights import LoraSpec
from skyrl.storage.db import session_search
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.columns import lora_values
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import models
from skyrl.storage.db.sessions import sessions
from tests.postgres_server import ON_BOTH

pytestmark = ON_BOTH

TENANT, OTHER = tenant_of_key("tml-one"), {"X-API-Key": "tml-two"}


async def create(api: Api, headers: dict[str, str] | None = None, **fields: Any) -> str:
    answer = await api.post("create_session", fields, **(headers or {}))
    assert answer.status_code == 200, answer.text
    return answer.json()["session_id"]


async def search(api: Api, **query: Any) -> list[str]:
    answer = await api.post("sessions/search", query)
    assert answer.status_code == 200, answer.text
    return [found["session_id"] for found in answer.json()["sessions"]]


async def finish(api: Api, session: str, reason: str, detail: str | None = None) -> None:
    body = {"reason": {"type": reason}, "detail": detail}
    assert (await api.post(f"sessions/{session}/finish", body)).status_code == 200


async def test_name_and_metadata_are_read_back_even_after_a_restart(serve: Serve) -> None:
    async with serve() as api:
        session = await create(api, display_name="Größe 1", user_metadata={"lr": 0.1, "who": "me"}, project_id="p")
        expected = {
            "training_run_ids": [],
            "sampler_ids": [],
            "user_metadata": {"lr": "0.1", "who": "me"},
            "display_name": "Größe 1",
        }
        assert (await api.http.get(f"/api/v1/sessions/{session}")).json() == expected
        await finish(api, session, "success")
    async with serve() as api:
        for scope in ("owned", "accessible"):
            answer = await api.http.get(f"/api/v1/sessions/{session}?access_scope={scope}")
            assert answer.json() == expected
            assert (await api.http.get(f"/api/v1/sessions?access_scope={scope}")).json() == {"sessions": [session]}


async def test_a_search_lists_the_newest_first_in_pages_without_gaps(api: Api, database: Database) -> None:
    made = [await create(api) for _ in range(7)]
    await create(api, OTHER)
    # Created in the same microsecond, as far as the clock can tell.
    database.write(lambda c: c.execute(update(sessions).where(sessions.c.id.in_(made[2:5])).values(created_at=5.25)))
    order = [made[6], made[5], made[1], made[0], *sorted(made[2:5], reverse=True)]
    assert await search(api) == order
    for size in (1, 2, 3, 7):
        found, cursor = [], None
        while True:
            page = (await api.post("sessions/search", {"limit": size, "cursor": cursor})).json()
            found += [each["session_id"] for each in page["sessions"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
            assert len(page["sessions"]) == size
        assert found == order, size


async def test_a_search_by_name_matches_words_in_any_case(api: Api) -> None:
    nightly = await create(api, display_name="Nightly RUN über alles")
    other = await create(api, display_name="nightly eval")
    nameless = await create(api)
    assert await search(api, display_name="nightly") == [other, nightly]
    assert await search(api, display_name="run NIGHT") == [nightly]
    assert await search(api, display_name="ÜBER") == [nightly]
    assert await search(api, display_name="run eval") == []
    assert await search(api, display_name="eval", session_id=nameless) == [nameless, other], (
        "one matching name or id is enough"
    )
    assert await search(api, session_id=nightly) == [nightly]
    assert await search(api, session_id="nobody") == []


async def test_a_search_by_metadata_requires_every_pair(api: Api) -> None:
    one = await create(api, user_metadata={"run": "7", "lr": 0.1})
    two = await create(api, user_metadata={"run": "7", "lr": "0.2", 'odd "key"': "x"})
    assert await search(api, user_metadata={"run": "7"}) == [two, one]
    assert await search(api, user_metadata={"run": "7", "lr": "0.1"}) == [one]
    assert await search(api, user_metadata={'odd "key"': "x"}) == [two]
    assert await search(api, user_metadata={"run": "8"}) == []
    assert await search(api, user_metadata={"walk": "7"}) == []


async def test_a_session_that_ended_without_a_reason_has_no_status_and_matches_no_search_by_status(api: Api) -> None:
    with_reason, without_reason = await create(api), await create(api)
    await finish(api, with_reason, "success")
    assert (await api.post(f"sessions/{without_reason}/finish", {})).status_code == 200
    assert await search(api) == [without_reason, with_reason]
    assert await search(api, statuses=[{"type": "client_finished"}]) == [with_reason]


async def test_a_search_filters_by_project_owner_and_status(api: Api, database: Database) -> None:
    free, placed = await create(api), await create(api, project_id="blue")
    won, lost = await create(api, project_id="red"), await create(api)
    await finish(api, won, "success")
    await finish(api, lost, "errored", "out of luck")
    silent = await create(api)
    database.write(lambda c: c.execute(update(sessions).where(sessions.c.id == silent).values(status="expired")))
    everyone = [silent, lost, won, placed, free]
    assert await search(api) == everyone
    assert await search(api, project_ids=["blue", "red"]) == [won, placed]
    assert await search(api, project_ids=["default"]) == [silent, lost, free], (
        "the default project holds the sessions without a project"
    )
    assert await search(api, project_ids=[]) == []
    for owner in ({"type": "own"}, {"type": "accessible"}, {"type": "user", "owner_urns": ["x", user_urn(TENANT)]}):
        assert await search(api, owner=owner) == everyone
    assert await search(api, owner={"type": "user", "owner_urns": ["x"]}) == []
    assert await search(api, statuses=[{"type": "active"}]) == [placed, free]
    assert await search(api, statuses=[{"type": "client_finished"}]) == [lost, won]
    assert await search(api, statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == [lost]
    assert await search(api, statuses=[{"type": "active"}, {"type": "client_finished", "reasons": ["success"]}]) == [
        won,
        placed,
        free,
    ]
    assert await search(api, statuses=[{"type": "failed"}, {"type": "cancelled"}]) == []


def checkpoint(model_id: str, name: str, size: int, **more: Any) -> dict[str, Any]:
    shape = lora_values(LoraSpec(8, 32.0, 1))
    row = {"tenant": TENANT, "model_id": model_id, "kind": "weights", "name": name, "base_model": BASE, **shape}
    return row | {"store_key": name, "size_bytes": size, "public": False, "created_at": time.time()} | more


async def test_a_summary_counts_the_sessions_contents(api: Api, database: Database) -> None:
    session = await create(api, display_name="one", user_metadata={"n": 3}, project_id="blue")
    bare = await create(api)
    for number in (0, 1):
        await api.post("create_model", {"session_id": session, "model_seq_id": number, "base_model": BASE})
    rows = [
        checkpoint(f"{session}:train:0", "a", 10),
        checkpoint(f"{session}:train:1", "b", 200),
        checkpoint(f"{session}:train:1", "old", 4000, expires_at=time.time() - 1),
    ]
    for row in rows:
        database.write(lambda c, row=row: c.execute(insert(checkpoints), row))
    await finish(api, session, "interrupted", "Ctrl-C")
    empty, full = (await api.post("sessions/search", {})).json()["sessions"]
    assert full.pop("created_at") < empty.pop("created_at")
    assert full == {
        "session_id": session,
        "owner": user_urn(TENANT),
        "project_id": "blue",
        "status": {"type": "client_finished", "reason": {"type": "interrupted"}, "detail": "Ctrl-C"},
        "checkpoints_count": 2,
        "checkpoint_storage_bytes": 210,
        "display_name": "one",
        "user_metadata": {"n": "3"},
    }
    assert empty == {
        "session_id": bare,
        "owner": user_urn(TENANT),
        "project_id": "default",
        "status": {"type": "active"},
        "checkpoints_count": 0,
        "checkpoint_storage_bytes": 0,
        "display_name": None,
        "user_metadata": None,
    }


@pytest.mark.parametrize(("status", "reason"), [("expired", None), ("finished", None)])
async def test_the_status_of_a_session_that_ended_without_a_reason_is_none(
    api: Api, database: Database, status: str, reason: str | None
) -> None:
    session = await create(api)
    ended = {"status": status, "finish_reason": reason}
    database.write(lambda c: c.execute(update(sessions).where(sessions.c.id == session).values(**ended)))
    (found,) = (await api.post("sessions/search", {})).json()["sessions"]
    assert found["status"] is None


async def test_the_first_reason_is_kept_and_the_end_has_a_time(api: Api, database: Database) -> None:
    before = time.time()
    session = await create(api)
    await finish(api, session, "errored", "boom")
    await finish(api, session, "success")
    row = database.read(lambda c: c.execute(select(sessions).where(sessions.c.id == session)).one())
    assert (row.finish_reason, row.finish_detail) == ("errored", "boom")
    assert before <= row.ended_at <= time.time()


async def test_a_session_is_moved_into_a_project_with_its_runs(api: Api, database: Database) -> None:
    session, other = await create(api), await create(api)
    for each in (session, other):
        await api.post("create_model", {"session_id": each, "model_seq_id": 0, "base_model": BASE})
    await finish(api, other, "success")
    for project in ("blue", "red"):
        answer = await api.http.put(f"/api/v1/sessions/{session}/project", json={"project_id": project})
        assert answer.status_code == 200
    assert await search(api, project_ids=["red"]) == [session]
    assert await search(api, project_ids=["blue"]) == []
    ended = await api.http.put(f"/api/v1/sessions/{other}/project", json={"project_id": "blue"})
    assert ended.status_code == 200, "an ended session can be moved as well"
    tenant = database.read(lambda c: c.execute(select(models.c.tenant).limit(1)).scalar_one())
    for project, expected in (("red", session), ("blue", other), ("green", None)):
        rows, total = await api.services.models.page(tenant, 10, 0, project)
        assert [row.session_id for row in rows] == ([expected] if expected else [])
        assert total == len(rows)
    assert (await api.services.models.page(tenant, 10, 0))[1] == 2
    moves = (await api.http.get("/api/v1/audit?event_type=projects")).json()["entries"]
    assert [move["event_details"] for move in moves] == [
        {"session_id": session, "project_id": "blue", "previous_project_id": None},
        {"session_id": session, "project_id": "red", "previous_project_id": "blue"},
        {"session_id": other, "project_id": "blue", "previous_project_id": None},
    ]


# The timeline


async def trace(api: Api, session: str) -> dict[str, Any]:
    link = (await api.http.get(f"/api/v1/sessions/{session}/trace_export")).json()
    assert link["status"] == "ready"
    fetched = await api.http.get(link["url"], headers={"X-API-Key": ""})
    assert fetched.status_code == 200, fetched.text
    return json.loads(fetched.content)


@pytest.mark.usefixtures("drain_at_once")
async def test_the_timeline_has_each_request_on_its_track(api: Api, upstream: FakeUpstream) -> None:
    started = time.time()
    sampler = await api.sampler()
    session = session_of(sampler)
    upstream.script.extend([error(400, "no"), never])
    failed = (await api.sample(sampler, 1))["request_id"]
    await api.result(failed)
    running = (await api.sample(sampler, 2))["request_id"]
    created = (await api.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": BASE})).json()
    other_sampler = await api.sampler()
    await api.services.futures.read_outcomes([])
    events = (await trace(api, session))["traceEvents"]
    tracks = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(tracks) == [sampler, created["model_id"]]
    begun = {event["id"]: event for event in events if event["ph"] == "b"}
    ended = {event["id"]: event for event in events if event["ph"] == "e"}
    assert set(begun) == {failed, running, created["request_id"]}
    assert set(ended) == {failed}
    assert begun[failed]["pid"] == begun[running]["pid"] == tracks[sampler]
    assert begun[created["request_id"]]["pid"] == tracks[created["model_id"]]
    assert {event["name"] for event in begun.values()} == {"external", "create_model"}
    assert begun[failed]["args"] == {"request_id": failed, "seq_id": 1, "status": "failed", "error": "no"}
    for key in ("name", "cat", "id", "pid", "tid"):
        assert begun[failed][key] == ended[failed][key], "Perfetto pairs the events by these fields"
    assert started * 1e6 <= begun[failed]["ts"] <= ended[failed]["ts"] <= time.time() * 1e6
    assert (await trace(api, session_of(other_sampler)))["traceEvents"] == []


async def test_a_link_is_valid_for_one_timeline_only(api: Api) -> None:
    one, two = await create(api), await create(api)
    url = (await api.http.get(f"/api/v1/sessions/{one}/trace_export")).json()["url"]
    assert (await api.http.get(url)).status_code == 200
    assert (await api.http.get(url.replace(one, two))).status_code == 403


async def test_a_timeline_holds_the_newest_requests(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = await api.sampler()
    request_ids = [(await api.sample(sampler, seq_id))["request_id"] for seq_id in range(3)]
    monkeypatch.setattr(timelines, "MAX_REQUESTS", 2)
    events = (await trace(api, session_of(sampler)))["traceEvents"]
    assert [event["id"] for event in events if event["ph"] == "b"] == request_ids[1:]


async def test_a_search_compares_a_bounded_number_of_sessions_and_goes_on_from_there(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_search, "MOST_COMPARED", 2)
    wanted = (await api.post("create_session", {"display_name": "wanted"})).json()["session_id"]
    for _ in range(4):
        await api.post("create_session", {"display_name": "other"})
    found, cursor, pages = list[str](), None, 0
    while pages == 0 or cursor is not None:
        page = (await api.post("sessions/search", {"display_name": "wanted", "cursor": cursor})).json()
        found += [session["session_id"] for session in page["sessions"]]
        cursor, pages = page["next_cursor"], pages + 1
    assert (found, pages) == ([wanted], 3)


async def test_searches_take_turns_and_a_tenant_may_have_few_of_them(api: Api) -> None:
    turns, other = api.services.search_turns, {"X-API-Key": "tml-two"}
    async with turns.turn("a"), turns.turn("b"):
        waiting = [asyncio.create_task(api.post("sessions/search", {})) for _ in range(MOST)]
        theirs = asyncio.create_task(api.post("checkpoints/search", {}, **other))
        await until(lambda: len(turns._running._waiting) == 2 and turns._asked[tenant_of_key("tml-one")] == MOST)
        for search in ("sessions/search", "checkpoints/search"):
            refused = await api.post(search, {})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert f"{MOST} searches of yours run or wait" in refused.json()["detail"]
        assert not any(task.done() for task in (*waiting, theirs))
    assert [answer.status_code for answer in await asyncio.gather(*waiting, theirs)] == [200] * (MOST + 1)
    assert not turns._asked
