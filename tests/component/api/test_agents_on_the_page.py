"""What the status page gets of agent sessions: the tenant's own, their turns piece by piece, and texts of bounded
length."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any, get_args

import numpy as np
import pytest
from api_harness import BASE, Api, Serve
from one_turn import turn
from tokenizers import Tokenizer

from skyrl.api.ui import agent_sessions
from skyrl.api.ui.agent_sessions import MAX_PARTS, MAX_TEXT, MAX_TURNS, shown_turns
from skyrl.base.tiny import model_path
from skyrl.base.types.agents import EndReason, ForkReason
from tests.postgres_server import ON_BOTH_SLOWLY

OTHER = {"X-API-Key": "tml-two"}
HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[31m"


async def create(api: Api, name: str, **headers: str) -> str:
    answer = await api.post("agent_sessions", {"model": BASE, "name": name}, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["session_id"]


async def add(api: Api, session: str, turn_id: str, **fields: Any) -> None:
    """Store a turn, as the server does at the end of an answer."""
    known = {"id": turn_id, "session_id": session, "key": turn_id.encode()}
    await api.services.agent_turns.add(turn(4, **(known | fields)))


async def ask(api: Api, path: str, status: int = 200, **headers: str) -> Any:
    answer = await api.http.get(f"/ui/api/{path}", headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


@ON_BOTH_SLOWLY
async def test_the_page_shows_a_tenants_own_sessions_newest_first(api: Api) -> None:
    first, second, theirs = await create(api, "first"), await create(api, HOSTILE), await create(api, "t", **OTHER)
    await add(api, first, "t1")
    await add(api, first, "t2", parent="t1", fork="branch", forked_at=1)
    await add(api, theirs, "t3")
    await api.post(f"agent_sessions/{first}/reward", {"reward": 0.5})
    await api.post(f"agent_sessions/{first}/end", {})
    shown = (await ask(api, "state"))["agents"]
    assert [(one["session_id"], one["name"], one["state"]) for one in shown] == [
        (second, HOSTILE, "open"),
        (first, "first", "ended"),
    ]
    numbers = {name: shown[1][name] for name in ("turns", "added", "sampled", "forks", "reward", "end_reason")}
    assert numbers == {"turns": 2, "added": 6, "sampled": 8, "forks": 1, "reward": 0.5, "end_reason": "called"}
    assert (await ask(api, f"agents/{theirs}", 404))["detail"] == "agent_session: no such agent session"
    assert (await ask(api, f"agents/{theirs}", 200, **OTHER))["session"]["turns"] == 1


@ON_BOTH_SLOWLY
async def test_a_turn_has_its_place_its_numbers_and_what_was_said(api: Api) -> None:
    session = await create(api, "one")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    asked = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": HOSTILE}]},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer = {"role": "assistant", "content": "Yes.", "reasoning": "Hm.", "tool_calls": [call]}
    await add(api, session, "t1", messages=asked, answer=answer, setting={"tools": tools})
    await add(api, session, "t2", parent="t1", fork="branch", forked_at=3, messages=[{"role": "tool", "content": "1"}])
    shown = await ask(api, f"agents/{session}")
    one, two = shown["turns"]
    assert one["tools"] == "add"
    assert one["messages"] == [
        {"role": "system", "name": "", "parts": [{"kind": "text", "name": "", "text": "Be brief.", "length": 9}]},
        {"role": "user", "name": "", "parts": [{"kind": "text", "name": "", "text": HOSTILE, "length": len(HOSTILE)}]},
    ]
    assert [(part["kind"], part["name"], part["text"]) for part in one["answer"]["parts"]] == [
        ("thinking", "", "Hm."),
        ("text", "", "Yes."),
        ("call", "add", '{"a": 1}'),
    ]
    assert (two["parent"], two["fork"], two["forked_at"], two["tools"]) == ("t1", "branch", 3, "")
    names = ("added", "prompt", "cached", "sampled", "logprob", "seconds", "finish_reason", "dialect", "versions")
    assert [two[name] for name in names] == [3, 10, 7, 4, 0.0, 1.0, "stop", "messages", []]
    assert (shown["session"]["model"], shown["session"]["weights"], shown["session"]["follows"]) == (
        BASE,
        "base",
        "pinned",
    )
    assert shown["more"] is False
    later = await ask(api, f"agents/{session}?after={shown['last']}")
    assert (later["turns"], later["last"]) == ([], shown["last"])


async def test_the_turns_of_a_long_session_come_piece_by_piece_and_unchanged_ones_once(api: Api) -> None:
    session, number = await create(api, "long"), 2 * MAX_TURNS + 1
    for each in range(number):
        await add(api, session, f"t{each}", parent=f"t{each - 1}" if each else None)
    found, last, more = list[str](), 0, True
    while more:
        shown = await ask(api, f"agents/{session}?after={last}")
        last, more = shown["last"], shown["more"]
        found += [one["id"] for one in shown["turns"]]
    assert found == [f"t{each}" for each in range(number)]
    first = await api.http.get(f"/ui/api/agents/{session}?after={last}")
    again = await api.http.get(
        f"/ui/api/agents/{session}?after={last}", headers={"If-None-Match": first.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")
    assert (await ask(api, f"agents/{session}?after=-1", 400))["field"] == "after"


@pytest.mark.parametrize(("table", "reasons"), [("ENDS", EndReason), ("FORKS", ForkReason)])
def test_the_page_has_words_for_every_reason(table: str, reasons: Any) -> None:
    text = files("skyrl.api.ui").joinpath("agents.js").read_text()
    block = text.partition(f"const {table} = {{")[2].partition("};")[0]
    assert re.findall(r"^  (\w+):", block, flags=re.M) == [*get_args(reasons)]


async def test_the_sampled_tokens_of_a_turn_can_be_seen_by_their_tenant(serve: Serve) -> None:
    async with serve(base_model=str(model_path()), served_model_names=[BASE]) as api:
        session = await create(api, "tokens")
        ids = Tokenizer.from_file(str(model_path() / "tokenizer.json")).encode("Höhe<|im_end|>").ids
        sampled, logprobs = np.array(ids, np.int32), np.linspace(-1, 0, len(ids), dtype=np.float32)
        await add(api, session, "t1", sampled=sampled, logprobs=logprobs)
        shown = await ask(api, f"agents/{session}/turns/t1")
        assert "".join(shown["texts"]) == "Höhe<|im_end|>"
        assert (shown["ids"], shown["sampled"]) == (ids, len(ids))
        assert shown["logprobs"] == pytest.approx(logprobs.tolist())
        await ask(api, f"agents/{session}/turns/t2", 404)
        await ask(api, f"agents/{session}/turns/t1", 404, **OTHER)


def test_long_texts_and_many_messages_are_cut_and_counted() -> None:
    long = {"role": "user", "content": "x" * (MAX_TEXT + 5)}
    [shown] = shown_turns([turn(1, messages=[{"role": "user", "content": str(n)} for n in range(MAX_PARTS)] + [long])])
    assert (shown["left_out"], len(shown["messages"])) == (1, MAX_PARTS)
    assert shown["messages"][0]["parts"][0]["text"] == "1", "the last ones are shown"
    [part] = shown["messages"][-1]["parts"]
    assert (len(part["text"]), part["length"]) == (MAX_TEXT, MAX_TEXT + 5)


def test_an_answer_of_the_page_has_at_least_one_turn_and_no_more_text_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_sessions, "MAX_ANSWER", 25)
    turns = [
        turn(1, id=f"t{n}", messages=[{"role": "user", "content": "x" * size}]) for n, size in enumerate((30, 1, 1))
    ]
    assert [one["id"] for one in shown_turns(turns)] == ["t0"]
    assert [one["id"] for one in shown_turns(turns[1:])] == ["t1", "t2"]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": 5, "content": 7},
        {"role": "user", "content": [None, {"type": "image_url", "image_url": {"url": "x"}}, {"text": 1}]},
        {"role": "assistant", "content": None, "tool_calls": [None, {}, {"function": "f"}, {"function": {"name": 1}}]},
        {"role": "assistant", "reasoning": {"a": 1}, "content": {"text": "t"}},
    ],
)
def test_messages_of_any_form_can_be_shown(message: dict[str, Any]) -> None:
    [shown] = shown_turns([turn(0, messages=[message], setting={"tools": ["odd", {"function": {}}]})])
    parts = shown["messages"][0]["parts"]
    assert all(isinstance(part[name], str) for part in parts for name in ("kind", "name", "text"))
    assert shown["logprob"] is None
