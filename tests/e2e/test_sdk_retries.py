"""Faults of the network and the server with the unmodified SDK. Whatever is lost, refused, delivered twice or late, the
client gets the same results to the last bit, and no request runs twice.

A proxy between SDK and server creates every fault (fault_proxy.py); the server is the real one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import tinker
from openai import APIError, OpenAI
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.base.wire.errors import NoSpace
from skyrl.cli.demo.server import DemoServer
from tests.servers import SLOW_START_S

from . import fault_proxy
from .conftest import ClientFactory, ask, cross_entropy, find_process, greedy, train
from .fault_proxy import Call, Fault, FaultProxy, busy, edited, late, lost_request, lost_response, twice

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7, 8]
ADAM = types.AdamParams(learning_rate=1e-2)
CHANGES = (
    "create_session",
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "create_sampling_session",
    "asample",
    "load_weights",
    "finish",
)
"""Every request of the program below that changes state."""


def data(first: int, count: int = 5) -> list[types.Datum]:
    return [cross_entropy([first + datum + step for step in range(9)]) for datum in range(count)]


def connect_through(proxy: FaultProxy, key: str = "tml-unlucky") -> tinker.ServiceClient:
    proxy.always("/client/config", edited(lambda config: config | {"fwdbwd_max_chunk_len": 2}))
    return tinker.ServiceClient(base_url=proxy.url, api_key=key)


@pytest.fixture
def proxy(server: DemoServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.url) as proxy:
        yield proxy
        assert proxy.unused() == []


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[tinker.ServiceClient]:
    with connect_through(proxy) as client:
        yield client


def saved_files(server: DemoServer, path: str) -> dict[str, bytes]:
    """The files of a checkpoint with a unique name: the adapter and both moments of every weight."""
    model, _, name = path.removeprefix("tinker://").split("/")
    (directory,) = (server.state_dir / "checkpoints").glob(f"{model.replace(':', '*')}/{name}-*")
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def rows(server: DemoServer, session: str) -> list[tuple[str, int]]:
    """(kind, seq_id) of every request of a session, in order."""
    query = "select kind, coalesce(seq_id, sample_seq_id) from futures where session_id = :session"
    return sorted((kind, number) for kind, number in ask(server, query, session=session))


@dataclass
class Outcome:
    """The results of a program: the numbers that the SDK returned, the samples, the weights, and the recorded
    requests."""

    told: list[dict[str, float]]
    sampled: list[list[int]]
    weights: list[dict[str, bytes]]
    recorded: list[tuple[str, int]]


def run_program(server: DemoServer, proxy: FaultProxy) -> Outcome:
    """A short program: train in chunks, save in all ways, sample, resume, train on."""
    with connect_through(proxy) as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
        told = []
        for step in range(2):
            passed, stepped = trainer.forward_backward(data(20 + step), "cross_entropy"), trainer.optim_step(ADAM)
            told += [passed.result().metrics, stepped.result().metrics or {}]
        saved = trainer.save_state("half").result().path
        named = trainer.save_weights_for_sampler("sampler").result().path
        samplers = [
            trainer.save_weights_and_get_sampling_client().result(),
            client.create_sampling_client(model_path=named).result(),
        ]
        sampled = [greedy(sampler, PROMPT, 6) for sampler in samplers]
        resumed = client.create_training_client_from_state_with_optimizer(saved).result()
        for each in (trainer, resumed):
            passed, stepped = each.forward_backward(data(30), "cross_entropy"), each.optim_step(ADAM)
            told += [passed.result().metrics, stepped.result().metrics or {}]
        trainer.save_weights_external("outside").result()
        ends = [each.save_state("end").result().path for each in (trainer, resumed)]
        session = client.holder.get_session_id()
    weights = [saved_files(server, path) for path in (saved, *ends)]
    return Outcome(told, sampled, weights, rows(server, session))


@pytest.fixture(scope="module")
def undisturbed(server: DemoServer) -> Outcome:
    with FaultProxy(server.url) as proxy:
        outcome = run_program(server, proxy)
    assert outcome.weights[1] == outcome.weights[2], "a resumed model trains exactly like the original"
    assert outcome.weights[0] != outcome.weights[1], "training changes the weights"
    assert outcome.told[1]["optimizer_step"] == 1
    return outcome


def fault_first_of_each_kind(fault: Fault) -> Callable[[FaultProxy], None]:
    """The fault for the first request of every kind."""

    def plan(proxy: FaultProxy) -> None:
        for path in CHANGES:
            proxy.plan(f"/{path}", fault)

    return plan


def lose_answers(proxy: FaultProxy) -> None:
    fault_first_of_each_kind(lost_response)(proxy)
    proxy.plan("/save_weights_for_sampler", Call.forward, lost_response)  # the save without a name
    proxy.plan("/retrieve_future", lost_response)
    proxy.plan("/get_info", lost_response)


def refuse(proxy: FaultProxy) -> None:
    """Each kind of "not now", once per kind of request. None of them changes the server's state."""
    statuses = (503, 500, 429, 408, 502, 409, 500, 503, 503, 500, 429)
    for path, status in zip(CHANGES, statuses, strict=True):
        proxy.plan(f"/{path}", busy(status, Retry_After="0.1"))
    proxy.plan("/forward_backward", busy(503, Retry_After="0.1"), busy(429, Retry_After="0.1"))
    proxy.plan("/retrieve_future", busy(503), busy(500), busy(408), busy(400), busy(400))


def delay(proxy: FaultProxy) -> None:
    """Slow answers, sent in drips. Of two chunks that are sent together, the first one arrives last."""
    proxy.drip_bytes = 40
    proxy.plan("/forward_backward", late(0.2))
    proxy.plan("/optim_step", late(0.2))


@pytest.mark.parametrize(
    "plan",
    [lose_answers, fault_first_of_each_kind(lost_request), fault_first_of_each_kind(twice), refuse, delay],
    ids=["answers-lost", "requests-lost", "sent-twice", "refused-for-now", "late-and-slow"],
)
def test_a_program_gets_the_same_results_in_spite_of_faults(
    server: DemoServer, proxy: FaultProxy, undisturbed: Outcome, plan: Callable[[FaultProxy], None]
) -> None:
    plan(proxy)
    outcome = run_program(server, proxy)
    assert outcome.told == undisturbed.told
    assert outcome.sampled == undisturbed.sampled
    assert outcome.weights == undisturbed.weights
    assert outcome.recorded == undisturbed.recorded, "no request is recorded twice"


def test_a_client_waits_after_402(proxy: FaultProxy, client: tinker.ServiceClient) -> None:
    """The SDK waits five seconds after a 402, for every kind of request."""
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    sampler = client.create_sampling_client(base_model="tiny").result()
    for path in ("/forward_backward", "/asample"):
        proxy.plan(path, busy(402))
    started = time.monotonic()
    passed = trainer.forward_backward(data(20, 1), "cross_entropy")
    sampled = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=2))
    assert passed.result().metrics["loss:sum"] > 0
    assert len(sampled.result().sequences) == 1
    assert time.monotonic() - started > 4


def test_a_sample_with_a_lost_promise_is_sent_again_under_a_new_number(
    proxy: FaultProxy, client: tinker.ServiceClient
) -> None:
    sampler = client.create_sampling_client(base_model="tiny").result()
    proxy.plan("/retrieve_future", busy(410))
    params = types.SamplingParams(max_tokens=4)
    answer = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result()
    first, second = proxy.seen("/asample")
    assert json.loads(first.body)["seq_id"] != json.loads(second.body)["seq_id"]
    assert answer.sequences[0].sequence_id == second.answers[0].json()["sample_sequence_ids"][0]
    assert first.answers[0].json()["sample_sequence_ids"] != second.answers[0].json()["sample_sequence_ids"]


def test_a_training_call_with_a_lost_promise_fails_alone(proxy: FaultProxy, client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
    proxy.plan("/retrieve_future", busy(410))
    with pytest.raises(Exception, match="Promise expired"):
        trainer.forward_backward(data(20, 1), "cross_entropy").result()
    assert (trainer.optim_step(ADAM).result().metrics or {})["optimizer_step"] == 1, "the pass itself ran"


def test_a_custom_loss_that_raises_poisons_its_own_training_client_only(
    proxy: FaultProxy, client: tinker.ServiceClient
) -> None:
    """The numbers reserved for the second half of the loss never arrive. Other models of the session do not wait for
    them."""
    broken, other = (client.create_lora_training_client(base_model="tiny", rank=4, seed=n).result() for n in (1, 2))

    def loss(_: list[types.Datum], __: list[Any]) -> tuple[Any, dict[str, float]]:
        raise ZeroDivisionError("in the user's loss")

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: other.forward_backward(data(20), "cross_entropy").result())
        custom, queued = broken.forward_backward_custom(data(20, 3), loss), broken.optim_step(ADAM)
        with pytest.raises(ZeroDivisionError, match="in the user's loss"):
            custom.result()
        with pytest.raises(RuntimeError, match="poisoned"):
            queued.result()
        assert beside.result().metrics["loss:sum"] > 0
    assert (other.optim_step(ADAM).result().metrics or {})["optimizer_step"] == 1
    assert [call.answers[0].status for call in proxy.seen("/optim_step")] == [200]
    third = client.create_lora_training_client(base_model="tiny", rank=4).result()
    assert third.forward_backward(data(20), "cross_entropy").result().metrics["loss:sum"] > 0


def test_a_pass_refused_for_lack_of_disk_space_is_explained_and_accepted_later(
    proxy: FaultProxy, client: tinker.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK repeats most refusals without a message."""
    full = NoSpace("the server's disk is full", retry_after_s=5.0)
    refused = fault_proxy.answer(full.status, {"detail": full.message, "field": None}, **full.headers)
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    proxy.plan("/forward_backward", refused, refused)
    passed = trainer.forward_backward(data(5, 2), "cross_entropy")
    stepped = trainer.optim_step(ADAM)
    assert passed.result().metrics["loss:sum"] > 0
    stepped.result()
    assert [record.getMessage() for record in caplog.records if "disk" in record.getMessage()] == [
        "Deprecation notice: the server's disk is full"
    ] * 2


TEXT = "The old fox watches the river at dawn."


@pytest.mark.slow
def test_a_killed_engine_of_vllm_loses_no_samples_and_no_openai_request_that_got_nothing_yet(
    server: DemoServer, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    """vLLM's API server lives a moment longer than its engine. tests/faults/test_vllm_replaced.py kills the API
    server. An OpenAI stream that has begun ends with an error."""
    trainer = connect().create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
    prompt = tokenizer.encode("The old")
    train(trainer, [cross_entropy(prompt + tokenizer.encode(TEXT))], 4, 2e-2)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    expected = greedy(sampler, prompt)
    path = trainer.save_weights_for_sampler(name="saved").result().path
    asked: dict[str, Any] = {"model": path, "prompt": prompt, "temperature": 0}
    ids: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="tml-test", max_retries=0) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        stream = client.completions.create(**asked, max_tokens=3500, stream=True, extra_body=ids)
        events = iter(stream)
        next(events)
        in_flight = [pool.submit(greedy, sampler, prompt, 1500) for _ in range(4)]
        while server.status()["samples"]["in_flight"] < 4:
            time.sleep(0.01)
        find_process(server, "EngineCore").kill()
        answer: Any = client.completions.create(**asked, max_tokens=12, extra_body=ids)
        assert answer.choices[0].token_ids == expected
        with pytest.raises(APIError) as broken:
            list(events)
        assert broken.value.code == "inference_failed"
        assert greedy(sampler, prompt) == expected
        assert len({tuple(sample.result()) for sample in in_flight}) == 1
    server.wait_ready(SLOW_START_S)
