"""Agent sessions at the sizes of real agents, over HTTP: thousands of turns, bodies of 10 MB with 300 tools, many
sessions at once. The inference server answers at once, so what is seen is the API process's own work and memory.

The numbers here are smaller than those that sessions are made for; work and memory are counted, so that growth shows.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
from agent_world import CHAT, MESSAGES, RESPONSES, TENANT, Agent, Server, user
from chatting_upstream import SAMPLED, TOKENIZE
from fake_upstream import after
from router_world import until

import skyrl
from skyrl.api.bodies import SAMPLE_BYTES
from skyrl.chat.agents import live_sessions

SKYRL = Path(skyrl.__file__).parent


@contextmanager
def lines_run(*packages: str) -> Iterator[Counter[str]]:
    """How many lines run in this thread meanwhile, by function. Counts the code of these packages of skyrl, such as
    chat/agents. A loop runs its lines anew in each round."""
    counts: Counter[str] = Counter()
    directories = tuple(f"{SKYRL / package}/" for package in packages)

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            counts[frame.f_code.co_qualname] += 1
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(directories) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield counts
    finally:
        sys.settrace(before)


def bytes_held(objects: Iterable[object]) -> int:
    """The bytes of all objects that are reached from these, each once; of an array's view, those of its whole array."""
    seen: set[int] = set()
    todo = list(objects)
    held = 0
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(each))
        held += sys.getsizeof(each)
        todo += gc.get_referents(each)
        if isinstance(each, np.ndarray) and each.base is not None:
            todo.append(each.base)
    return held


TURNS, EARLY = 400, 20
"""The turns of a long session, and the number of one of its first."""
READS_THE_REQUEST = {"Planner.place.<locals>.<genexpr>", "Tree._read", "identical"}
"""They look at each message of a request once: an agent sends the whole conversation with each turn."""
LISTS_THE_TURNS = {"_step", "_step.<locals>.<listcomp>", "Tree.path"}
"""They list the turns before a request. What is rendered of them is bounded."""
TOOLS, LARGE_BYTES = 300, 10_000_000
SESSIONS, AT_ONCE, KEPT = 250, 64, 30
SESSION_BYTES = 12_000
"""Of a session with one short turn, in memory, at most."""


def tool(number: int) -> dict[str, Any]:
    """As large as those of coding agents: about 2.7 kB."""
    text = "What this is for, when the agent should give it, and what happens if it does not. "
    properties = {f"field_{place}": {"type": "string", "description": text * 2} for place in range(10)}
    return {
        "name": f"tool_{number}",
        "description": text * 8,
        "input_schema": {"type": "object", "properties": properties},
    }


async def test_a_long_session_is_one_row_and_its_turns_do_not_get_heavier(server: Server) -> None:
    agent = await server.agent()
    messages = [user("Begin.")]
    work: dict[int, Counter[str]] = {}
    for number in range(TURNS):
        if number in (EARLY, TURNS - 1):
            with lines_run("chat/agents", "chat/openai", "storage/db") as work[number]:
                answer = await agent.say(messages)
        else:
            answer = await agent.say(messages)
        messages += [answer, user(f"Go on after {number}.")]
        server.vllm.upstream.requests.clear()
    early, late = work[EARLY], work[TURNS - 1]
    assert {name for name in late if late[name] > early[name] + TURNS // 2} == READS_THE_REQUEST | LISTS_THE_TURNS
    live = server.live(agent)
    assert live is not None
    assert [turn.fork for turn in live.tree] == [None] * TURNS
    assert bytes_held([live]) < 3 * live.nbytes
    page = await agent.get("/trajectory?format=samples")
    assert page["total"] == 1
    (row,) = page["rows"]
    sampled = server.vllm.answers
    assert row["tokens"] == [*server.vllm.prompt, *sampled[-1].ids]
    ids = row["tokens"][-row["response_length"] :]
    trained = [place for place, is_trained in enumerate(row["loss_mask"]) if is_trained]
    assert [ids[place] for place in trained] == [token for answer in sampled for token in answer.ids]
    logprobs = [row["rollout_log_probs"][place] for place in trained]
    assert logprobs == [logprob for answer in sampled for logprob in answer.logprobs]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_body_of_10_mb_with_300_tools_is_answered_and_continued(server: Server, path: str) -> None:
    agent = await server.agent()
    tools: list[dict[str, Any]] = [tool(number) for number in range(TOOLS)]
    if path == CHAT:
        tools = [
            {"type": "function", "function": {"name": each["name"], "parameters": each["input_schema"]}}
            for each in tools
        ]
    text = "".join(f"{number}: a line of a file\n" for number in range(LARGE_BYTES // 25))
    messages: list[dict[str, Any]] = [user(text)]
    assert len(json.dumps([messages, tools])) > LARGE_BYTES
    answer = await agent.ask(path, messages=messages, tools=tools)
    assert answer.status_code == 200, answer.text[:1000]
    rendered, read = server.vllm.prompt, answer.json()
    said = read["choices"][0]["message"]["content"] if path == CHAT else read["content"]
    messages += [{"role": "assistant", "content": said}, user("And then?")]
    assert (await agent.ask(path, messages=messages, tools=tools)).status_code == 200
    assert server.vllm.was_given
    tail = len(server.vllm.prompt) - len(rendered) - SAMPLED
    assert server.vllm.prompt[:-tail] == [*rendered, *server.vllm.answers[0].ids]
    assert tail < 100


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_body_over_the_limit_is_refused_in_the_words_of_its_dialect(server: Server, path: str) -> None:
    agent = await server.agent()
    answer = await agent.ask(path, messages=[user("x" * SAMPLE_BYTES)])
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert (error["type"] if path == MESSAGES else error["code"]) == "request_too_large"
    assert f"at most {SAMPLE_BYTES} are accepted" in error["message"]


async def test_many_sessions_at_once_are_put_away_and_go_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    monkeypatch.setattr(live_sessions, "MAX_SESSIONS", KEPT)

    async def begun(number: int) -> tuple[Agent, list[dict[str, Any]]]:
        async with gate:
            agent = await server.agent()
            messages = [user(f"Begin {number}.")]
            return agent, [*messages, await agent.say(messages), user("Go on.")]

    talks = await asyncio.gather(*map(begun, range(SESSIONS)))
    lives = [live for agent, _ in talks if (live := server.live(agent)) is not None]
    assert bytes_held(lives) < SESSION_BYTES * SESSIONS
    await server.shrink()
    assert len(server.api.services.agents.live) == KEPT
    away = [(agent, messages) for agent, messages in talks if server.live(agent) is None]
    assert len(away) == SESSIONS - KEPT

    for agent, messages in away[:KEPT]:
        await agent.say(messages)
        first, second = (await agent.get("/turns"))["rows"]
        assert second["parent"] == first["id"]
        prompt = [*first["added_tokens"], *first["sampled_tokens"], *second["added_tokens"]]
        assert server.vllm.prompt == prompt

    listed = await server.http.get("/api/v1/agent_sessions", params={"limit": 200}, headers=TENANT)
    more = await server.http.get("/api/v1/agent_sessions", params={"limit": 200, "offset": 200}, headers=TENANT)
    shown = [session for page in (listed, more) for session in page.json()["sessions"]]
    assert {session["session_id"] for session in shown} == {agent.id for agent, _ in talks}
    assert sum(session["turns"] for session in shown) == SESSIONS + KEPT
    assert sum(session["sampled"] for session in shown) == SAMPLED * (SESSIONS + KEPT)


async def test_a_request_that_became_no_turn_counts_as_memory(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_sessions, "MAX_BYTES", 2 * 2**20)
    agents = [await server.agent() for _ in range(4)]
    for agent in agents:
        counted = await agent.ask(f"{MESSAGES}/count_tokens", messages=[user("x" * 2**20)])
        assert counted.status_code == 200, counted.text
    await server.shrink()
    assert [server.live(agent) is not None for agent in agents] == [False, False, False, True]


@pytest.mark.parametrize(("bound", "most"), [("MAX_BYTES", 2**20), ("MAX_SESSIONS", 1)])
async def test_sessions_with_running_turns_put_no_others_away(
    server: Server, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(live_sessions, bound, most)
    idle, *large = [await server.agent() for _ in range(3)]
    await idle.say([user("Begin.")])
    server.vllm.go_on.clear()
    waiting = [asyncio.create_task(agent.say([user("x" * 2**20)])) for agent in large]
    await until(lambda: all((live := server.live(agent)) is not None and live.running for agent in large))
    await server.shrink()
    assert server.live(idle) is not None
    server.vllm.go_on.set()
    await asyncio.gather(*waiting)
    await until(lambda: not any((live := server.live(agent)) is not None and live.running for agent in large))
    await server.shrink()
    assert server.live(idle) is None, "the turns have ended, and theirs are over the bound"


async def test_a_session_whose_turn_is_planned_is_not_put_away(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_sessions, "MAX_SESSIONS", 0)
    agent = await server.agent(limits={"tokens": 1000})
    counted = asyncio.Event()
    counts = server.vllm.upstream.controls
    counts[TOKENIZE] = after(counted, counts[TOKENIZE])
    waiting = asyncio.create_task(agent.say([user("x" * 2000)]))
    await until(lambda: any(request.path == TOKENIZE for request in server.vllm.upstream.requests))
    live = server.live(agent)
    assert live is not None
    live.used_at -= 10_000  # longer than a session may be idle
    await server.api.services.agents.live.note_running()  # as it happens every ten seconds
    await server.shrink()
    assert server.live(agent) is live
    counted.set()
    await waiting
    assert server.live(agent) is live
    assert len(live.tree) == 1
    assert (await agent.get())["end_reason"] is None
    await until(lambda: not live.is_busy)
    await server.shrink()
    assert server.live(agent) is None
