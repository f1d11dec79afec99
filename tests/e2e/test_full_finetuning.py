"""A server for full fine-tuning: the unmodified SDK trains a whole model, and samples from it on a real vLLM.

The tests share one server and run in the order of this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tinker
import torch
from openai import OpenAI
from tinker import types
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from skyrl.base.tiny import model_path
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.cli.demo.server import DemoServer
from tests.servers import SLOW_START_S, ready

from .conftest import ask, cross_entropy, find_process, in_vllm, until
from .reference import Reference
from .test_checkpoints import archive_of

pytestmark = pytest.mark.vllm

KEY, OTHER_KEY = "tml-full", "tml-full-other"
TEXT = "The old fox watches the river at dawn."
STEP = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
LONG_TOKENS = 2400
TRIES = 5
"""How often samples are begun again that have ended too early."""
SHORT = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
GONE = "these weights are not loaded any more"
COMPUTING = r"num_requests_running\{.*"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    with ready(
        DemoServer(tmp_path_factory.mktemp("full"), backend_config={"trainer.policy.model.lora.rank": 0})
    ) as running:
        yield running


@pytest.fixture
def client(full: DemoServer) -> Iterator[tinker.ServiceClient]:
    """A session of its own; its model ends with it."""
    with tinker.ServiceClient(base_url=full.url, api_key=KEY) as made:
        yield made


@pytest.fixture
def tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer.encode(TEXT)


def _trainer(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="tiny", rank=0).result()


def _step(trainer: tinker.TrainingClient, tokens: list[int], steps: int = 1) -> float:
    loss = 0.0
    for _ in range(steps):
        passed = trainer.forward_backward([cross_entropy(tokens)], "cross_entropy")
        stepped = trainer.optim_step(STEP)
        loss = passed.result().metrics["loss:sum"]
        stepped.result()
    return loss


def _sampler(trainer: tinker.TrainingClient) -> tinker.SamplingClient:
    return trainer.save_weights_and_get_sampling_client().result()


def _sample(sampler: tinker.SamplingClient, tokens: list[int], params: types.SamplingParams = SHORT) -> list[int]:
    return list(sampler.sample(types.ModelInput.from_ints(tokens), 1, params).result().sequences[0].tokens)


def _sampled(sampler: tinker.SamplingClient, tokens: list[int]) -> np.ndarray:
    """The sampler's logprobs of all tokens but the first."""
    found = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    return np.asarray(found[1:], np.float64)


def _trained(trainer: tinker.TrainingClient, tokens: list[int]) -> np.ndarray:
    """The trainer's logprobs of all tokens but the first."""
    output = trainer.forward([cross_entropy(tokens)], "cross_entropy").result().loss_fn_outputs[0]
    return output["logprobs"].to_numpy().astype(np.float64)


class Loop:
    """The same training in plain torch."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
        self._adam = torch.optim.AdamW(
            self.model.parameters(), lr=STEP.learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )

    def step(self, tokens: list[int]) -> float:
        ids = torch.tensor([tokens])
        logprobs = self.model(ids[:, :-1]).logits[0].log_softmax(-1)
        loss = -logprobs.gather(1, ids[0, 1:, None]).sum()
        loss.backward()
        self._adam.step()
        self._adam.zero_grad()
        return float(loss.detach())


def test_updates_equal_a_plain_loop_and_each_reaches_vllm(client: tinker.ServiceClient, tokens: list[int]) -> None:
    """Losses agree to 1e-5, and the sampler's and the trainer's logprobs to 1e-4, after each update."""
    base = client.create_sampling_client(base_model="tiny").result()
    reference = Reference()
    np.testing.assert_allclose(_sampled(base, tokens), reference.of_tokens(tokens), atol=1e-4)
    trainer, loop = _trainer(client), Loop()
    info = trainer.get_info()
    assert (info.is_lora, info.lora_rank) == (False, None)
    assert _sample(base, tokens), "until the first save of a model the base model is there"
    last = None
    for _ in range(6):
        assert _step(trainer, tokens) == pytest.approx(loop.step(tokens), rel=1e-5)
        sampler = _sampler(trainer)
        gap = np.abs(_sampled(sampler, tokens) - _trained(trainer, tokens)).max()
        assert gap < 1e-4
        if last is not None:
            with pytest.raises(tinker.NotFoundError, match=f"{GONE}: version '.*' was replaced by version '.*'"):
                _sample(last, tokens)
        last = sampler
    with pytest.raises(tinker.NotFoundError, match=f"{GONE}: the base model's weights were replaced"):
        _sample(base, tokens)
    with pytest.raises(tinker.NotFoundError, match=GONE):
        client.create_sampling_client(base_model="tiny").result()


def test_the_base_models_weights_come_back_when_a_model_has_ended(
    full: DemoServer, client: tinker.ServiceClient, tokens: list[int]
) -> None:
    """The model of the test before has ended with its session."""
    base = client.create_sampling_client(base_model="tiny").result()
    expected = Reference().of_tokens(tokens)
    np.testing.assert_allclose(_sampled(base, tokens), expected, atol=1e-4)
    trainer = _trainer(client)
    np.testing.assert_allclose(_trained(trainer, tokens), expected, atol=1e-4)
    _step(trainer, tokens)
    sampler = _sampler(trainer)
    _unload(full, trainer)
    with pytest.raises(tinker.NotFoundError, match="because its model has ended"):
        _sample(sampler, tokens)
    np.testing.assert_allclose(_sampled(base, tokens), expected, atol=1e-4)


def _unload(server: DemoServer, trainer: tinker.TrainingClient) -> None:
    model_id = trainer.get_info().model_id
    request = urllib.request.Request(
        f"{server.url}/api/v1/unload_model",
        json.dumps({"model_id": model_id}).encode(),
        {"Content-Type": "application/json", "X-API-Key": KEY},
    )
    urllib.request.urlopen(request, timeout=60).read()
    until(lambda: ask(server, "select status from models where id = :id", id=model_id) == [("closed",)])


def test_one_model_at_a_time(full: DemoServer, client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match=r"lora_config.rank: must be 0, got 8.*trainer.full_finetuning"):
        client.create_lora_training_client(base_model="tiny", rank=8).result()
    with pytest.raises(tinker.BadRequestError, match="must all be true"):
        client.create_lora_training_client(base_model="tiny", rank=0, train_mlp=False).result()
    mine = _trainer(client).get_info().model_id
    with pytest.raises(tinker.BadRequestError, match=f"your model '{mine}' is being trained now"):
        _trainer(client)
    with (
        tinker.ServiceClient(base_url=full.url, api_key=OTHER_KEY) as other,
        pytest.raises(tinker.BadRequestError, match="another tenant's model is being trained now") as refused,
    ):
        _trainer(other)
    assert mine.split(":")[0] not in str(refused.value)


def test_samples_in_flight_go_on_through_updates_and_tell_their_versions(
    full: DemoServer, client: tinker.ServiceClient, tokens: list[int]
) -> None:
    trainer = _trainer(client)
    answers, first, newest = _sampled_through_updates(full, trainer, tokens)
    assert {len(sequence.tokens) for answer in answers for sequence in answer.sequences} == {LONG_TOKENS}
    model_id = trainer.get_info().model_id
    counted = f"select result from futures where kind = 'EXTERNAL' and length(result) > {2 * LONG_TOKENS}"
    results = [pb.SampleResponse.FromString(result) for (result,) in ask(full, counted)]
    spans = [[(s.version, s.start, s.end) for s in q.weight_versions] for r in results for q in r.sequences]
    spans = [of_sequence for of_sequence in spans if of_sequence[0][0] == f"{model_id}@{first}"]
    assert len(spans) == 8
    for of_sequence in spans:
        assert [version for version, _, _ in of_sequence] == [f"{model_id}@{first + n}" for n in range(4)]
        starts, ends = [start for _, start, _ in of_sequence], [end for *_, end in of_sequence]
        assert (starts, ends[-1]) == ([0, *ends[:-1]], LONG_TOKENS)
    assert _sample(newest, tokens)
    until(lambda: _metric(full, "skyrl_forwarding_events_total")['event="changed_weights"'] >= 4)


def _sampled_through_updates(
    full: DemoServer, trainer: tinker.TrainingClient, tokens: list[int]
) -> tuple[list[types.SampleResponse], int, tinker.SamplingClient]:
    """Four samples of two sequences that vLLM had before and after three updates, the number of their first version,
    and a client of the last. On a busy machine one may end before the last update: then all are begun again."""
    long = types.SamplingParams(max_tokens=LONG_TOKENS, temperature=1.0, stop=[])
    versions = 0
    for _ in range(TRIES):
        _step(trainer, tokens)
        newest = _sampler(trainer)
        first = versions = versions + 1
        running = [newest.sample(types.ModelInput.from_ints(tokens), 2, long).future() for _ in range(4)]
        until(lambda running=running: in_vllm(full, COMPUTING) == 8 or any(each.done() for each in running))
        for _ in range(3):
            _step(trainer, tokens)
            newest = _sampler(trainer)
            versions += 1
        still = in_vllm(full, COMPUTING)
        answers = [each.result() for each in running]
        if still == 8:
            return answers, first, newest
    raise AssertionError(f"samples of {LONG_TOKENS} tokens ended before three updates, {TRIES} times")


def _metric(server: DemoServer, name: str) -> dict[str, float]:
    lines = urllib.request.urlopen(f"{server.url}/metrics", timeout=30).read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith(f"{name}{{"):
            labels, value = line.removeprefix(f"{name}{{").rsplit("} ", 1)
            found |= {label: found.get(label, 0) + float(value) for label in labels.split(",")}
    return found


def test_openai_clients_get_the_current_weights_or_an_error(
    full: DemoServer, client: tinker.ServiceClient, tokens: list[int]
) -> None:
    openai_client = OpenAI(base_url=f"{full.url}/oai/api/v1", api_key=KEY, max_retries=0)
    trainer = _trainer(client)
    _step(trainer, tokens, 3)
    first = trainer.save_weights_for_sampler(name="first").result().path
    asked: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "extra_body": {"return_token_ids": True}}
    whole = openai_client.completions.create(model=first, prompt=tokens, **asked).choices[0]
    assert whole.model_extra is not None
    assert whole.model_extra["token_ids"] == _sample(client.create_sampling_client(first).result(), tokens)[:5]
    version = f"{trainer.get_info().model_id}@1"
    assert whole.model_extra["weight_versions"] == [{"version": version, "start": 0, "end": 5}]
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    chat = openai_client.chat.completions.create(model=first, messages=messages, max_tokens=5, temperature=0)
    assert chat.choices[0].model_extra is not None
    assert chat.choices[0].model_extra["weight_versions"][0]["version"] == version
    said = ""
    for chunk in openai_client.chat.completions.create(
        model=first, messages=messages, max_tokens=5, temperature=0, stream=True
    ):
        said += chunk.choices[0].delta.content or ""
    assert said == chat.choices[0].message.content
    streamed = openai_client.completions.create(model=first, prompt=tokens, stream=True, n=2, max_tokens=4)
    assert {choice.index for chunk in streamed for choice in chunk.choices} == {0, 1}
    for name in ("tiny",):
        with pytest.raises(openai.NotFoundError, match=GONE):
            openai_client.completions.create(model=name, prompt=tokens, max_tokens=1)
    _step(trainer, tokens)
    second = trainer.save_weights_for_sampler(name="second").result().path
    for call in (
        lambda: openai_client.completions.create(model=first, prompt=tokens, max_tokens=1),
        lambda: openai_client.chat.completions.create(model=first, messages=messages, max_tokens=1),
    ):
        with pytest.raises(openai.NotFoundError, match=f"{GONE}: version '.*@1' was replaced by version '.*@2'"):
            call()
    assert openai_client.completions.create(model=second, prompt=tokens, max_tokens=1).choices
    with pytest.raises(tinker.NotFoundError, match=GONE):
        client.create_sampling_client(model_path=first).result()


@pytest.mark.slow
def test_the_engine_is_killed_and_training_goes_on_with_the_same_bits(
    full: DemoServer, client: tinker.ServiceClient, tokens: list[int]
) -> None:
    """Its vLLM samples on, with the weights that were saved last. A checkpoint of the state before restores the same
    bits in a model of its own."""
    trainer = _trainer(client)
    _step(trainer, tokens, 2)
    saved = trainer.save_state("before").result().path
    trainer.forward_backward([cross_entropy(tokens[::-1])], "cross_entropy").result()
    sampler = _sampler(trainer)
    expected = _sampled(sampler, tokens)
    find_process(full, "skyrl.engine.main").kill()
    np.testing.assert_array_equal(_sampled(sampler, tokens), expected)
    stepped = trainer.optim_step(STEP).result().metrics
    loss = _step(trainer, tokens)
    end = _state(full, trainer.save_state("end").result().path)
    assert _sample(_sampler(trainer), tokens)
    _unload(full, trainer)

    again = client.create_training_client_from_state_with_optimizer(saved).result()
    again.forward_backward([cross_entropy(tokens[::-1])], "cross_entropy").result()
    assert again.optim_step(STEP).result().metrics == stepped
    assert _step(again, tokens) == loss
    assert _state(full, again.save_state("end").result().path) == end
    assert len(end) >= 4


def _state(server: DemoServer, path: str) -> dict[str, bytes]:
    """The files of a checkpoint."""
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    query = "select store_key from checkpoints where model_id = :model and kind = :kind and name = :name"
    ((key,),) = ask(server, query, model=model_id, kind=kind, name=name)
    return {
        file.name: file.read_bytes()
        for file in (server.state_dir / "checkpoints" / key).iterdir()
        if file.suffix != ".manifest" and not file.name.startswith(".")
    }


@pytest.mark.slow
def test_a_vllm_that_is_killed_gets_the_weights_before_it_is_used(
    full: DemoServer, client: tinker.ServiceClient, tokens: list[int]
) -> None:
    trainer = _trainer(client)
    _step(trainer, tokens, 5)
    sampler = _sampler(trainer)
    expected = _sampled(sampler, tokens)
    long = types.SamplingParams(max_tokens=600, temperature=1.0, stop=[])
    running = [sampler.sample(types.ModelInput.from_ints(tokens), 1, long) for _ in range(3)]
    until(lambda: in_vllm(full, COMPUTING) == 3)
    find_process(full, "vllm.entrypoints.openai.api_server").kill()
    np.testing.assert_allclose(_sampled(sampler, tokens), expected, atol=1e-5)
    assert {len(each.result().sequences[0].tokens) for each in running} == {600}


def test_an_export_loads_in_transformers(
    full: DemoServer, client: tinker.ServiceClient, tokens: list[int], tmp_path: Path
) -> None:
    """As an archive, with its tokenizer; and the same files are the checkpoint to sample from."""
    path, expected = _exported(client, tokens)
    rest = tinker.RestClient(base_url=full.url, api_key=KEY)
    runs = rest.list_training_runs().result().training_runs
    assert (runs[0].is_lora, runs[0].lora_rank) == (False, None)
    assert not rest.get_weights_info_by_tinker_path(path).result().is_lora
    checkpoint = next(one for one in rest.list_user_checkpoints().result().checkpoints if one.tinker_path == path)
    assert checkpoint.size_bytes is not None
    assert checkpoint.size_bytes > 4 * 650_000
    directory = archive_of(full, path, tmp_path, KEY)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    assert model.dtype == torch.float32
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)[:-1]
    mine = np.take_along_axis(logprobs.numpy(), np.asarray(tokens[1:])[:, None], 1)[:, 0]
    np.testing.assert_allclose(mine, expected, atol=1e-4)
    assert (directory / "tokenizer.json").is_file()


def _exported(client: tinker.ServiceClient, tokens: list[int]) -> tuple[str, np.ndarray]:
    """A checkpoint to sample from, and what it samples with."""
    trainer = _trainer(client)
    _step(trainer, tokens, 3)
    path = trainer.save_weights_for_sampler(name="exported").result().path
    return path, _sampled(client.create_sampling_client(path).result(), tokens)


STOCK = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt

llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256, distributed_executor_backend="uni")
tokens = json.loads(sys.argv[2])
params = SamplingParams(max_tokens=1, prompt_logprobs=0)
rows = llm.generate(TokensPrompt(prompt_token_ids=tokens), params)[0].prompt_logprobs
print(json.dumps([row[token].logprob for row, token in zip(rows[1:], tokens[1:])]))
"""


@pytest.mark.slow
def test_an_export_loads_in_a_vllm_without_skyrl(
    full: DemoServer, client: tinker.ServiceClient, tokens: list[int], tmp_path: Path
) -> None:
    path, expected = _exported(client, tokens)
    directory = archive_of(full, path, tmp_path, KEY)
    stock = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    stock |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    command = [sys.executable, "-c", STOCK, str(directory), json.dumps(tokens)]
    ran = subprocess.run(command, env=os.environ | stock, capture_output=True, text=True, timeout=SLOW_START_S)
    assert ran.returncode == 0, ran.stderr[-3000:]
    np.testing.assert_allclose(json.loads(ran.stdout.splitlines()[-1]), expected, atol=1e-4)


@pytest.fixture(scope="module")
def two_vllms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    config = {"trainer.full_finetuning": True, "generator.inference_engine.num_engines": 2}
    with ready(DemoServer(tmp_path_factory.mktemp("two"), backend_config=config)) as running:
        yield running


@pytest.mark.slow
def test_a_replica_that_dies_between_updates_comes_back_with_the_newest_version(
    two_vllms: DemoServer, tokens: list[int]
) -> None:
    """Samples run all the time, on both vLLMs, through updates and through the death of one."""
    (runtime,) = json.loads((two_vllms.state_dir / "run" / "runtime.json").read_text())["each"]
    urls, key = runtime["replica_urls"], runtime["inference_api_key"]

    def versions() -> list[str | None]:
        return [_version(url, key) for url in urls]

    long = types.SamplingParams(max_tokens=500, temperature=1.0, stop=[])
    with tinker.ServiceClient(base_url=two_vllms.url, api_key=KEY) as client:
        trainer = _trainer(client)
        model_id = trainer.get_info().model_id
        for number in range(1, 6):
            _step(trainer, tokens)
            sampler = _sampler(trainer)
            if number == 3:
                port = urls[1].rpartition(":")[2]
                find_process(two_vllms, f"--port {port}").kill()
            running = [sampler.sample(types.ModelInput.from_ints(tokens), 2, long) for _ in range(6)]
            gap = np.abs(_sampled(sampler, tokens) - _trained(trainer, tokens)).max()
            assert gap < 1e-4
            for each in running:
                assert {len(sequence.tokens) for sequence in each.result().sequences} == {500}
        until(lambda: versions() == [f"{model_id}@5"] * 2)


def _version(url: str, key: str) -> str | None:
    """The version of a vLLM's weights; None while it does not answer."""
    request = urllib.request.Request(f"{url}/weight_info", headers={"Authorization": f"Bearer {key}"})
    try:
        return json.load(urllib.request.urlopen(request, timeout=30))["weight_version"]
    except OSError:
        return None
