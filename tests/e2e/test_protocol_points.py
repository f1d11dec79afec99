"""The twenty points of the wire protocol on which an almost correct server fails (docs/reference/protocol.md), one test
each, on the real server. The tests use the unmodified SDK for points about the SDK, and plain HTTP for points about
bytes.

Retries and lost messages are tested in test_sdk_retries.py.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import httpx
import numpy as np
import pytest
import tinker
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.api.routes.futures import HOLD_S, SHORTEST_HOLD
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.cli.demo.server import DemoServer

from .conftest import ClientFactory, ask, cross_entropy, greedy
from .fault_proxy import FaultProxy, edited

PROTO = "application/x-protobuf"
TEXT = list(range(20, 32))
REDUCTIONS = {"sum", "min", "max", "mean", "slack", "hash2", "unique"}
"""The reductions with which the SDK combines the chunks of a pass. The SDK drops a metric with another reduction."""
LIMIT_S = 300.0


class HttpClient:
    """A client of plain HTTP requests, with its own session and model."""

    def __init__(self, url: str, key: str = "tml-raw") -> None:
        self.http = httpx.Client(
            base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=LIMIT_S, trust_env=False
        )
        self.session = self.ok("create_session", {})["session_id"]
        self.models = 0

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.http.post(path, json=body, headers=headers)

    def ok(self, path: str, body: Any) -> dict[str, Any]:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def poll(self, request_id: str, kind: str = "OptimStep", accept: str = "application/json") -> httpx.Response:
        headers = {"X-Tinker-Request-Type": kind, "Accept": accept}
        return self.http.post("retrieve_future", json={"request_id": request_id}, headers=headers)

    def result(self, promise: dict[str, Any]) -> dict[str, Any]:
        answer = self.poll(promise["request_id"])
        assert answer.status_code == 200, answer.text
        return answer.json()

    def model(self, seed: int = 1) -> str:
        wanted = {"session_id": self.session, "model_seq_id": self.models, "base_model": "tiny"}
        self.models += 1
        return self.result(self.ok("create_model", wanted | {"lora_config": {"rank": 4, "seed": seed}}))["model_id"]

    def sampler(self, number: int = 0) -> str:
        wanted = {"session_id": self.session, "sampling_session_seq_id": number, "base_model": "tiny"}
        return self.ok("create_sampling_session", wanted)["sampling_session_id"]

    def close(self) -> None:
        self.post(f"sessions/{self.session}/finish", {})
        self.http.close()


@pytest.fixture
def raw(server: DemoServer) -> Iterator[HttpClient]:
    with closing(HttpClient(server.url)) as client:
        yield client


@pytest.fixture
def proxy(server: DemoServer) -> Iterator[FaultProxy]:
    """A proxy that records the requests and answers of the SDK and cuts passes into chunks of two sequences."""
    with FaultProxy(server.url) as proxy:
        proxy.always("/client/config", edited(lambda config: config | {"fwdbwd_max_chunk_len": 2}))
        yield proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=proxy.url, api_key="tml-watched") as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def held_poll(server: DemoServer) -> Iterator[Future[tuple[float, httpx.Response]]]:
    """A poll for a command that never runs. The server holds the poll for half a minute, while the other tests run."""
    with closing(HttpClient(server.url)) as client, ThreadPoolExecutor(1) as pool:
        request_id = client.ok("optim_step", {"model_id": client.model(), "seq_id": 2})["request_id"]

        def poll() -> tuple[float, httpx.Response]:
            started = time.monotonic()
            answer = client.poll(request_id)
            return time.monotonic() - started, answer

        yield pool.submit(poll)


def json_pass(model: str, seq_id: int, tokens: list[int] = TEXT) -> dict[str, Any]:
    inputs = {"target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [len(tokens) - 1]}}
    datum = {"model_input": {"chunks": [{"tokens": tokens[:-1]}]}, "loss_fn_inputs": inputs}
    given = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": model, "seq_id": seq_id, "forward_backward_input": given}


def json_sample(sampler: str, seq_id: int, **params: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TEXT}]}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 4, "temperature": 0.0} | params,
    }


def rl_datum(tokens: list[int]) -> types.Datum:
    """The inputs of every loss but cross_entropy, and the mask for gspo."""
    length = len(tokens) - 1
    arrays = {
        "target_tokens": np.asarray(tokens[1:], np.int64),
        "logprobs": np.full(length, -6.0, np.float32),
        "advantages": np.linspace(-1, 1, length).astype(np.float32),
        "sequence_ratio_mask": np.ones(length, np.float32),
    }
    inputs = {name: types.TensorData.from_numpy(array) for name, array in arrays.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def without_mask(datum: types.Datum) -> types.Datum:
    inputs = {name: tensor for name, tensor in datum.loss_fn_inputs.items() if name != "sequence_ratio_mask"}
    return types.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def test_point_01_passes_and_their_results_travel_as_protobuf(
    proxy: FaultProxy, client: tinker.ServiceClient, raw: HttpClient
) -> None:
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    trainer.forward([cross_entropy(TEXT)], "cross_entropy").result()
    trainer.forward_backward([cross_entropy(TEXT)], "cross_entropy").result()
    greedy(client.create_sampling_client(base_model="tiny").result(), TEXT, 2)
    assert [call.headers["Content-Type"] for call in proxy.seen("/forward_backward")] == [PROTO, PROTO]
    content_types: dict[str, str] = {}
    for call in proxy.seen("/retrieve_future"):
        if call.told == 200:
            content_types[call.headers["X-Tinker-Request-Type"]] = call.answers[-1].headers["Content-Type"]
    assert content_types == {"CreateModel": "application/json"} | dict.fromkeys(
        ("Forward", "ForwardBackward", "Sample"), PROTO
    )

    promise = raw.ok("forward_backward", json_pass(raw.model(), 1))
    forms = {
        accept: raw.poll(promise["request_id"], accept=accept) for accept in (PROTO, f"{PROTO}, text/plain", "*/*")
    }
    assert [answer.headers["content-type"] for answer in forms.values()] == [PROTO, PROTO, "application/json"]
    metrics = pb.ForwardBackwardOutput.FromString(forms[PROTO].content).metrics
    assert dict(metrics) == forms["*/*"].json()["metrics"]


def test_point_02_a_promise_of_samples_names_each_of_them(proxy: FaultProxy, client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="tiny").result()
    params = types.SamplingParams(max_tokens=2)
    answers = [sampler.sample(types.ModelInput.from_ints(TEXT), n, params).result() for n in (1, 3)]
    promised = [call.answers[0].json()["sample_sequence_ids"] for call in proxy.seen("/asample")]
    assert [[sequence.sequence_id for sequence in answer.sequences] for answer in answers] == promised
    flat = [name for names in promised for name in names]
    assert len(flat) == len(set(flat)) == 4
    assert all(isinstance(name, str) and name for name in flat)


def test_point_03_the_client_knows_a_models_id_before_the_server_says_it(
    proxy: FaultProxy, client: tinker.ServiceClient
) -> None:
    first, second = (client.create_lora_training_client(base_model="tiny", rank=4).result() for _ in range(2))
    saved = first.save_state("here").result().path
    proxy.always("/load_weights", edited(lambda promise: {"request_id": promise["request_id"]}))
    loaded = client.create_training_client_from_state(saved).result()
    session = client.holder.get_session_id()
    assert [each.model_id for each in (first, second, loaded)] == [f"{session}:train:{n}" for n in range(3)]
    assert loaded.get_info().model_id == loaded.model_id


@pytest.mark.parametrize(
    "loss_fn", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dppo", "dppo_kl", "dro", "gspo"]
)
def test_point_04_every_metric_says_how_chunks_are_combined(
    proxy: FaultProxy, client: tinker.ServiceClient, loss_fn: Any
) -> None:
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    data = [rl_datum([token + shift for token in TEXT]) for shift in range(5)]
    if loss_fn == "cross_entropy":
        data = [cross_entropy([token + shift for token in TEXT]) for shift in range(5)]
    elif loss_fn != "gspo":
        data = [without_mask(datum) for datum in data]
    combined = trainer.forward_backward(data, loss_fn).result().metrics
    sent = [
        pb.ForwardBackwardOutput.FromString(call.answers[-1].body).metrics
        for call in proxy.seen("/retrieve_future")
        if call.headers["X-Tinker-Request-Type"] == "ForwardBackward" and call.told == 200
    ]
    assert len(sent) == 3
    for metrics in sent:
        assert all(name.count(":") == 1 and name.partition(":")[2] in REDUCTIONS for name in metrics), dict(metrics)
        assert set(metrics) == set(combined), "the SDK keeps every metric"


def test_point_05_there_is_a_metric_called_loss_sum(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    data = [cross_entropy(TEXT)]

    def loss(_: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return -logprobs[0].sum(), {}

    expected = trainer.forward(data, "cross_entropy").result().metrics["loss:sum"]
    assert trainer.forward_backward(data, "cross_entropy").result().metrics["loss:sum"] == expected > 0
    custom = trainer.forward_backward_custom(data, loss).result().metrics
    assert custom["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert custom["surrogate_loss:sum"] == pytest.approx(expected, rel=1e-5)
    trainer.optim_step(types.AdamParams()).result()  # the client is not poisoned


def test_point_06_chunks_out_of_order_run_in_order_and_get_their_promises_at_once(
    proxy: FaultProxy, client: tinker.ServiceClient, raw: HttpClient
) -> None:
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    trainer.forward_backward([cross_entropy(TEXT)] * 6, "cross_entropy").result()
    arrived = [pb.ForwardBackwardHeader.FromString(call.body).seq_id for call in proxy.seen("/forward_backward")]
    assert sorted(arrived) == [1, 2, 3]
    assert arrived[-1] == 1, "the SDK sends the first chunk last"

    bodies = [[token + shift for token in TEXT] for shift in (0, 3, 6)]
    results = []
    for order in ((1, 2, 3, 4), (4, 3, 2, 1)):
        model = raw.model(seed=5)
        promises = {}
        for seq_id in order:
            started = time.monotonic()
            if seq_id == 3:
                body = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.1}}
                promises[seq_id] = raw.ok("optim_step", body)
            else:
                promises[seq_id] = raw.ok("forward_backward", json_pass(model, seq_id, bodies[seq_id % 3]))
            assert time.monotonic() - started < 20, "a promise waited for an earlier command"
        results.append([raw.result(promises[seq_id]) for seq_id in (1, 2, 3, 4)])
    assert results[0] == results[1]


def test_point_07_a_failed_command_does_not_stop_later_numbers(raw: HttpClient) -> None:
    """A command with a readable model and number is accepted whatever else it contains, and fails alone."""
    model = raw.model()
    raw.result(raw.ok("forward_backward", json_pass(model, 1)))
    assert raw.post("forward_backward", json_pass(model, 1, TEXT[::-1])).status_code == 400
    wrong = [
        ("forward_backward", {"forward_backward_input": {"data": 7}}),
        ("optim_step", {"adam_params": {"learning_rate": "fast"}}),
        ("save_weights", {"path": "../../etc"}),
        ("save_weights_for_sampler", {}),
        ("load_weights", {"path": "tinker://nobody/weights/nothing"}),
    ]
    for seq_id, (route, body) in enumerate(wrong, start=2):
        failed = raw.result(raw.ok(route, {"model_id": model, "seq_id": seq_id} | body))
        assert failed["category"] == "user", failed
    stepped = raw.result(raw.ok("optim_step", {"model_id": model, "seq_id": len(wrong) + 2}))
    assert stepped["metrics"]["optimizer_step"] == 1


def test_point_09_failed_work_is_a_200_with_an_error_and_a_category(
    raw: HttpClient, client: tinker.ServiceClient, proxy: FaultProxy
) -> None:
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match="loss_fn") as failed:
        trainer.forward_backward([cross_entropy(TEXT)], "no_such_loss").result()  # type: ignore[arg-type]
    assert failed.value.category == types.RequestErrorCategory.User
    last = [call for call in proxy.seen("/retrieve_future") if "ForwardBackward" in call.headers.values()][-1]
    assert last.told == 200
    assert set(last.answers[0].json()) == {"error", "category"}
    # A request without a result is different: 410 lets the SDK sample again, 404 ends a training call.
    assert raw.poll("no-such-request", kind="Sample").status_code == 410
    assert raw.poll("no-such-request", kind="OptimStep").status_code == 404


def test_point_10_a_name_or_number_in_use_is_never_a_409(
    proxy: FaultProxy, client: tinker.ServiceClient, raw: HttpClient
) -> None:
    """Every SDK repeats a request that gets 409, and repeats a save for five minutes."""
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    for save in (trainer.save_state, trainer.save_weights_for_sampler):
        save("taken").result()
        with pytest.raises(tinker.RequestFailedError, match="exists already"):
            save("taken").result()
    model, sampler = raw.model(), raw.sampler()
    raw.ok("asample", json_sample(sampler, 1))
    raw.result(raw.ok("optim_step", {"model_id": model, "seq_id": 1}))
    create = {"session_id": raw.session, "model_seq_id": 0, "base_model": "tiny"}
    named = raw.result(raw.ok("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "path": "mine"}))
    other = {"session_id": raw.session, "sampling_session_seq_id": 0, "model_path": named["path"]}
    again = [
        raw.post("asample", json_sample(sampler, 1, max_tokens=5)),
        raw.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 1.0}}),
        raw.post("create_model", create | {"lora_config": {"rank": 8}}),
        raw.post("create_sampling_session", other),
    ]
    assert [answer.status_code for answer in again] == [400, 400, 400, 400], [answer.text for answer in again]
    assert 409 not in {call.told for call in proxy.calls}


def test_point_11_no_refusal_has_an_empty_body(raw: HttpClient, server: DemoServer) -> None:
    """The SDK takes an empty 400 for a broken connection and repeats the request."""
    refused = [
        raw.post("no_such_route", {}),
        raw.http.get("create_session"),
        raw.post("create_session", 7),
        raw.http.post("create_session", content=b""),
        raw.http.post("create_session", content=b"\xff{"),
        raw.http.post("forward_backward", content=b"\xff", headers={"Content-Type": PROTO}),
        raw.http.post("optim_step", content=b"{}", headers={"Content-Encoding": "br"}),
        raw.http.post("create_session", content=b"{}", headers={"X-API-Key": ""}),
        raw.post("create_model", {"session_id": "nobody", "model_seq_id": 0, "base_model": "tiny"}),
        raw.post("session_heartbeat", {"session_id": "nobody"}),
        raw.post("get_info", {"model_id": "nobody:train:0"}),
        raw.post("optim_step", {"model_id": "nobody:train:0", "seq_id": 1}),
        raw.post("asample", {"sampling_session_id": "nobody", "prompt": {"chunks": [{"tokens": [1]}]}}),
        raw.poll("nothing"),
        raw.http.get("samplers/nobody"),
        raw.http.get("training_runs", params={"limit": "many"}),
        raw.http.delete("training_runs/nobody:train:0/checkpoints/weights/none"),
        httpx.get(f"{server.url}/nowhere", trust_env=False),
    ]
    for answer in refused:
        assert 400 <= answer.status_code < 500, (answer.url, answer.status_code)
        assert int(answer.headers["content-length"]) > 0, answer.url
        assert answer.json()["detail"], answer.url


def test_point_12_the_client_configuration_needs_no_session(server: DemoServer) -> None:
    with httpx.Client(base_url=f"{server.url}/api/v1/client/", trust_env=False) as anybody:
        for body in ({"sdk_version": "0.38.0"}, {"sdk_version": "99.0.0", "more": 1}, {}):
            config = anybody.post("config", json=body)
            assert config.status_code == 200, config.text
            types.ClientConfigResponse.model_validate(config.json(), strict=True)
            assert config.json()["pjwt_auth_enabled"] is False
        assert anybody.post("dynamic_config", json={"sdk_version": "0.38.0"}).status_code == 200


def test_point_13_leaving_the_with_block_finishes_the_session(proxy: FaultProxy, server: DemoServer) -> None:
    with tinker.ServiceClient(base_url=proxy.url, api_key="tml-one") as well:
        well.create_sampling_client(base_model="tiny").result()
    badly = tinker.ServiceClient(base_url=proxy.url, api_key="tml-one")
    badly.create_sampling_client(base_model="tiny").result()
    with pytest.raises(ZeroDivisionError), badly:
        _ = 1 / 0  # an error of the user's program
    sessions = [call.answers[0].json()["session_id"] for call in proxy.seen("/create_session")]
    query = "select status, finish_reason from sessions where id in (:first, :second) order by created_at"
    assert ask(server, query, first=sessions[0], second=sessions[1]) == [
        ("finished", "success"),
        ("finished", "errored"),
    ]
    assert [call.told for call in proxy.seen("/finish")] == [200, 200]


def test_point_14_clients_send_tml_keys_or_tokens(server: DemoServer) -> None:
    """Any `tml-` key is a tenant; a token (`eyJ...`) stands for the key from which it was made."""
    with closing(HttpClient(server.url, "tml-of-token")) as raw:
        token = raw.ok("auth/token", {})["jwt"]
    assert token.startswith("eyJ")
    made: dict[str, set[str]] = {}
    for key in ("tml-" + "x" * 300, "tml-of-token", token):
        with tinker.ServiceClient(base_url=server.url, api_key=key) as client:
            model = client.create_lora_training_client(base_model="tiny", rank=4).result().model_id
        answer = httpx.get(f"{server.url}/api/v1/training_runs", headers={"X-API-Key": key}, trust_env=False)
        made[key] = {run["training_run_id"] for run in answer.json()["training_runs"]}
        assert model in made[key]
    stranger, mine, tokens = made.values()
    assert len(stranger) == 1
    assert mine < tokens


def test_a_client_identifies_itself_and_works_with_tokens(server: DemoServer, proxy: FaultProxy) -> None:
    """Point 14, where the server tells clients to send tokens."""
    proxy.always("/client/config", edited(lambda config: config | {"pjwt_auth_enabled": True}))
    me = tinker.RestClient(base_url=proxy.url, api_key="tml-me").whoami().result()
    assert me.user_urn.startswith("tml:user:")
    assert me.org_urn.startswith("tml:organization:")
    assert me.email is None
    with tinker.ServiceClient(base_url=proxy.url, api_key="tml-me") as client:
        assert len(greedy(client.create_sampling_client(base_model="tiny").result(), [5], 5)) == 5
        session = proxy.seen("/create_session")[-1].answers[0].json()["session_id"]
        by_key = tinker.RestClient(base_url=server.url, api_key="tml-me")
        assert session in by_key.list_sessions().result().sessions, "the token stands for the key's tenant"
    assert {call.headers["X-API-Key"][:3] for call in proxy.seen("/asample")} == {"eyJ"}
    assert len(proxy.seen("/auth/token")) == 2, "one token request per client"


def test_point_15_request_ids_are_strings(raw: HttpClient) -> None:
    model = raw.model()
    of_model = {"model_id": model}
    create = {"session_id": raw.session, "model_seq_id": raw.models, "base_model": "tiny"}
    promises = [
        raw.ok("create_model", create),
        raw.ok("asample", json_sample(raw.sampler(), 1)),
        raw.ok("forward_backward", json_pass(model, 1)),
        raw.ok("forward", {"forward_input": json_pass(model, 2)["forward_backward_input"], "seq_id": 2} | of_model),
        raw.ok("optim_step", {"seq_id": 3} | of_model),
        raw.ok("save_weights", {"seq_id": 4, "path": "kept"} | of_model),
        raw.ok("save_weights_for_sampler", {"seq_id": 5, "path": "kept"} | of_model),
        raw.ok("save_weights_for_sampler", {"seq_id": 6, "sampling_session_seq_id": 9} | of_model),
        raw.ok("load_weights", {"seq_id": 7, "path": f"tinker://{model}/weights/kept", "optimizer": True} | of_model),
    ]
    ids = [promise["request_id"] for promise in promises]
    assert all(isinstance(request_id, str) for request_id in ids)
    assert len(set(ids)) == len(ids)
    assert [result for promise in promises if "error" in (result := raw.result(promise))] == []


def test_point_16_sampled_tokens_always_have_logprobs(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="tiny").result()
    for params, count in (({}, 1), ({"temperature": 0.0}, 2), ({"temperature": 0.7, "top_p": 0.5, "top_k": 5}, 3)):
        wanted = types.SamplingParams(max_tokens=6, **params)  # type: ignore[arg-type]
        answer = sampler.sample(types.ModelInput.from_ints(TEXT), count, wanted).result()
        assert len(answer.sequences) == count
        for sequence in answer.sequences:
            assert sequence.logprobs is not None
            assert len(sequence.logprobs) == len(sequence.tokens) > 0
            assert all(-50 < logprob <= 1e-5 for logprob in sequence.logprobs)
            assert any(logprob != 0 for logprob in sequence.logprobs) or params


def test_point_17_the_tokens_include_the_stop(client: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase) -> None:
    sampler = client.create_sampling_client(base_model="tiny").result()
    prompt = tokenizer.encode("The old")
    free = greedy(sampler, prompt, 30)
    token = next(token for index, token in enumerate(free) if index > 3 and token not in free[:index])

    def text(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens))

    word = text(free)[8:11]
    for stop, ends in (([token], lambda said: said[-1] == token), (word, lambda said: word in text(said))):
        params = types.SamplingParams(max_tokens=30, temperature=0.0, stop=stop)
        (sequence,) = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences
        said = list(sequence.tokens)
        assert sequence.stop_reason == "stop"
        assert ends(said)
        assert not ends(said[:-1]), "the stop stands once, at the end"
        assert said == free[: len(said)]


@pytest.mark.parametrize("encode", [str, lambda part: quote(part, safe="")], ids=["plain", "percent-encoded"])
def test_point_18_urls_contain_ids_with_colons_and_slashes(raw: HttpClient, encode: Callable[[str], str]) -> None:
    model = raw.model()
    raw.result(raw.ok("save_weights", {"model_id": model, "seq_id": 1, "path": "a.b-c_1"}))
    raw.result(raw.ok("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "path": "a.b-c_1"}))
    run = f"training_runs/{encode(model)}"
    for kind in ("weights", "sampler_weights"):
        checkpoint = f"{run}/checkpoints/{encode(f'{kind}/a.b-c_1')}"
        done = [
            raw.http.post(f"{checkpoint}/publish"),
            raw.http.delete(f"{checkpoint}/publish"),
            raw.http.put(f"{checkpoint}/ttl", json={"ttl_seconds": 7200}),
        ]
        assert all(answer.is_success for answer in done), [answer.text for answer in done]
        listed = raw.http.get(f"{run}/checkpoints").json()["checkpoints"]
        (mine,) = [one for one in listed if one["checkpoint_id"] == f"{kind}/a.b-c_1"]
        assert mine["expires_at"]
        assert raw.http.delete(checkpoint).is_success
    assert raw.http.get(run).json()["training_run_id"] == model
    assert raw.http.get(f"{run}/checkpoints").json()["checkpoints"] == []
    assert raw.http.get(f"samplers/{encode(raw.sampler())}").json()["sampler_id"] == raw.sampler()


async def test_point_19_two_thousand_idle_polls_do_not_delay_four_hundred_samples(
    server: DemoServer, raw: HttpClient, connect: ClientFactory
) -> None:
    model = raw.model()
    held = raw.ok("optim_step", {"model_id": model, "seq_id": 2})["request_id"]
    sampler = connect().create_sampling_client(base_model="tiny").result()
    headers = {"X-API-Key": "tml-raw", "X-Tinker-Request-Type": "OptimStep"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"{server.url}/api/v1/", connector=connector, headers=headers) as http:

        async def poll() -> tuple[int, bytes]:
            """Poll as the SDK does: repeat after each answer that asks for a repetition."""
            while True:
                async with http.post("retrieve_future", json={"request_id": held}) as answer:
                    if answer.status != httpx.codes.REQUEST_TIMEOUT:
                        return answer.status, await answer.read()

        polls = [asyncio.create_task(poll()) for _ in range(2000)]
        await asyncio.sleep(1)
        params = types.SamplingParams(max_tokens=1)
        samples = [sampler.sample(types.ModelInput.from_ints(TEXT), 1, params) for _ in range(400)]
        answers = await asyncio.gather(*(sample.result_async() for sample in samples))
        assert all(len(answer.sequences[0].tokens) == 1 for answer in answers)
        started = time.monotonic()
        async with http.get("healthz") as health:
            assert health.status == 200
        assert time.monotonic() - started < 20, "the samples did not wait for the polls"
        assert not any(poll.done() for poll in polls)
        async with http.post("optim_step", json={"model_id": model, "seq_id": 1}) as released:
            assert released.status == 200
        told = await asyncio.gather(*polls)
    assert {status for status, _ in told} == {200}
    assert len({body for _, body in told}) == 1


def test_point_20_a_new_model_and_a_new_sampler_can_be_described_at_once(
    proxy: FaultProxy, client: tinker.ServiceClient
) -> None:
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    path = trainer.save_weights_for_sampler("here").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    order = [call.path.rpartition("/api/v1/")[2] for call in proxy.calls if call.told == 200]
    assert [call.told for call in proxy.seen("/get_info")] == [200], "the SDK asks once per model"
    assert order.index("get_info") > order.index("create_model")
    (asked,) = [call for call in proxy.calls if "/samplers/" in call.path]
    assert asked.answers[0].json()["model_path"] == path
    info = trainer.get_info()
    assert (info.is_lora, info.lora_rank) == (True, 4)
    assert len(trainer.get_tokenizer()) == len(sampler.get_tokenizer()) == 512
    # The SDK loads a base model's tokenizer by the name that the client gave. The directory as a name needs no hub.
    directory = trainer.get_info().model_data.tokenizer_id
    assert directory is not None
    base = client.create_sampling_client(base_model=directory).result()
    assert len(base.get_tokenizer()) == 512


def test_point_08_a_poll_is_held_and_then_gets_408(
    held_poll: Future[tuple[float, httpx.Response]],
) -> None:
    """The last test of the file: the poll was held while the other tests ran."""
    held_s, answer = held_poll.result(timeout=LIMIT_S)
    shortest_s = SHORTEST_HOLD * HOLD_S
    assert 0.99 * shortest_s < held_s < 45, "the SDK polls again at once, and gives up reading after 45 s"
    assert answer.status_code == 408
    assert answer.json()["type"] == "try_again"
    assert answer.json()["queue_state"] == "paused_capacity"
    assert answer.json()["queue_state_reason"] == (
        "command 1 of this model has not arrived, and 1 later command waits for it: the client has not sent it, or "
        "still sends it"
    )


def test_every_point_has_a_test_and_a_line_in_the_docs() -> None:
    names = {name for name in globals() if name.startswith("test_point_")}
    page = Path(__file__).parents[2] / "docs" / "reference" / "protocol.md"
    points = {int(number) for number in re.findall(r"^- \*\*(\d+)\.\*\* ", page.read_text(), flags=re.M)}
    assert {int(name[11:13]) for name in names} == points == set(range(1, 21))
