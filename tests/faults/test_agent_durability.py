"""An agent session while its server dies in parts: kill -9 of the API, of the engine and of vLLM between and within
turns. The client does what SDKs do: it sends an interrupted request again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from skyrl.cli.demo.server import DemoServer
from tests.e2e.conftest import find_process
from tests.e2e.mortal_server import WAIT_S, MortalServer

pytestmark = pytest.mark.vllm

RETRY = {"x-stainless-retry-count": "1"}
LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 1.0}


class Agent:
    """A session of its own, and a client that insists."""

    def __init__(self, server: DemoServer) -> None:
        self.url = server.url
        self.tenant = httpx.Client(
            base_url=f"{server.url}/api/v1", headers={"X-API-Key": "tml-a"}, trust_env=False, timeout=WAIT_S
        )
        made = self.tenant.post("/agent_sessions", json={"model": "tiny"}).json()
        self.id, self.key = made["session_id"], made["key"]

    def ask(self, messages: list[Any], **more: Any) -> dict[str, Any]:
        """The answer's message. A request that was interrupted is sent again."""
        deadline, headers = time.monotonic() + WAIT_S, {"X-API-Key": self.key}
        while True:
            assert time.monotonic() < deadline, "the server did not come back in time"
            try:
                body = {"model": "any", "messages": messages, "max_tokens": 5, **more}
                answer = httpx.post(
                    f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S, trust_env=False
                )
                if answer.status_code == 200:
                    return answer.json()["choices"][0]["message"]
                assert answer.status_code >= 500, answer.text
            except httpx.TransportError:
                pass
            headers |= RETRY
            time.sleep(0.1)

    def turns(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                return self.tenant.get(f"/agent_sessions/{self.id}/turns").json()["rows"]
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.1)


def vllm_of(server: DemoServer) -> psutil.Process:
    return find_process(server, "vllm.entrypoints.openai.api_server")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chained(turns: list[dict[str, Any]]) -> bool:
    """Whether each turn continues the one before it."""
    return all(turn["parent"] == before["id"] for before, turn in zip(turns, turns[1:], strict=False))


@pytest.mark.slow
def test_a_session_goes_on_after_each_part_was_killed(server: MortalServer) -> None:
    agent = Agent(server)
    messages = [user("Who watches the river?")]
    for kill in (server.kill_api, server.engine().kill, vllm_of(server).kill):
        messages += [agent.ask(messages), user("And then?")]
        kill()
    agent.ask(messages)
    turns = agent.turns()
    assert len(turns) == 4
    assert chained(turns)
    assert [turn["fork"] for turn in turns] == [None] * 4


@pytest.mark.parametrize("part", ["api", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_turn_that_was_interrupted_is_there_once(server: MortalServer, part: str) -> None:
    agent = Agent(server)
    messages = [user("Who watches the river?")]
    messages += [agent.ask(messages), user("Tell me all.")]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(agent.ask, messages, **LONG)
        time.sleep(0.3)
        server.kill_api() if part == "api" else vllm_of(server).kill()
        answer = asked.result(WAIT_S)
    turns = agent.turns()
    assert len(turns) == 2
    assert chained(turns)
    assert turns[1]["answer"]["content"] == answer["content"]
    assert len(turns[1]["sampled_tokens"]) == LONG["max_tokens"]


def test_a_stored_turn_is_given_again_after_a_kill(server: MortalServer) -> None:
    agent = Agent(server)
    messages = [user("Who watches the river?")]
    first = agent.ask(messages, temperature=1.0, max_tokens=20)
    server.kill_api()
    assert agent.ask(messages, temperature=1.0, max_tokens=20)["content"] == first["content"]
    assert len(agent.turns()) == 1
