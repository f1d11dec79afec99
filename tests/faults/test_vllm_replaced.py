"""vLLM hangs or dies while two tenants work: vLLM is replaced, and each tenant's samples come from its own weights.

The tests share one server with short bounds for hangs, also with test_agent_durability.py. They run in the order of
this file; the last test stops the server.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import psutil
import pytest
import tinker
from tinker import types

from skyrl.cli.demo.server import DemoServer
from tests.e2e.conftest import ask, cross_entropy, find_process, train, vllm_of
from tests.e2e.load import client_that_outlives
from tests.e2e.mortal_server import MortalServer

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7, 8]
SHORT, LONG = 12, 700
DRAINED = 100
"""A number of tokens that can be sampled within the grace period of a stop."""
API_SERVER, ENGINE = "vllm.entrypoints.openai.api_server", "EngineCore"


@dataclass
class Tenant:
    """A client with its own weights, and the tokens that they give."""

    sampler: tinker.SamplingClient
    tokens: list[int]
    logprobs: list[float]

    def sample(self, length: int) -> types.SampledSequence:
        return _sample(self.sampler, length)

    def assert_own_weights(self, sample: types.SampledSequence) -> None:
        assert sample.tokens[:SHORT] == self.tokens
        assert sample.logprobs is not None
        assert sample.logprobs[:SHORT] == pytest.approx(self.logprobs, abs=1e-4)


def _sample(sampler: tinker.SamplingClient, length: int) -> types.SampledSequence:
    params = types.SamplingParams(max_tokens=length, temperature=0.0, stop=[])
    return sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences[0]


@pytest.fixture(scope="module")
def tenants(server: DemoServer) -> Iterator[list[Tenant]]:
    """Two tenants that have trained different texts."""
    found = []
    with ExitStack() as stack:
        for name, first in (("tml-one", 20), ("tml-two", 90)):
            client = stack.enter_context(client_that_outlives(server.url, name))
            trainer = client.create_lora_training_client(base_model="tiny", rank=8, seed=first).result()
            train(trainer, [cross_entropy(PROMPT + list(range(first, first + 20)))], 6, 2e-2)
            sampler = trainer.save_weights_and_get_sampling_client().result()
            sample_of_tenant = _sample(sampler, SHORT)
            assert sample_of_tenant.logprobs is not None
            found.append(Tenant(sampler, list(sample_of_tenant.tokens), list(sample_of_tenant.logprobs)))
        assert found[0].logprobs != pytest.approx(found[1].logprobs, abs=0.1)
        yield found


@pytest.mark.parametrize(
    ("victim", "signal_number"),
    [
        pytest.param(ENGINE, signal.SIGSTOP, id="the engine hangs", marks=pytest.mark.slow),
        pytest.param(API_SERVER, signal.SIGSTOP, id="the API server hangs", marks=pytest.mark.slow),
        pytest.param(API_SERVER, signal.SIGKILL, id="killed", marks=pytest.mark.slow),
    ],
)
def test_each_tenant_gets_its_own_weights_from_the_next_vllm(
    server: DemoServer, tenants: list[Tenant], victim: str, signal_number: signal.Signals
) -> None:
    leader = find_process(server, API_SERVER)
    old = [leader, *leader.children(recursive=True)]
    generation = server.status()["inference_generation"]
    with ThreadPoolExecutor(8) as pool:
        in_flight = [pool.submit(tenant.sample, LONG) for tenant in tenants for _ in range(2)]
        while server.status()["samples"]["in_flight"] < len(in_flight):
            time.sleep(0.01)
        os.kill(find_process(server, victim).pid, signal_number)
        later = [pool.submit(tenant.sample, SHORT) for tenant in tenants for _ in range(2)]
        for number, (before, after) in enumerate(zip(in_flight, later, strict=True)):
            assert len(before.result().tokens) == LONG
            tenants[number // 2].assert_own_weights(before.result())
            tenants[number // 2].assert_own_weights(after.result())
    assert not [process for process in old if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert server.status()["inference_generation"] > generation, "the URL was withdrawn and published again"


@pytest.mark.slow
def test_a_version_just_saved_outlives_trainer_and_vllm(server: MortalServer) -> None:
    """Its files may still be in memory alone when both are killed."""
    with client_that_outlives(server.url, "tml-held") as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=8, seed=4).result()
        train(trainer, [cross_entropy(PROMPT + list(range(60, 80)))], 2, 2e-2)
        sampler = trainer.save_weights_and_get_sampling_client().result()
        server.engine().kill()
        find_process(server, API_SERVER).kill()
        sample = _sample(sampler, SHORT)
        scored = trainer.forward([cross_entropy([*PROMPT, *sample.tokens])], "cross_entropy").result()
        own = scored.loss_fn_outputs[0]["logprobs"].tolist()[len(PROMPT) - 1 :]
        assert sample.logprobs == pytest.approx(own, abs=1e-3)
    adapters = [path for path in (server.state_dir / "adapters").glob("*/*/*") if path.is_symlink()]
    assert adapters == [], "the next trainer has brought them to the disk"


def test_a_killed_api_process_loses_no_sample_and_no_command(server: DemoServer, tenants: list[Tenant]) -> None:
    """The SDK, the trainer and vLLM are at work. The losses show that each command ran once, in order."""
    data = [cross_entropy(PROMPT + list(range(40, 60)))]
    steps = 12
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-trains")
    with ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        stack.callback(
            client.close, "success"
        )  # nobody waits for it: once, after the kill, the SDK's close did not end
        twin = client.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
        undisturbed = train(twin, data, steps, 1e-2)
        trainer = client.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
        samples = [pool.submit(tenant.sample, LONG) for tenant in tenants]
        while server.status()["samples"]["in_flight"] < len(samples):
            time.sleep(0.01)
        training = pool.submit(train, trainer, data, steps, 1e-2)
        while server.status()["requests_pending"] <= len(samples) and not training.done():
            time.sleep(0.01)
        find_process(server, "skyrl.api.server").kill()
        assert training.result() == undisturbed
        for tenant, sample in zip(tenants, samples, strict=True):
            assert len(sample.result().tokens) == LONG
            tenant.assert_own_weights(sample.result())


def test_the_server_listens_on_loopback_only(server: DemoServer) -> None:
    """Sockets with a path lie in the private directory."""
    private = (server.state_dir / "run").resolve()
    assert private.stat().st_mode & 0o777 == 0o700
    paths, addresses = set(), set()
    for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]:
        for connection in process.net_connections("all"):
            if isinstance(connection.laddr, str):
                paths.add(connection.laddr)
            elif connection.status == psutil.CONN_LISTEN or connection.type != 1:
                addresses.add(connection.laddr.ip)
    assert addresses == {"127.0.0.1"}
    assert {os.path.dirname(path) for path in paths if path} == {str(private)}


def test_every_route_of_vllm_requires_the_key(server: DemoServer) -> None:
    """The key exists only in the memory of the server's own processes and in the private directory."""
    url, key = vllm_of(server)
    assert key not in " ".join(find_process(server, API_SERVER).cmdline())
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as anybody:
        document = anybody.get("/openapi.json", headers={"Authorization": f"Bearer {key}"}).json()
        routes = [(method, path) for path, methods in document["paths"].items() for method in methods]
        assert {("post", "/pause"), ("post", "/sleep"), ("post", "/collective_rpc")} <= set(routes)
        for method, path in routes:
            for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {key[:-1]}"}):
                assert anybody.request(method, path, headers=wrong).status_code == 401, (method, path)


def test_a_stopped_server_lets_a_running_sample_end_and_leaves_nothing(
    server: DemoServer, tenants: list[Tenant]
) -> None:
    """The server gets SIGTERM while a sample runs: the client gets the result, and nothing is left behind."""
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    with ThreadPoolExecutor(1) as pool:
        sample = pool.submit(tenants[0].sample, DRAINED)
        while not server.status()["samples"]["in_flight"]:
            if sample.done():  # the sample ended before the test saw it run
                sample = pool.submit(tenants[0].sample, DRAINED)
            time.sleep(0.01)
        os.kill(server.pid, signal.SIGTERM)
        assert len(sample.result().tokens) == DRAINED
    _, alive = psutil.wait_procs(family, timeout=300)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    with pytest.raises(httpx.TransportError):
        server.status()
    assert ask(server, "select count(*) from futures where status = 'pending'") == [(0,)]
