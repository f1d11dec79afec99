"""Agent sessions at a server with two API processes on PostgreSQL: an agent's requests go to either, as its connections
happen to. The gateway samples from the shared server's vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import openai
import psutil
import pytest

from skyrl.cli.demo.server import DemoServer
from skyrl.storage.db.database import Database

from .conftest import COMPLETED, RUNNING, in_vllm, until, vllm_of
from .mortal_server import WAIT_S, MortalServer, running

pytestmark = pytest.mark.vllm

TASK: list[Any] = [{"role": "user", "content": "Who watches the river?"}]
LONG: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
TENANT = {"X-API-Key": "tml-a"}
RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture(scope="module")
def gateway(server: DemoServer, database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalServer]:
    directory = tmp_path_factory.mktemp("gateway")
    url, key = vllm_of(server)
    (directory / "skyrl.toml").write_text(
        f'backend = "none"\nbase_model = "tiny"\napi_processes = 2\ndatabase_url = "{database.url}"\n'
        f'external_inference_url = "{url}"\nexternal_inference_api_key = "{key}"\n'
    )
    gateway = MortalServer(directory / "state", "--config", str(directory / "skyrl.toml"))
    with running(gateway):
        yield gateway


class Agent:
    """A session, and a program of it whose only connection leads to one API process."""

    def __init__(self, http: httpx2.Client, made: dict[str, Any]) -> None:
        self._http = http
        self._path = f"/api/v1/agent_sessions/{made['session_id']}"
        client = openai.OpenAI(
            base_url=str(http.base_url.join("/v1")),
            api_key=made["key"],
            http_client=http,
            max_retries=0,
            timeout=WAIT_S,
        )
        self.completions: Any = client.chat.completions

    def answer(self, messages: list[Any], **more: Any) -> str:
        answer = self.completions.create(model="any", messages=messages, **{"max_tokens": 6} | more)
        return answer.choices[0].message.content

    def stream(self, messages: list[Any], **more: Any) -> Any:
        return self.completions.create(model="any", messages=messages, stream=True, **more)

    def refused(self, messages: list[Any]) -> str | None:
        """The code of the refusal."""
        with pytest.raises(openai.PermissionDeniedError) as refusal:
            self.answer(messages)
        return refusal.value.code

    def get(self, path: str = "", **query: Any) -> dict[str, Any]:
        answer = self._http.get(f"{self._path}{path}", params=query, headers=TENANT)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def turns(self) -> list[dict[str, Any]]:
        return self.get("/turns")["rows"]

    def end(self) -> None:
        assert self._http.post(f"{self._path}/end", headers=TENANT).status_code == 200


@pytest.fixture
def connections(gateway: MortalServer) -> Iterator[list[httpx2.Client]]:
    """A connection to each API process, in the order of `gateway.apis`. While one is made, the other process is stopped
    and accepts none."""
    first, second = gateway.apis(2)
    with ExitStack() as held:
        made: list[httpx2.Client] = []
        for other in (second, first):
            limits = httpx2.Limits(max_connections=1, keepalive_expiry=None)
            http = httpx2.Client(base_url=gateway.url, trust_env=False, timeout=WAIT_S, limits=limits)
            made.append(held.enter_context(http))
            with stopped(other):
                assert http.get("/statusz").status_code == 200
        assert len({http.get("/statusz").json()["api_process"] for http in made}) == 2
        yield made


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def session(connections: list[httpx2.Client], **options: Any) -> list[Agent]:
    """A new session, as seen at each API process; the first process has made it."""
    answer = connections[0].post("/api/v1/agent_sessions", json={"model": "tiny", **options}, headers=TENANT)
    assert answer.status_code == 200, answer.text
    return [Agent(http, answer.json()) for http in connections]


def goes_on(messages: list[Any], said: str, text: str = "And then?") -> list[Any]:
    return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": text}]


def added_and_sampled(turns: list[dict[str, Any]]) -> int:
    return sum(len(turn["added_tokens"]) + len(turn["sampled_tokens"]) for turn in turns)


def test_each_turn_continues_the_turn_before_it_whichever_process_had_that(connections: list[httpx2.Client]) -> None:
    agents = session(connections)
    messages = TASK
    for number in range(4):
        messages = goes_on(messages, agents[number % 2].answer(messages, temperature=1.0))
    turns, others = (agent.turns() for agent in agents)
    assert turns == others
    assert [turn["parent"] for turn in turns] == [None, *(turn["id"] for turn in turns[:3])]
    assert [turn["fork"] for turn in turns] == [None] * 4
    rows, others = (agent.get("/trajectory", format="samples")["rows"] for agent in agents)
    assert rows == others
    (row,) = rows
    whole = [tokens for turn in turns for tokens in (turn["added_tokens"], turn["sampled_tokens"])]
    assert row["tokens"] == [token for tokens in whole for token in tokens]
    assert sum(row["loss_mask"]) == sum(len(turn["sampled_tokens"]) for turn in turns)


def test_of_two_equal_streams_one_fails_and_its_retry_gets_the_turn(
    gateway: MortalServer, connections: list[httpx2.Client]
) -> None:
    agents, streams = streams_at_the_same_time(gateway, connections)
    failures = [failure_of(stream) for stream in streams]
    (failure,) = [each for each in failures if each is not None]
    assert "another process has answered this request" in failure
    loser = agents[failures.index(failure)]
    (turn,) = loser.turns()
    assert loser.answer(TASK, **LONG, extra_headers=RETRY) == turn["answer"]["content"]
    assert len(loser.turns()) == 1


def streams_at_the_same_time(
    gateway: MortalServer, connections: list[httpx2.Client]
) -> tuple[list[Agent], tuple[Any, Any]]:
    """A session, and two streams of one request: neither has its turn when the other one begins."""
    for _ in range(10):
        agents = session(connections)
        first = agents[0].stream(TASK, **LONG)
        next(first)
        with stopped(gateway.apis(2)[0]):
            if agents[1].turns():  # on a busy machine the first stream may have ended before its process was stopped
                continue
            second = agents[1].stream(TASK, **LONG)
            next(second)
        return agents, (first, second)
    raise AssertionError("the first stream ended each time before the second one began")


def failure_of(stream: Any) -> str | None:
    """Read a stream to its end."""
    try:
        list(stream)
    except openai.APIError as error:
        return str(error)
    return None


def test_a_repeat_at_the_other_process_after_a_broken_connection_adds_no_turn(connections: list[httpx2.Client]) -> None:
    first, second = session(connections)
    stream = first.stream(TASK, **LONG)
    next(stream)
    stream.close()
    chunks = list(second.stream(TASK, **LONG, extra_headers=RETRY))
    repeated = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    (turn,) = second.turns()
    assert turn["answer"]["content"] == repeated
    assert len(turn["sampled_tokens"]) == LONG["max_tokens"]
    time.sleep(0.5)  # the turn whose reader left goes on to its end, and is not stored after the other
    assert second.turns() == [turn]
    assert second.answer(TASK, **LONG, extra_headers=RETRY) == repeated


def test_limits_hold_over_both_processes(connections: list[httpx2.Client]) -> None:
    agents = session(connections, limits={"turns": 3})
    messages = TASK
    for number in range(3):
        messages = goes_on(messages, agents[number % 2].answer(messages))
    assert [agent.refused(messages) for agent in agents] == ["agent_session_ended"] * 2
    assert [agent.get()["end_reason"] for agent in agents] == ["turns"] * 2

    agents = session(connections, limits={"tokens": 60})
    messages = goes_on(TASK, agents[0].answer(TASK, max_tokens=10, extra_body={"ignore_eos": True}))
    messages = goes_on(messages, agents[1].answer(messages, **LONG))
    assert added_and_sampled(agents[0].turns()) == 60
    assert [agent.refused(messages) for agent in agents] == ["agent_session_ended"] * 2
    assert [agent.get()["end_reason"] for agent in agents] == ["tokens"] * 2


def test_the_end_at_one_process_stops_a_turn_that_runs_at_the_other(
    server: DemoServer, connections: list[httpx2.Client]
) -> None:
    until(lambda: in_vllm(server, RUNNING) == 0)
    completed = in_vllm(server, COMPLETED)
    first, second = session(connections)
    stream = second.stream(TASK, max_tokens=2000, temperature=1.0, extra_body={"ignore_eos": True})
    next(stream)
    first.end()
    failure = failure_of(stream)
    assert failure is not None
    assert "this agent session has ended" in failure
    until(lambda: in_vllm(server, RUNNING) == 0)
    assert in_vllm(server, COMPLETED) == completed
    assert first.turns() == second.turns() == []
