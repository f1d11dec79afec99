"""What an operator sees of a real server: metrics that Prometheus reads, traces down to vLLM's own spans, logs without
secrets."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.cli.demo.server import DemoServer
from skyrl.runtime.tracing import SpanContext
from tests.otlp_receiver import Collector
from tests.prometheus import NEEDS_PROMETHEUS, Prometheus, board_expressions, names_in, promtool, scraping

from .conftest import ALIAS, ClientFactory, cross_entropy, greedy
from .talking_agent import TalkingAgent

pytestmark = pytest.mark.vllm

ELSEWHERE = re.compile(r"\bskyrl_(router|sidecar|middleware|radix)_")
"""Metrics of other processes than the shared server has."""
DATA_S = 120.0
"""How long Prometheus may take until everything has data; some seconds are usual."""


def reinforce(tokens: list[int]) -> types.Datum:
    """A datum with logprobs of the sampler, so that its pass has a gap."""
    length = len(tokens) - 1
    inputs = {
        "target_tokens": np.asarray(tokens[1:], np.int64),
        "logprobs": np.full(length, -5.0, np.float32),
        "advantages": np.ones(length, np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in inputs.items()},
    )


def train_and_sample(connect: ClientFactory, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the id of the model."""
    prompt = tokenizer.encode("Count from 1 by 3.")
    training = connect().create_lora_training_client("tiny", rank=4).result()
    passed = training.forward_backward([reinforce(prompt)], "importance_sampling")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-4))
    assert "kl:mean" in passed.result().metrics
    stepped.result()
    greedy(training.save_weights_and_get_sampling_client().result(), prompt)
    return training.model_id


def without_data(prometheus: Prometheus, expressions: set[str]) -> set[str]:
    return {expression for expression in expressions if not prometheus.ask(expression)}


@NEEDS_PROMETHEUS
def test_prometheus_reads_the_server_and_every_expression_has_its_metrics(
    server: DemoServer, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with scraping(server.url.removeprefix("http://"), tmp_path) as prometheus:
        model_id = train_and_sample(connect, tokenizer)
        rules = prometheus.rules()
        asked = {*board_expressions(), *(rule["name"] for rule in rules if rule["type"] == "recording")}
        expected = {expression for expression in asked if ELSEWHERE.search(expression)}
        deadline = time.monotonic() + DATA_S
        while (missing := without_data(prometheus, asked)) != expected and time.monotonic() < deadline:
            time.sleep(0.5)
        assert missing == expected, "each expression of the board parses and has data, and each recorded series"
        known = set(prometheus.get("/api/v1/label/__name__/values"))
        expressions = asked | {rule["query"] for rule in prometheus.rules()}
        named = {name for expression in expressions for name in names_in(expression) if not ELSEWHERE.match(name)}
        assert named - known == set(), "metrics that the server does not have"
        assert {rule["health"] for rule in prometheus.rules()} == {"ok"}
        assert prometheus.ask("skyrl_logprob_gap_nats_count > 0")
        assert prometheus.ask("skyrl_weights_ready_seconds_count > 0")
        assert prometheus.ask('skyrl_samples_total{outcome="ok"} > 0')
        processes = {series["metric"]["process"] for series in prometheus.ask("process_open_fds")}
        assert processes == {"api-0", "engine", "launcher"}
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    assert model_id not in text
    assert model_id.partition(":")[0] not in text
    own = re.findall(r"^(?:# (?:HELP|TYPE) )?skyrl_.*\n", text, flags=re.M)
    assert promtool("check", "metrics", given="".join(own)) == ""


def traced(server: DemoServer, caller: SpanContext) -> tinker.ServiceClient:
    return tinker.ServiceClient(
        base_url=server.url, api_key="tml-traced", default_headers_overrides={"traceparent": caller.traceparent}
    )


def test_a_sample_is_one_trace_down_to_vllms_own_span(server: DemoServer, traces: Collector) -> None:
    caller = SpanContext.new()
    with traced(server, caller) as client:
        sampler = client.create_sampling_client(base_model="tiny").result()
        prompt, params = tinker.ModelInput.from_ints([5, 6, 7]), tinker.SamplingParams(max_tokens=4)
        sampler.sample(prompt, 1, params).result()
    names = ("asample", "record", "forward", "settle", "llm_request")
    spans = traces.wait_for(*names, trace=f"{caller.trace_id:032x}")
    assert spans["llm_request"].parent == spans["forward"].span
    assert spans["forward"].parent == spans["asample"].span
    assert spans["asample"].parent == f"{caller.span_id:016x}"


def test_training_is_traced_in_the_engine(server: DemoServer, traces: Collector) -> None:
    caller = SpanContext.new()
    with traced(server, caller) as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
        trainer.forward_backward([cross_entropy([5, 6, 7, 8])], "cross_entropy").result()
    spans = traces.wait_for("forward_backward", "record", "queue", "run", trace=f"{caller.trace_id:032x}")
    assert {spans[name].service for name in spans} == {"skyrl"}


def test_a_request_that_nobody_asks_to_trace_leaves_no_span(
    server: DemoServer, traces: Collector, connect: ClientFactory
) -> None:
    before = {span.trace for span in traces.spans}
    sampler = connect().create_sampling_client(base_model="tiny").result()
    prompt, params = tinker.ModelInput.from_ints([5, 6, 7]), tinker.SamplingParams(max_tokens=4)
    sampler.sample(prompt, 1, params).result()
    caller = SpanContext.new()
    with httpx.Client(base_url=server.url, headers={"X-API-Key": "k", "traceparent": caller.traceparent}) as http:
        http.post("/api/v1/create_session", json={}).raise_for_status()
    traces.wait_for("create_session", trace=f"{caller.trace_id:032x}")
    assert {span.trace for span in traces.spans} - before == {f"{caller.trace_id:032x}"}


KEY = "tml-sight"
OLDEST_S = 5.0
"""How old a scrape's numbers may be: those of the tests before must be in it."""
SHOWN_S = 300.0
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


MARKER = "zebras cross the quiet river"
TOKENS = [401, 402, 403, 404]


def test_nothing_secret_is_logged(
    server: DemoServer, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    key = f"tml-very-secret-{secrets.token_hex(16)}"
    client = connect(key)
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    trainer.forward_backward([cross_entropy(TOKENS)], "cross_entropy").result()
    path = trainer.save_weights_for_sampler("secret-logs").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    params = tinker.SamplingParams(max_tokens=8, temperature=0.0)
    sampler.sample(tinker.ModelInput.from_ints(TOKENS), 1, params).result()
    with contextlib.suppress(Exception):  # a pass whose content is wrong fails when its turn comes
        trainer.forward_backward([cross_entropy(TOKENS)], "no_such_loss").result()  # type: ignore[arg-type]
    headers = {"X-API-Key": key, "X-Request-Id": "find-me-in-the-logs"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as http:
        checkpoint = f"/api/v1/training_runs/{path.split('/')[2]}/checkpoints/{'/'.join(path.split('/')[3:])}"
        link = http.get(f"{checkpoint}/archive", follow_redirects=False).headers["location"]
        assert http.get(link).status_code == 200
        assert http.get(link.replace("signature=", "signature=0")).status_code == 403
        said = http.post("/v1/completions", json={"model": ALIAS, "prompt": MARKER, "max_tokens": 8, "temperature": 0})
        assert said.status_code == 200, said.text
        for body in (
            {"model": ALIAS, "prompt": MARKER, "max_tokens": -1},
            {"model": ALIAS, "prompt": {"text": MARKER}},
        ):
            assert http.post("/v1/completions", json=body).status_code == 400
        assert http.post("/api/v1/asample", content=f'{{"prompt": "{MARKER}'.encode()).status_code == 400
        assert http.post("/api/v1/asample", json={"sampling_session_id": 5, "prompt": MARKER}).status_code == 400
    sampled = said.json()["choices"][0]["text"]
    logs = {file.name: file.read_text(errors="replace") for file in (server.state_dir / "logs").iterdir()}
    logs["serve.log"] = (server.state_dir / "serve.log").read_text(errors="replace")
    assert "find-me-in-the-logs" in logs["api.log"], "refusals are logged, with their ids"
    signature = link.partition("signature=")[2].partition("&")[0]
    assert len(signature) > 20
    for name, text in logs.items():
        for secret in (key, key[4:24], signature, MARKER, sampled if len(sampled) > 8 else MARKER):
            assert secret not in text, name
        assert not re.search(r"401,\s*402,\s*403", text), f"{name}: the prompt's tokens"
