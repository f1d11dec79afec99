"""Downloaded checkpoints of the real server: stock PEFT and stock vLLM compute the same logprobs as skyrl."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from typer.testing import CliRunner

from skyrl.base.tiny import model_path
from skyrl.cli import models
from skyrl.cli.demo.server import DemoServer
from skyrl.cli.main import app
from skyrl.trainer.tools import merge_adapter

from .conftest import ClientFactory, adapter_of, cross_entropy, greedy, train, vllm_of

pytestmark = pytest.mark.vllm

TEXT = "The old fox watches the river at dawn."
OTHERS = "Bright lamps hum softly over the stairs."


def archive_of(server: DemoServer, path: str, directory: Path, key: str = "tml-test") -> Path:
    """A checkpoint's archive, unpacked, fetched as SDKs up to 0.30 fetch it."""
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    route = f"{server.url}/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}/archive"
    answer = httpx.get(route, headers={"X-API-Key": key, "Accept": "application/json"}, trust_env=False)
    assert answer.status_code == 200, answer.text
    # without headers, as the SDK's command line sends the request
    with urllib.request.urlopen(answer.json()["url"]) as download:
        archive = download.read()
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        opened.extractall(directory, filter="data")
    assert (directory / "checkpoint_complete").exists()
    return directory


def logprobs_in_peft(adapter: Path, tokens: list[int]) -> np.ndarray:
    """Logprobs of each token after the first."""
    base = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter)).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def logprobs_in_vllm(server: DemoServer, adapter: Path, tokens: list[int]) -> np.ndarray:
    """Logprobs of each token after the first."""
    name = "taken-elsewhere"
    url, key = vllm_of(server)
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=300, trust_env=False) as vllm:
        loaded = vllm.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(adapter)})
        assert loaded.status_code == 200, loaded.text
        asked = {"model": name, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
        answer = vllm.post("/v1/completions", json=asked).json()
        vllm.post("/v1/unload_lora_adapter", json={"lora_name": name})
    rows = answer["choices"][0]["prompt_logprobs"][1:]
    return np.asarray([row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:], strict=True)])


@pytest.fixture(scope="module")
def trained(server: DemoServer, tokenizer: PreTrainedTokenizerBase) -> Iterator[tinker.TrainingClient]:
    """With other ranks in some layers, as the released SDK asks for them."""
    metadata = {"skyrl.rank_pattern": json.dumps({"q_proj": 2, r"layers\.0\.mlp\..*": 5, "lm_head": 4})}
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as client:
        trainer = client.create_lora_training_client("tiny", rank=8, seed=3, user_metadata=metadata).result()
        train(trainer, [cross_entropy(tokenizer.encode(TEXT))], 6, 1e-2)
        yield trainer


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_an_archive_loads_in_stock_peft_and_stock_vllm(
    server: DemoServer,
    trained: tinker.TrainingClient,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    kind: str,
) -> None:
    if kind == "weights":
        path = trained.save_state("taken").result().path
    else:
        path = trained.save_weights_for_sampler("taken").result().path
    adapter = archive_of(server, path, tmp_path / "adapter")
    for text in (TEXT, OTHERS):
        tokens = tokenizer.encode(text)
        passed = trained.forward([cross_entropy(tokens)], "cross_entropy").result()
        ours = np.asarray(passed.loss_fn_outputs[0]["logprobs"].data)
        np.testing.assert_allclose(logprobs_in_peft(adapter, tokens), ours, atol=1e-4)
        np.testing.assert_allclose(logprobs_in_vllm(server, adapter, tokens), ours, atol=1e-3)
        if text == TEXT:
            assert ours.mean() > -1.0, "the adapter has learned the text, which is far less likely without it"


def test_a_model_from_a_checkpoint_has_its_ranks(
    connect: ClientFactory, trained: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = [cross_entropy(tokenizer.encode(TEXT))]
    expected = trained.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    path = trained.save_state("ranks").result().path
    resumed = connect().create_training_client_from_state_with_optimizer(path).result()
    assert resumed.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data == expected
    assert resumed.get_info().lora_rank == 8


def test_an_export_goes_out_and_comes_back_as_an_upload(
    server: DemoServer, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    """By HTTP alone: no release of the SDK that can be installed uploads yet."""
    trained = connect().create_lora_training_client("tiny", rank=8, seed=3).result()
    train(trained, [cross_entropy(tokenizer.encode(TEXT))], 6, 1e-2)
    prompt = tokenizer.encode(TEXT)[:4]
    exported = trained.save_weights_external("out").result().path
    expected = greedy(trained.save_weights_and_get_sampling_client().result(), prompt)
    model_id, _, name = exported.removeprefix("tinker://").split("/")
    route = f"/api/v1/training_runs/{model_id}/checkpoints/external_weights/{name}/external_weights_urls"
    with httpx.Client(base_url=server.url, headers={"X-API-Key": "tml-test"}, trust_env=False) as http:
        links = http.get(route).json()["urls"]
        files = {name: httpx.get(link, trust_env=False).content for name, link in links.items()}
        body = {"base_model": "tiny", "lora_config": {"rank": 8}}
        started = http.post("/api/v1/external_weights_upload_start", json=body).json()
        for name, link in started["urls"].items():
            answer = httpx.put(link["url"], content=files[name], headers=link["headers"], trust_env=False)
            assert answer.status_code == 200, answer.text
        answer = http.post("/api/v1/external_weights_upload_finish", json={"upload_id": started["upload_id"]})
        assert answer.status_code == 200, answer.text
        path = answer.json()["tinker_path"]
    assert greedy(connect().create_sampling_client(model_path=path).result(), prompt) == expected
    loaded = connect().create_training_client_from_state(path).result()
    tokens = tokenizer.encode(TEXT)
    passes = [client.forward([cross_entropy(tokens)], "cross_entropy").result() for client in (trained, loaded)]
    first, second = (np.asarray(each.loss_fn_outputs[0]["logprobs"].data) for each in passes)
    np.testing.assert_array_equal(first, second)


def test_a_checkpoint_is_merged_by_its_path(
    server: DemoServer,
    trained: tinker.TrainingClient,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = tokenizer.encode(TEXT)
    passed = trained.forward([cross_entropy(tokens)], "cross_entropy").result()
    ours = np.asarray(passed.loss_fn_outputs[0]["logprobs"].data)
    environment = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-test"}
    merge = ["adapter", "merge", "--dtype", "float32", "tiny"]
    for name, path in (
        ("state", trained.save_state("merged").result().path),
        ("export", trained.save_weights_external("merged").result().path),
    ):
        done = CliRunner().invoke(app, [*merge, path, str(tmp_path / name)], env=environment)
        assert done.exit_code == 0, done.output
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0]
        merged = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(merged, ours, atol=1e-4)
        # The other merge runs here: the command's own process imports torch and transformers, 8 s of CPU.
        monkeypatch.setattr(models, "_run", lambda tool, *arguments: merge_adapter.main(*arguments))
    done = CliRunner().invoke(app, [*merge, f"{path}-lost", str(tmp_path / "lost")], env=environment)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("skyrl adapter merge: the server answers 404: checkpoint_id: no checkpoint")


def test_an_adapter_without_local_files_can_be_sampled_from(
    server: DemoServer, connect: ClientFactory, trained: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = tokenizer.encode(TEXT)[:4]
    path = trained.save_weights_for_sampler("lost-and-found").result().path
    sampler = connect().create_sampling_client(model_path=path).result()
    expected = greedy(sampler, prompt)
    local = adapter_of(server, sampler)
    shutil.rmtree(local)
    again = connect().create_sampling_client(model_path=path).result()
    assert (local / "adapter_model.safetensors").exists()
    assert greedy(again, prompt) == expected
