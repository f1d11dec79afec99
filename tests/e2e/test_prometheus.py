"""A real Prometheus reads a server that has trained and sampled. Then every expression of board and rules is asked.

The shared server has no router, no sidecar and no middleware, so their metrics are not there; `test_router_metrics` and
the tests on the plane show them.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import numpy as np
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.cli.demo.server import DemoServer
from tests.e2e.conftest import ClientFactory, greedy
from tests.prometheus import NEEDS_PROMETHEUS, Prometheus, board_expressions, names_in, promtool, scraping

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
