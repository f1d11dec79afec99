"""Two replicas behind the router: adapters are on both, and neither the death nor the standstill of a replica or of the
router costs a client more than time.

The tests share one server and run in the order of this file; the last test stops the server.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import psutil
import pytest
import tinker
from openai import OpenAI

from skyrl.cli.demo.server import DemoServer
from skyrl.router.admin import ADMIN_METHODS
from tests.servers import SLOW_START_S, ready

from .conftest import cross_entropy, find_process, train, until
from .load import PROMPT, Load, client_that_outlives, sample, start_load

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SHORT, LONG = 12, 400
ROUTER = "skyrl.router.main"
CLIENTS = 12
"""Sampling sessions. Their samples of the base model go to either replica; all on one is a chance of 1 in 2,048."""


@dataclass
class Replicas:
    """The replicas and the router of a server, as its runtime file names them."""

    server: DemoServer
    router: str
    urls: list[str]
    http: httpx.Client

    def workers(self) -> dict[str, dict[str, Any]]:
        """The router's workers by URL; none while the router does not answer."""
        try:
            return {worker["url"]: worker for worker in self.http.get(f"{self.router}/statusz").json()["workers"]}
        except httpx.TransportError:
            return {}

    def used(self) -> list[str]:
        return [url for url, worker in self.workers().items() if worker["state"] == "healthy"]

    def process(self, url: str) -> psutil.Process:
        return find_process(self.server, f"--port {url.rpartition(':')[2]}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    with ready(
        DemoServer(tmp_path_factory.mktemp("replicas"), backend_config={"generator.inference_engine.num_engines": 2})
    ) as running:
        yield running


@pytest.fixture(scope="module")
def replicas(server: DemoServer) -> Iterator[Replicas]:
    (runtime,) = json.loads((server.state_dir / "run" / "runtime.json").read_text())["each"]
    headers = {"Authorization": f"Bearer {runtime['inference_api_key']}"}
    with httpx.Client(headers=headers, timeout=300, trust_env=False) as http:
        found = Replicas(server, runtime["inference_url"], runtime["replica_urls"], http)
        until(lambda: len(found.used()) == 2)
        yield found


@pytest.fixture(scope="module")
def samplers(server: DemoServer) -> Iterator[list[tinker.SamplingClient]]:
    with client_that_outlives(server.url, "tml-replicas") as client:
        made = [client.create_sampling_client(base_model="tiny") for _ in range(CLIENTS)]
        yield [sampler.result() for sampler in made]


def start(pool: ThreadPoolExecutor, samplers: list[tinker.SamplingClient], replicas: Replicas) -> Load:
    """Return when both replicas sample."""
    return start_load(pool, samplers, lambda: [*replicas.workers().values()], LONG)


def test_an_adapter_is_on_both_replicas_after_its_save_and_answers_openai_clients(
    server: DemoServer, replicas: Replicas
) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-trains") as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
        losses = train(trainer, [cross_entropy(PROMPT + list(range(20, 40)))], 4, 2e-2)
        assert losses[-1] < losses[0]
        sampler = trainer.save_weights_and_get_sampling_client().result()
        tokens = list(sample(sampler, SHORT))
        body = {"prompt": PROMPT, "max_tokens": SHORT, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        for url in replicas.urls:
            known = [model["id"] for model in replicas.http.get(f"{url}/v1/models").json()["data"]]
            adapters = [name for name in known if "@" in name]
            assert len(adapters) == 1
            answer = replicas.http.post(f"{url}/v1/completions", json=body | {"model": adapters[0]}).json()
            assert answer["choices"][0]["token_ids"] == tokens
        path = trainer.save_weights_for_sampler(name="saved").result().path
        with OpenAI(base_url=f"{server.url}/v1", api_key="tml-trains", max_retries=0) as openai:
            asked: dict[str, Any] = {"model": path, "prompt": PROMPT, "max_tokens": SHORT, "temperature": 0}
            ids = {"return_token_ids": True, "ignore_eos": True}
            events: Any = openai.completions.create(**asked, stream=True, extra_body=ids)
            assert [token for event in events for token in event.choices[0].token_ids] == tokens
            answer: Any = openai.completions.create(**asked, extra_body=ids)
            assert answer.choices[0].token_ids == tokens
    until(lambda: server.status()["replicas"] == {"in_use": 2, "of": 2})


def test_nobody_but_the_server_changes_weights(replicas: Replicas, server: DemoServer) -> None:
    """A stranger and a tenant get nothing from the router and vLLM; the API has no such routes."""
    tenant = {"Authorization": "Bearer tml-tenant", "X-API-Key": "tml-tenant"}
    for path in sorted(ADMIN_METHODS):
        for headers in ({}, tenant):
            for url in (replicas.router, *replicas.urls):
                assert httpx.post(url + path, json={}, headers=headers, trust_env=False).status_code == 401
        assert httpx.post(server.url + path, json={}, headers=tenant, trust_env=False).status_code == 404
    for url in replicas.urls:
        worker = f"{replicas.router}/workers/{quote(url, safe='')}"
        assert httpx.put(worker, json={"disabled": True}, headers=tenant, trust_env=False).status_code == 401


def test_the_router_and_vllm_refuse_a_request_without_the_key(replicas: Replicas) -> None:
    for url in (replicas.router, *replicas.urls):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT}, trust_env=False)
        assert answer.status_code == 401
    assert httpx.get(f"{replicas.router}/statusz", trust_env=False).status_code == 401


def test_a_replica_that_stands_still_delays_only_its_own_samples(
    replicas: Replicas, samplers: list[tinker.SamplingClient]
) -> None:
    url = replicas.urls[0]
    process = replicas.process(url)
    with ThreadPoolExecutor(CLIENTS) as pool:
        load = start(pool, samplers, replicas)
        process.suspend()
        try:
            until(lambda: replicas.used() == [replicas.urls[1]])
            for sampler in samplers:
                assert len(sample(sampler, SHORT)) == SHORT
        finally:
            process.resume()
        load.assert_well()
    until(lambda: len(replicas.used()) == 2)


def test_a_killed_replica_costs_no_sample_and_is_used_again(
    replicas: Replicas, samplers: list[tinker.SamplingClient]
) -> None:
    url = replicas.urls[0]
    with ThreadPoolExecutor(CLIENTS) as pool:
        load = start(pool, samplers, replicas)
        replicas.process(url).kill()
        load.assert_well()
    until(lambda: len(replicas.used()) == 2)
    served = replicas.workers()[url]["served"]

    def serves_again() -> bool:  # a busy machine may keep its answer to a health check too long
        for sampler in samplers:
            sample(sampler, SHORT)
        return replicas.workers()[url]["served"] > served

    until(serves_again)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_router_that_is_gone_costs_no_sample(
    server: DemoServer, replicas: Replicas, samplers: list[tinker.SamplingClient], signal_number: signal.Signals
) -> None:
    router = find_process(server, ROUTER)
    with ThreadPoolExecutor(2 * CLIENTS) as pool:
        load = start(pool, samplers, replicas)
        router.send_signal(signal_number)
        later = [pool.submit(sample, sampler, SHORT) for sampler in samplers]
        assert {len(each.result()) for each in later} == {SHORT}
        load.assert_well()
    assert find_process(server, ROUTER).pid != router.pid
    until(lambda: len(replicas.used()) == 2)


def test_a_stop_leaves_nothing(server: DemoServer, replicas: Replicas) -> None:
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    server.stop()
    _, alive = psutil.wait_procs(processes, timeout=SLOW_START_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert not (server.state_dir / "run").is_symlink()
    log = (server.state_dir / "serve.log").read_text()
    assert "stopped" in log
    assert "Traceback" not in log
