"""How clients leave: they finish, fall silent, or are killed between two chunks. The server frees their rows, models
and adapters in the database, the trainer and vLLM, and other clients notice nothing.

The server takes at most 24 samples. Its sessions expire after 20 s of silence (the SDK beats every 10 s). All clients
start at once, so that the tests wait for their ends together; the tests run in the order of this file.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from skyrl.cli.demo.server import DemoServer

from ..conftest import ask, cross_entropy, greedy, train, until, vllm_of
from ..fault_proxy import Call, FaultProxy, Gate, busy, edited
from .conftest import SESSION_TIMEOUT_S

pytestmark = pytest.mark.vllm

KEY, OTHER_KEY = "tml-leaving", "tml-staying"
PROMPT = [5, 6, 7, 8]
CLOSE_S = 120.0
DATA = [cross_entropy([20 + step for step in range(9)])]


@dataclass
class ClientSession:
    """A client's session with one model, trained for one step, and one unnamed save for sampling."""

    session: str
    model: str

    @property
    def adapter(self) -> str:
        """The name of the save in vLLM."""
        return f"{self.model}@1"

    def files(self, server: DemoServer) -> list[Path]:
        """The directory of the save, if it exists."""
        return list((server.state_dir / "adapters").glob(f"{self.model.replace(':', '*')}/v000001"))


class LocalClient(ClientSession):
    """A client in this process."""

    def __init__(self, url: str, key: str) -> None:
        self.client = tinker.ServiceClient(base_url=url, api_key=key)
        self.trainer = self.client.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
        train(self.trainer, DATA, 1, 1e-3)
        self.sampler = self.trainer.save_weights_and_get_sampling_client().result()
        self.first_tokens = greedy(self.sampler, PROMPT, 4)
        super().__init__(self.client.holder.get_session_id(), self.trainer.model_id)

    def close(self) -> None:
        self.client.close("success").result(timeout=CLOSE_S)


def run_client_until_killed(url: str, connection: Connection) -> None:
    """A client in a separate process, which the test kills during its second pass."""
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
    train(trainer, DATA, 1, 1e-3)
    greedy(trainer.save_weights_and_get_sampling_client().result(), PROMPT, 4)
    connection.send((client.holder.get_session_id(), trainer.model_id))
    passed = trainer.forward_backward(DATA * 6, "cross_entropy")
    trainer.optim_step(types.AdamParams()).result()
    passed.result()


class SteadyTenant:
    """Another tenant, who trains from the first test to the last."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.losses: list[float] = []
        """The losses of all steps so far."""
        self._training: Future[None] = self._pool.submit(self._train)

    def _train(self) -> None:
        with tinker.ServiceClient(base_url=self._url, api_key=OTHER_KEY) as client:
            trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=9).result()
            while not self._stop.is_set():
                self.losses += train(trainer, DATA, 2, 1e-3)
                time.sleep(1.5)

    def stop(self) -> list[float]:
        """The losses of all its steps."""
        self._stop.set()
        self._training.result()
        return self.losses

    def losses_alone(self, steps: int) -> list[float]:
        """The losses of the same training without other tenants."""
        with tinker.ServiceClient(base_url=self._url, api_key=OTHER_KEY) as client:
            trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=9).result()
            return train(trainer, DATA, steps, 1e-3)


@dataclass
class World:
    server: DemoServer
    http: httpx.Client
    steady: SteadyTenant
    idle: LocalClient
    finished: LocalClient
    waiting: str
    """A command of the finished client that waited for a number that was never sent."""
    silent: LocalClient
    killed: ClientSession

    def ask(self, query: str, whose: str) -> list[Any]:
        """Rows of the database; `:whose` in the query stands for the id. A row of one column is its value."""
        found = ask(self.server, query, whose=whose)
        return [row[0] if len(row) == 1 else row for row in found]

    def status(self, who: ClientSession) -> str:
        return self.ask("select status from sessions where id = :whose", who.session)[0]

    def in_vllm(self) -> set[str]:
        """Names of the adapters that vLLM has loaded."""
        url, key = vllm_of(self.server)
        headers = {"Authorization": f"Bearer {key}"}
        models = self.http.get(f"{url}/v1/models", headers=headers).json()
        return {model["id"] for model in models["data"]}

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def result(self, request_id: str) -> dict[str, Any]:
        answer = self.post("retrieve_future", request_id=request_id)
        assert answer.status_code == 200, answer.text
        return answer.json()


def make_old(server: DemoServer, client: ClientSession) -> None:
    """Make the save's directory old, because the sweeper keeps young directories."""
    (directory,) = client.files(server)
    os.utime(directory, (time.time() - 60, time.time() - 60))


def kill_between_chunks(server: DemoServer) -> ClientSession:
    """Kill a client after the server has received the later chunks of its pass and before the first chunk arrives."""
    gate = Gate()
    with FaultProxy(server.url) as proxy:
        proxy.always("/client/config", edited(lambda config: config | {"fwdbwd_max_chunk_len": 2}))
        proxy.plan("/forward_backward", Call.forward, Call.forward, Call.forward, gate.swallow)
        parent_end, child_end = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=run_client_until_killed, args=(proxy.url, child_end)
        )
        process.start()
        try:
            assert parent_end.poll(300), "the client did not start in time"
            holder = ClientSession(*parent_end.recv())
            gate.wait_reached()
            proxy.wait_for(lambda: [call.told for call in proxy.seen("/forward_backward")].count(200) == 3)
        finally:
            process.kill()
            process.join()
            process.close()
            parent_end.close()
            child_end.close()
        gate.open()
    return holder


@pytest.fixture(scope="module")
def world(server: DemoServer) -> Iterator[World]:
    with ExitStack() as stack:
        http = stack.enter_context(
            httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": KEY}, timeout=60, trust_env=False)
        )
        proxy_without_heartbeats = stack.enter_context(FaultProxy(server.url))
        steady = SteadyTenant(server.url)
        stack.callback(steady.stop)
        silent, idle, finished = (
            LocalClient(url, KEY) for url in (proxy_without_heartbeats.url, server.url, server.url)
        )
        proxy_without_heartbeats.always("/session_heartbeat", busy(503))
        for who in (silent, idle):
            stack.callback(who.close)
        make_old(server, finished)
        body = {"model_id": finished.model, "seq_id": 99}
        waiting = http.post("optim_step", json=body).json()["request_id"]
        finished.client.close("success", "all done").result()
        killed = kill_between_chunks(server)
        make_old(server, killed)
        yield World(server, http, steady, idle, finished, waiting, silent, killed)


def test_a_finished_session_accepts_no_requests(world: World) -> None:
    gone = world.finished
    beat = world.post("session_heartbeat", session_id=gone.session)
    assert (beat.status_code, beat.json()["field"]) == (410, "session_id"), "the SDK stops its heartbeats"
    for path, more in (
        ("create_model", {"model_seq_id": 1, "base_model": "tiny"}),
        ("create_sampling_session", {"sampling_session_seq_id": 5, "base_model": "tiny"}),
    ):
        assert world.post(path, session_id=gone.session, **more).status_code == 410
    sample = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": {"max_tokens": 1}, "seq_id": 9}
    sampler = world.ask("select id from sampling_sessions where session_id = :whose", gone.session)[0]
    assert world.post("asample", sampling_session_id=sampler, **sample).status_code == 404
    until(lambda: world.ask("select status from models where id = :whose", gone.model) == ["closed"])
    assert world.result(world.waiting) == {"error": "the session has ended", "category": "user"}
    late = world.post("optim_step", model_id=gone.model, seq_id=4)
    assert "not there any more" in world.result(late.json()["request_id"])["error"]


def test_the_first_reason_for_the_end_is_kept(world: World) -> None:
    again = world.post(f"sessions/{world.finished.session}/finish", reason={"type": "errored"}, detail="no, badly")
    assert again.status_code == 200
    query = "select status, finish_reason, finish_detail from sessions where id = :whose"
    assert world.ask(query, world.finished.session) == [("finished", "success", "all done")]


def test_samples_beyond_the_bound_get_429_and_all_finish(world: World) -> None:
    """A full server answers 429 and records nothing, so the SDK repeats the sample, and every sample is recorded
    once."""
    tokens = 60  # long enough to fill the server
    params = types.SamplingParams(max_tokens=tokens, stop=[])
    with FaultProxy(world.server.url) as proxy, tinker.ServiceClient(base_url=proxy.url, api_key=KEY) as client:
        sampler = client.create_sampling_client(base_model="tiny").result()
        samples = [sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params) for _ in range(60)]
        assert all(len(sample.result().sequences[0].tokens) == tokens for sample in samples)
        refused = [call.answers[0] for call in proxy.seen("/asample") if call.told == 429]
        numbers = world.ask(
            "select sample_seq_id from futures where session_id = :whose order by 1", client.holder.get_session_id()
        )
    assert numbers == list(range(60))
    assert refused, "the samples have reached the bound"
    assert all(answer.headers["Retry-After"] and answer.json()["detail"] for answer in refused)


def test_a_silent_session_expires_and_one_with_heartbeats_stays(world: World) -> None:
    until(lambda: world.status(world.silent) == world.status(world.killed) == "expired")
    (created_at,) = world.ask("select created_at from sessions where id = :whose", world.idle.session)
    assert time.time() - created_at > SESSION_TIMEOUT_S
    assert world.status(world.idle) == "active"
    beat = world.post("session_heartbeat", session_id=world.silent.session)
    assert beat.status_code == 410
    # The silent client comes back; each of its requests gets the reason.
    gone = world.silent
    until(lambda: world.ask("select status from models where id = :whose", gone.model) == ["closed"])
    with pytest.raises(tinker.RequestFailedError, match="not there any more"):
        gone.trainer.optim_step(types.AdamParams()).result()
    with pytest.raises(tinker.NotFoundError, match="sampling_session_id"):
        greedy(gone.sampler, PROMPT, 1)
    with pytest.raises(tinker.APIStatusError, match="expired") as refused:
        gone.client.create_lora_training_client(base_model="tiny", rank=4).result()
    assert refused.value.status_code == 410


def test_a_client_killed_between_chunks_leaves_no_pending_requests(world: World) -> None:
    model = world.killed.model
    until(lambda: world.ask("select status from models where id = :whose", model) == ["closed"])
    sent = world.ask(
        "select seq_id, status, error from futures where model_id = :whose and seq_id > 2 order by 1", model
    )
    ended = "the session has ended"
    assert sent == [(3, "done", None), (5, "failed", ended), (6, "failed", ended)], (
        "the first chunk, number 4, never arrived"
    )
    assert world.ask(
        "select count(*) from futures where status = 'pending' and session_id = :whose", world.killed.session
    ) == [0]


def test_vllm_unloads_the_adapters_of_ended_sessions_and_keeps_the_others(world: World) -> None:
    left = {world.finished.adapter, world.killed.adapter}
    until(lambda: not left & world.in_vllm())
    assert world.idle.adapter in world.in_vllm()
    assert greedy(world.idle.sampler, PROMPT, 4) == world.idle.first_tokens
    assert train(world.idle.trainer, DATA, 1, 1e-3)[0] > 0


@pytest.mark.slow
def test_the_files_of_ended_sessions_are_deleted_after_the_unload(world: World) -> None:
    gone = LocalClient(world.server.url, KEY)
    make_old(world.server, gone)
    gone.client.close("success").result()
    until(lambda: gone.adapter not in world.in_vllm())
    assert gone.files(world.server), "vLLM may still read the files shortly after the unload"
    for who in (world.finished, world.killed, gone):
        until(lambda who=who: not who.files(world.server))
    assert world.idle.files(world.server)


def test_a_tenant_that_trained_meanwhile_gets_the_same_losses_as_alone(world: World) -> None:
    until(lambda: len(world.steady.losses) > 30)
    losses = world.steady.stop()
    assert world.steady.losses_alone(len(losses)) == losses
