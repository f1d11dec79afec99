"""One real server (API, engine, vLLM) for all end-to-end tests, and clients of the unmodified SDK."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import psutil
import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from skyrl.base.tiny import model_path
from skyrl.base.types.weights import AdapterVersion, parse_weights
from skyrl.cli.demo.server import DemoServer
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db.database import Database
from tests.databases import rows_in, url_of
from tests.otlp_receiver import Collector, collector
from tests.postgres_server import PostgresServer
from tests.servers import SLOW_START_S, ready, seeing_server

from .browser import DESK, Browser, open_browser

RUNNING = r"num_requests_(?:running|waiting)\{.*"
COMPLETED = r'request_success_total\{.*finished_reason="length".*'
"""Requests in vLLM, and those that it has sampled to their bound: names and labels for `in_vllm`."""
ClientFactory = Callable[..., tinker.ServiceClient]
T = TypeVar("T")

ALIAS = "Qwen/Qwen3-4B-Instruct-2507"
"""A second name of the served models, for clients that know models by their hub names."""
SECOND_ALIAS = "Qwen/Qwen3.5-9B"
"""The name of a model that is only sampled from: the cookbook's own default for a teacher and an answerer."""
SEEING_ALIAS = "Qwen/Qwen3-VL-30B-A3B-Instruct"
"""Likewise of the model that sees."""


async def _wait_for(awaitable: Awaitable[T], timeout: float | None) -> T:  # noqa: ASYNC109  # as asyncio names it
    """`asyncio.wait_for` as in Python 3.12."""
    async with asyncio.timeout(timeout):
        return await awaitable


@pytest.fixture(scope="package", autouse=True)
def wait_for_keeps_cancellations() -> Iterator[None]:
    """`asyncio.wait_for` of Python 3.11 drops a cancellation that comes together with the result. The SDK's `close`
    cancels its heartbeats and its telemetry, which use `wait_for`, and then waits for their end: now and then for
    ever."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.version_info < (3, 12):
            patch.setattr(asyncio, "wait_for", _wait_for)
        yield


@pytest.fixture(scope="package")
def traces() -> Iterator[Collector]:
    """What the server traces: only requests whose callers ask for it."""
    with collector() as running:
        yield running


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, traces: Collector) -> Iterator[DemoServer]:
    names = [part for name in ("tiny", ALIAS) for part in ("--served-model-name", name)]
    directory = tmp_path_factory.mktemp("server")
    config = directory / "skyrl.toml"
    config.write_text(f'otlp_endpoint = "{traces.url}"\ntrace_ratio = 0.0\nopenai_grammars = true\n')
    with ready(DemoServer(directory, *names, "--config", str(config))) as running:
        yield running


@pytest.fixture(scope="package")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    """Its model is the tiny one that sees, in the directory `model` beside the server's state."""
    with ready(seeing_server(tmp_path_factory.mktemp("seeing"), "tiny-vision", SEEING_ALIAS, ALIAS)) as running:
        yield running


@pytest.fixture(scope="package")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """A Chromium with a desk's screen and an empty page."""
    chromium.open("about:blank")
    chromium.console()  # what it says belongs to the test before
    chromium.has_screen(DESK)
    return chromium


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return AutoTokenizer.from_pretrained(model_path())


@pytest.fixture
def connect(server: DemoServer) -> Iterator[ClientFactory]:
    """Makes service clients, each with its own session; all sessions are finished after the test."""
    clients: list[tinker.ServiceClient] = []

    def make(key: str = "tml-test") -> tinker.ServiceClient:
        client = tinker.ServiceClient(base_url=server.url, api_key=key)
        client.__enter__()
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture(scope="module")
def database(postgres: PostgresServer) -> Iterator[Database]:
    """An empty database on PostgreSQL, for several servers."""
    name = postgres.new_database()
    with closing(Database(postgres.url(name))) as opened:
        yield opened
    postgres.drop_database(name)


def cross_entropy(tokens: list[int]) -> types.Datum:
    """Next-token prediction over the whole sequence."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.asarray(tokens[1:], np.int64)),
            "weights": types.TensorData.from_numpy(np.ones(len(tokens) - 1, np.float32)),
        },
    )


def train(client: tinker.TrainingClient, data: list[types.Datum], steps: int, learning_rate: float) -> list[float]:
    """Run cross-entropy steps, submitted as a stream; returns the loss of each step."""
    pending = []
    for _ in range(steps):
        passed = client.forward_backward(data, "cross_entropy")
        pending.append((passed, client.optim_step(types.AdamParams(learning_rate=learning_rate))))
    losses = []
    for passed, stepped in pending:
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def greedy(sampler: tinker.SamplingClient, prompt: list[int], max_tokens: int = 12) -> list[int]:
    params = types.SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=[])
    answer = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result()
    return list(answer.sequences[0].tokens)


def ask(server: DemoServer, query: str, **values: Any) -> list[tuple[Any, ...]]:
    """Rows of the server's database. Parameters in the query are written `:name`."""
    return rows_in(url_of(server.state_dir), query, **values)


def adapter_of(server: DemoServer, sampler: tinker.SamplingClient) -> Path:
    """Where the server has the files of the adapter from which a client samples."""
    query = "select weights from sampling_sessions where id = :id"
    ((weights,),) = ask(server, query, id=sampler._sampling_session_id)
    adapter = parse_weights(weights)
    assert isinstance(adapter, AdapterVersion)
    return version_directory(server.state_dir, adapter)


def find_process(server: DemoServer, word: str) -> psutil.Process:
    """The server's process with `word` in its command line. Raises LookupError."""
    for process in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process has ended meanwhile
            if word in " ".join(process.cmdline()):
                return process
    raise LookupError(word)


def vllm_of(server: DemoServer) -> tuple[str, str]:
    """URL and API key of the server's vLLM."""
    vllm = find_process(server, "vllm.entrypoints.openai.api_server")
    port = vllm.cmdline()[vllm.cmdline().index("--port") + 1]
    return f"http://127.0.0.1:{port}", vllm.environ()["VLLM_API_KEY"]


def in_vllm(server: DemoServer, name: str) -> int:
    """The sum of vLLM's figures whose name and labels match."""
    url, key = vllm_of(server)
    text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"}, trust_env=False).text
    return sum(int(float(number)) for number in re.findall(rf"^vllm:{name}\}} (\S+)$", text, re.M))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SLOW_START_S
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.05)


def check_two_steps(
    trainer: tinker.TrainingClient, tokens: list[int], step: types.AdamParams, largest_gap: float
) -> None:
    """After each of two steps on the text, the sampler's logprobs of its tokens are within `largest_gap` (nats) of the
    trainer's, and the second step has moved them by much more."""
    found = []
    for _ in range(2):
        trainer.forward_backward([cross_entropy(tokens)], "cross_entropy").result()
        trainer.optim_step(step).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        sampled = np.asarray(sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:], np.float64)
        output = trainer.forward([cross_entropy(tokens)], "cross_entropy").result().loss_fn_outputs[0]
        assert np.abs(sampled - output["logprobs"].to_numpy()).max() < largest_gap
        found.append(sampled)
    assert np.abs(found[1] - found[0]).max() > max(3 * largest_gap, 0.01)
