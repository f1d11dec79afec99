"""The routes of agent sessions: what a session is made of, its list, its end, its reward and its trajectory."""

from __future__ import annotations

import time
from functools import reduce
from typing import Any

import httpx
import pytest
from agent_world import CHAT, TENANT, Server, user
from api_harness import BASE, LONG_S, Api, Serve
from one_turn import turn
from sqlalchemy import insert, select, update

from skyrl.api.access import tenant_of_key
from skyrl.base.types.agents import VersionSpan
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.base.wire.requests import MAX_METADATA_BYTES, MAX_METADATA_DEPTH
from skyrl.chat.agents import export
from skyrl.storage.db import agents
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.columns import lora_values
from skyrl.storage.db.database import Database
from tests.postgres_server import ON_BOTH_SLOWLY

OTHER = {"X-API-Key": "tml-two"}
DEEP = {"note": reduce(lambda inner, _: [inner], range(MAX_METADATA_DEPTH), list[Any]())}
RUN = "s:train:0"
CONFIG = {"turns": 30, "tokens": 1_000, "seconds": 600.0, "idle_s": 60.0, "sessions": 2}


async def create(api: Api, body: dict[str, Any] | None = None, key: str = "tml-one") -> str:
    answer = await api.post("agent_sessions", {"model": BASE} | (body or {}), **{"X-API-Key": key})
    assert answer.status_code == 200, answer.text
    return answer.json()["session_id"]


async def get(api: Api, path: str, status: int = 200, **headers: str) -> Any:
    answer = await api.http.get(f"/api/v1/agent_sessions{path}", headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


async def add(api: Api, session: str, turn_id: str, parent: str | None = None, **fields: Any) -> None:
    """Store a turn of 3 added and 4 sampled tokens, as the server does at the end of an answer."""
    known = {"session_id": session, "key": turn_id.encode(), "parent": parent, "versions": (VersionSpan(0, "v1"),)}
    await api.services.agent_turns.add(turn(4, id=turn_id, **(known | fields)))


async def forked(api: Api) -> str:
    """A session with two rows: t1, t2, t3 and t1, t4."""
    session = await create(api, {"metadata": {"task": 7}})
    await add(api, session, "t1")
    await add(api, session, "t2", "t1")
    await add(api, session, "t3", "t2")
    await add(api, session, "t4", "t1", fork="branch", forked_at=1)
    return session


def saved(database: Database, name: str, version: int, created_at: float, kind: str = "sampler_weights") -> None:
    values = {
        "tenant": tenant_of_key("tml-one"),
        "model_id": RUN,
        "kind": kind,
        "name": name,
        "store_key": f"nowhere/{name}",
        "weights": AdapterVersion.of(RUN, version),
        "base_model": BASE,
        **lora_values(LoraSpec(8, 32.0, 1)),
        "size_bytes": 1,
        "public": False,
        "created_at": created_at,
    }
    database.write(lambda c: c.execute(insert(checkpoints), values))


@ON_BOTH_SLOWLY
async def test_a_session_has_what_was_asked_for_and_the_configured_limits(serve: Serve) -> None:
    async with serve(agents=CONFIG) as api:
        asked = {
            "name": "task-7",
            "limits": {"turns": 5, "idle_s": 1.5},
            "sampling": {"temperature": 0.5, "stop": ["\n"], "chat_template_kwargs": {"enable_thinking": False}},
            "metadata": {"task": [7]},
            "thinking": "keep",
        }
        shown = await get(api, f"/{await create(api, asked)}")
        assert {name: shown[name] for name in asked if name != "limits"} == {
            name: value for name, value in asked.items() if name != "limits"
        }
        assert shown["limits"] == {"turns": 5, "tokens": 1_000, "seconds": 600.0, "idle_s": 1.5}
        assert (shown["model"], shown["weights"], shown["follows"], shown["state"]) == (BASE, "base", "pinned", "open")
        assert [shown[name] for name in ("turns", "sampled", "reward", "end_reason")] == [0, 0, None, None]
        assert "tenant" not in shown
        assert "key" not in shown, "only its creation gives the key"


async def test_a_session_says_at_its_creation_what_becomes_of_thoughts(serve: Serve) -> None:
    async with serve() as api:
        made = (await api.post("agent_sessions", {"model": BASE})).json()
        assert {name: made[name] for name in ("thinking", "chat_template_kwargs", "user_turns", "tool_loops")} == {
            "thinking": "template",
            "chat_template_kwargs": {},
            "user_turns": "the model has no tokenizer on this machine",
            "tool_loops": "the model has no tokenizer on this machine",
        }
        kept = (await api.post("agent_sessions", {"model": BASE, "keep_thinking": True})).json()
        assert kept["thinking"] == "keep", "its older name"
        refused = await api.post("agent_sessions", {"model": BASE, "keep_thinking": True, "thinking": "template"})
        assert (refused.status_code, refused.json()["detail"]) == (
            400,
            'keep_thinking: contradicts thinking: "template"',
        )


@pytest.mark.parametrize("given", [{"max_tokens": 64, "temperature": None}, {"max_completion_tokens": 64}])
async def test_the_sessions_fields_hold_where_a_request_has_none(server: Server, given: dict[str, Any]) -> None:
    agent = await server.agent(sampling={"max_completion_tokens": 512, "temperature": 0.5})
    await agent.say([user("Hi")], **({"max_tokens": None} | given))
    sent = server.vllm.upstream.requests[-1].json
    numbers = {name: value for name, value in sent.items() if name.startswith("max_") or name == "temperature"}
    assert numbers == {name: 64 for name in given if name != "temperature"} | {"temperature": 0.5}


async def test_an_agent_is_told_the_public_address_or_the_one_that_was_asked(serve: Serve) -> None:
    async with serve() as api:
        assert (await api.post("agent_sessions", {"model": BASE})).json()["base_url"] == "http://api"
    async with serve(public_url="https://rl.example.com/skyrl/") as api:
        assert (await api.post("agent_sessions", {"model": BASE})).json()["base_url"] == "https://rl.example.com/skyrl"


async def test_a_run_stands_for_its_newest_sampler_weights(api: Api, database: Database) -> None:
    saved(database, "old", 1, 10.0)
    saved(database, "new", 2, 20.0)
    saved(database, "training", 3, 30.0, kind="weights")
    for model, version in ((f"tinker://{RUN}", 2), (f"tinker://{RUN}/sampler_weights/old", 1)):
        shown = await get(api, f"/{await create(api, {'model': model})}")
        assert (shown["model"], shown["weights"]) == (model, str(AdapterVersion.of(RUN, version)))
    for model in (f"tinker://{RUN}", f"tinker://{RUN}/sampler_weights/old", "tinker://other", "tinker://", "nothing"):
        headers = {} if RUN not in model else OTHER
        answer = await api.post("agent_sessions", {"model": model}, **headers)
        assert answer.status_code == 404, (model, answer.text)
        assert answer.json()["field"] == "model"
        assert answer.json()["detail"].startswith("model: "), "as every refusal below /api/v1"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": 1}, "model"),
        ({"name": "x" * 201}, "name"),
        ({"follows": "latest"}, "follows"),
        ({"metadata": {"x": "y" * MAX_METADATA_BYTES}}, "metadata"),
        ({"metadata": []}, "metadata"),
        ({"metadata": DEEP}, "metadata"),
        ({"sampling": {"chat_template_kwargs": DEEP}}, "sampling"),
        ({"sampling": {"stop": ["y" * MAX_METADATA_BYTES]}}, "sampling"),
        ({"limits": {"turns": 0}}, "limits.turns"),
        ({"limits": {"turns": 31}}, "limits.turns"),
        ({"limits": {"turns": 1.5}}, "limits.turns"),
        ({"limits": {"tokens": 1_001}}, "limits.tokens"),
        ({"limits": {"seconds": 600.1}}, "limits.seconds"),
        ({"limits": {"seconds": -1}}, "limits.seconds"),
        ({"limits": {"idle_s": 1e9}}, "limits.idle_s"),
        ({"sampling": {"temperature": "warm"}}, "sampling.temperature"),
        ({"sampling": {"messages": []}}, "sampling.messages"),
        ({"sampling": {"model": "x"}}, "sampling.model"),
        ({"sampling": {"stream": True}}, "sampling.stream"),
        ({"sampling": {"tools": []}}, "sampling.tools"),
        ({"sampling": {"kv_transfer_params": {}}}, "sampling.kv_transfer_params"),
        ({"sampling": {"top_k": 2**40}}, "sampling.top_k"),
    ],
)
async def test_a_session_that_cannot_be_is_refused_by_field(serve: Serve, body: dict[str, Any], field: str) -> None:
    async with serve(agents=CONFIG) as api:
        answer = await api.post("agent_sessions", {"model": BASE} | body)
        assert (answer.status_code, answer.json()["field"]) == (400, field), answer.text
        assert (await get(api, ""))["total"] == 0


async def test_more_open_sessions_than_a_tenant_may_have_are_refused_until_one_ends(serve: Serve) -> None:
    async with serve(agents=CONFIG) as api:
        first, _ = await create(api), await create(api)
        answer = await api.post("agent_sessions", {"model": BASE})
        assert answer.status_code == 429
        assert "2 open agent sessions" in answer.json()["detail"]
        await create(api, {}, "tml-two")
        await api.post(f"agent_sessions/{first}/end", {})
        await create(api)


@ON_BOTH_SLOWLY
async def test_the_list_is_the_tenants_own_newest_first_by_state(api: Api) -> None:
    ids = [await create(api, {"name": str(number)}) for number in range(3)]
    await create(api, {}, "tml-two")
    await api.post(f"agent_sessions/{ids[1]}/end", {})

    async def listed(query: str) -> tuple[list[str], int]:
        page = await get(api, query)
        return [one["name"] for one in page["sessions"]], page["total"]

    assert await listed("") == (["2", "1", "0"], 3)
    assert await listed("?limit=1&offset=1") == (["1"], 3)
    assert await listed("?state=open") == (["2", "0"], 2)
    assert await listed("?state=ended") == (["1"], 1)
    for query in ("?limit=0", "?limit=201", "?offset=-1", f"?offset={2**31}", "?state=gone"):
        assert (await get(api, query, 400))["field"] == query[1:].partition("=")[0]


@ON_BOTH_SLOWLY
async def test_an_ended_session_stays_ended_and_can_be_rewarded_and_read(api: Api) -> None:
    session = await forked(api)
    for _ in range(2):
        assert (await api.post(f"agent_sessions/{session}/end", {})).status_code == 200
        shown = await get(api, f"/{session}")
        assert (shown["state"], shown["end_reason"]) == ("ended", "called")
    assert (await api.post(f"agent_sessions/{session}/reward", {"reward": 0.5})).status_code == 200
    assert (await api.post(f"agent_sessions/{session}/reward", {"reward": -1})).status_code == 200
    for wrong in ("1", None, True):
        assert (await api.post(f"agent_sessions/{session}/reward", {"reward": wrong})).status_code == 400
    assert (await get(api, f"/{session}"))["reward"] == -1
    assert (await get(api, f"/{session}/trajectory"))["total"] == 2


async def test_an_agent_of_an_ended_session_is_told_that_it_has_ended(api: Api) -> None:
    made = (await api.post("agent_sessions", {"model": BASE})).json()
    await api.post(f"agent_sessions/{made['session_id']}/end", {})
    chat = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}
    answer = await api.http.post("/v1/chat/completions", json=chat, headers={"X-API-Key": made["key"]})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "agent_session_ended"


async def test_a_trajectory_is_read_in_pages_and_each_page_knows_what_earlier_ones_train(api: Api) -> None:
    session = await forked(api)
    whole = (await get(api, f"/{session}/trajectory"))["rows"]
    first = await get(api, f"/{session}/trajectory?limit=1")
    second = await get(api, f"/{session}/trajectory?limit=1&offset={first['next_offset']}")
    assert first["rows"] + second["rows"] == whole
    assert second["next_offset"] is None
    await api.post(f"agent_sessions/{session}/end", {})
    assert (await get(api, f"/{session}/trajectory?limit=1&offset=1"))["rows"] == whole[1:], "its rows stay"
    assert (await get(api, f"/{session}/trajectory?offset=7"))["rows"] == []


@ON_BOTH_SLOWLY
@pytest.mark.parametrize("path", ["trajectory?", "trajectory?format=samples&", "trajectory?format=jsonl&", "turns?"])
async def test_pages_of_a_live_session_have_each_row_once_whatever_ends_meanwhile(api: Api, path: str) -> None:
    """A turn that continues the first row makes another row of it, at the end of the list."""
    session = await forked(api)
    whole = (await get(api, f"/{session}/{path}"))["rows"]
    page = await get(api, f"/{session}/{path}limit=1")
    rows = page["rows"]
    for number in range(3):
        await add(api, session, f"late{number}", ("t3", "t4", None)[number])
        if page["next_offset"] is not None:
            page = await get(api, f"/{session}/{path}limit=1&offset={page['next_offset']}")
            rows += page["rows"]
    while page["next_offset"] is not None:
        page = await get(api, f"/{session}/{path}limit=1&offset={page['next_offset']}")
        rows += page["rows"]
    assert rows == whole
    assert len((await get(api, f"/{session}/turns"))["rows"]) == 7


@pytest.mark.parametrize("path", ["trajectory", "trajectory?format=jsonl", "turns"])
async def test_a_page_of_a_live_session_that_is_not_known_any_more_is_refused(api: Api, path: str) -> None:
    session = await forked(api)
    more = "&" if "?" in path else "?"
    known = (await get(api, f"/{session}/{path}{more}limit=1"))["next_offset"]
    offset, turns, digest = known.split("-")
    for wrong in (offset, f"{offset}-{int(turns) + 1}-{digest}", f"{offset}-{turns}-{'0' * 16}"):
        refused = await get(api, f"/{session}/{path}{more}offset={wrong}", 409)
        assert refused["field"] == "offset"
    assert await get(api, f"/{session}/{path}{more}offset={known}")


@ON_BOTH_SLOWLY
async def test_a_session_of_which_a_part_is_deleted_has_no_trajectory(
    serve: Serve, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention deletes in steps, and its steps end at any turn."""
    monkeypatch.setattr(agents, "FORGET_TURNS", 2)
    async with serve(agents={"retention_s": LONG_S}) as api:
        kept, gone = await forked(api), await forked(api)
        for session in (kept, gone):
            await api.post(f"agent_sessions/{session}/end", {})
        own = agents.sessions.c.id == gone
        over = update(agents.sessions).where(own).values(ended_at=time.time() - 2 * LONG_S)
        database.write(lambda c: c.execute(over))
        assert database.write(lambda c: agents.forget(c, time.time() - LONG_S)) == 2
        for path in ("/trajectory", "/turns", "/trajectory?format=jsonl", ""):
            await get(api, f"/{gone}{path}", 404)
            await get(api, f"/{kept}{path}")


async def test_a_page_gives_fewer_rows_than_asked_for_if_they_are_long(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await forked(api)
    monkeypatch.setattr(export, "MAX_PAGE_BYTES", 1)
    for path in ("trajectory", "trajectory?format=jsonl", "turns"):
        page = await get(api, f"/{session}/{path}")
        assert len(page["rows"]) == 1, "at least one: a reader must get on"
        assert page["next_offset"].startswith("1-4-")


async def test_every_form_of_a_trajectory_has_the_same_tokens(api: Api) -> None:
    session = await forked(api)
    forms = {form: (await get(api, f"/{session}/trajectory?format={form}"))["rows"] for form in ("samples", "verl")}
    datums = (await get(api, f"/{session}/trajectory"))["rows"]
    for datum, sample, verl in zip(datums, forms["samples"], forms["verl"], strict=True):
        tokens = sample["tokens"]
        assert datum["model_input"]["chunks"][0]["tokens"] == tokens[:-1]
        assert datum["loss_fn_inputs"]["target_tokens"]["data"] == tokens[1:]
        assert verl["prompts"] + verl["responses"] == verl["input_ids"] == tokens
        assert sample["loss_mask"] == verl["response_mask"] == datum["loss_fn_inputs"]["mask"]["data"][2:]
        assert sample["metadata"]["task"] == 7
        assert len(sample["weight_versions"]) == sample["response_length"] == len(verl["responses"])
        assert sample["weight_versions"].count("v1") == 4 * len(sample["metadata"]["turns"])
    lines = (await get(api, f"/{session}/trajectory?format=jsonl"))["rows"]
    assert [(line["id"], line["parent"], line["fork"], line["forked_at"]) for line in lines] == [
        ("t1", None, None, None),
        ("t2", "t1", None, None),
        ("t3", "t2", None, None),
        ("t4", "t1", "branch", 1),
    ]
    assert lines == (await get(api, f"/{session}/turns"))["rows"]
    first = await get(api, f"/{session}/turns?limit=3")
    assert first["rows"] + (await get(api, f"/{session}/turns?offset={first['next_offset']}"))["rows"] == lines


async def test_a_session_without_turns_has_no_rows(api: Api) -> None:
    session = await create(api)
    for path in ("trajectory", "trajectory?format=verl", "turns"):
        assert await get(api, f"/{session}/{path}") == {"rows": [], "total": 0, "next_offset": None}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("format=csv", "format"),
        ("limit=65", "limit"),
        ("limit=0", "limit"),
        ("offset=-1", "offset"),
        ("offset=1-2", "offset"),
        ("offset=x", "offset"),
        ("offset=9999999999", "offset"),
        ("advantage=nan", "advantage"),
        ("advantage=inf", "advantage"),
        ("advantage=x", "advantage"),
    ],
)
async def test_a_trajectory_that_cannot_be_is_refused_with_the_field(api: Api, query: str, field: str) -> None:
    answer: httpx.Response = await api.http.get(f"/api/v1/agent_sessions/{await create(api)}/trajectory?{query}")
    assert (answer.status_code, answer.json()["field"]) == (400, field)


async def test_a_deleted_session_is_found_no_more_and_the_sweep_deletes_it(api: Api, database: Database) -> None:
    kept, deleted = await create(api), await create(api)
    for session in (kept, deleted):
        await add(api, session, f"turn-{session}")
    answer = await api.http.delete(f"/api/v1/agent_sessions/{deleted}")
    assert (answer.status_code, answer.json()) == (200, {})
    for path in ("", "/turns", "/trajectory"):
        await get(api, f"/{deleted}{path}", 404)
    assert (await api.http.delete(f"/api/v1/agent_sessions/{deleted}")).status_code == 404
    for state in ("", "?state=ended"):
        assert deleted not in [one["session_id"] for one in (await get(api, state))["sessions"]]
    assert (await get(api, ""))["total"] == 1
    while database.write(lambda c: agents.forget(c, time.time() - 3600)):
        pass
    rows = (agents.sessions.c.id, agents.turns.c.session_id)
    assert [database.read(lambda c, r=row: list(c.execute(select(r)).scalars())) for row in rows] == [[kept], [kept]]


async def test_deleting_an_open_session_ends_it_for_its_agent(server: Server) -> None:
    agent = await server.agent()
    await agent.say([user("Hi")])
    await server.http.delete(f"/api/v1/agent_sessions/{agent.id}", headers=TENANT)
    answer = await agent.ask(CHAT, messages=[user("Hi again")])
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "agent_session_ended")
