"""What an operator sees of agents on the real server: counters on `/metrics`, and a trace down to vLLM's own span."""

from __future__ import annotations

import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from skyrl.cli.demo.server import DemoServer
from skyrl.runtime.tracing import SpanContext
from tests.otlp_receiver import Collector

from .talking_agent import TalkingAgent

pytestmark = pytest.mark.vllm

KEY = "tml-sight"
OLDEST_S = 5.0
"""How old a scrape's numbers may be: those of the tests before must be in it."""
SHOWN_S = 20.0
"""Metrics are at most 4 s old; a full machine may take longer."""


def counted(server: DemoServer) -> dict[str, float]:
    """The counters of agents, by name and labels."""
    text = httpx.get(f"{server.url}/metrics", timeout=60, trust_env=False).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("skyrl_agent_") and not sample.name.endswith(("_bucket", "_created")):
                labels = [value for name, value in sorted(sample.labels.items()) if name != "process"]
                found[" ".join([sample.name.removeprefix("skyrl_agent_"), *labels])] = sample.value
    return found


def test_turns_forks_and_tokens_of_agents_are_on_metrics(server: DemoServer) -> None:
    time.sleep(OLDEST_S)
    before = counted(server)
    agent = TalkingAgent.begin(server, KEY)
    agent.says("Who watches the river?")
    for text in ("Go on.", "Something else."):
        del agent.messages[2:]
        agent.says(text)
    del agent.messages[1:]
    assert agent.ask("messages", max_tokens=4).status_code == 200
    expected = {
        "turns_total chat ok": 3.0,
        "turns_total messages ok": 1.0,
        "forks_total branch": 2.0,
        "own_seconds_count": 4.0,
    }
    deadline = time.monotonic() + SHOWN_S
    grown: dict[str, float] = {}
    while time.monotonic() < deadline and not expected.items() <= grown.items():
        time.sleep(0.5)
        grown = {name: value - before.get(name, 0.0) for name, value in counted(server).items()}
    assert expected.items() <= grown.items(), grown
    assert grown["sessions"] >= 1
    assert grown["tokens_total sampled"] > 0
    assert grown["tokens_total added"] < grown["tokens_total prompt"], "a turn adds the tail to what was there"


def test_a_turn_is_one_trace_down_to_vllms_own_span(server: DemoServer, traces: Collector) -> None:
    agent = TalkingAgent.begin(server, KEY)
    for stream in (False, True):
        caller = SpanContext.new()
        agent.messages = [{"role": "user", "content": f"Is this a stream: {stream}?"}]
        assert agent.ask(headers={"traceparent": caller.traceparent}, stream=stream).status_code == 200
        names = ("completions", "turn", "forward", "llm_request", *(["stream"] if stream else []))
        spans = traces.wait_for(*names, trace=f"{caller.trace_id:032x}")
        assert spans["turn"].parent == spans["completions"].span
        assert {spans[name].parent for name in names[2:] if name != "llm_request"} == {spans["turn"].span}
        assert spans["llm_request"].parent == spans["forward"].span
        about = spans["turn"].attributes
        assert (about["skyrl.agent_session_id"], about["skyrl.dialect"]) == (agent.id, "chat")
        assert about["skyrl.added_tokens"] == about["skyrl.prompt_tokens"] > 0
        assert 0 < about["skyrl.sampled_tokens"] <= 8
        assert about["skyrl.own_s"] > 0
