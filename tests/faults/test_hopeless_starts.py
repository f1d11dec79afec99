"""`skyrl serve` ends soon, with a sentence, if it can never become ready: with the real engine and the real vLLM."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.inference.placement import ServerSpec
from skyrl.inference.vllm_command import vllm_spec
from skyrl.runtime.processes.ports import free_port
from tests.families import save_random
from tests.servers import SLOW_START_S

BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 99,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}


def serve(port: int, state_dir: Path, *options: str, **backend: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skyrl.cli.main", "serve", "--port", str(port)]
    command += ["--state-dir", str(state_dir), "--backend-config", json.dumps(backend), *options]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SKYRL_")}
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=SLOW_START_S, check=False)


def test_serve_ends_with_a_reason_if_the_engine_cannot_train_the_model(tmp_path: Path) -> None:
    model = tmp_path / "bert"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(BERT))
    (model / "model.safetensors").touch()
    external = ("--external-inference-url", "http://127.0.0.1:1")
    port = free_port()
    done = serve(port, tmp_path / "state", "--base-model", str(model), *external)
    assert done.returncode == 2, done.stderr
    assert f"\nskyrl serve: base_model: cannot load {model}: " in done.stderr
    assert f"\nthe end of {tmp_path}/state/logs/engine.log:\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert ": stopping; this takes at most " in done.stderr
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert (tmp_path / "state" / "logs" / "engine.log").read_text().count("engine: start") == 1


@pytest.mark.slow
def test_serve_ends_with_the_file_that_a_model_directory_lacks(tmp_path: Path) -> None:
    """Without another try: a file that the index names does not come by itself, as a file system or a hub does."""
    model = tmp_path / "model"
    shutil.copytree(model_path(), model)
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    weight_map = {"model.norm.weight": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    external = ("--external-inference-url", "http://127.0.0.1:1")
    done = serve(free_port(), tmp_path / "state", "--base-model", str(model), *external)
    assert done.returncode == 2, done.stderr
    said = "model-00002-of-00002.safetensors of the weight_map of model.safetensors.index.json is missing"
    assert f"\nskyrl serve: base_model: cannot load {model}: {said}\n" in done.stderr
    assert (tmp_path / "state" / "logs" / "engine.log").read_text().count("engine: start") == 1


@pytest.mark.slow
@pytest.mark.vllm
def test_serve_ends_with_a_reason_if_vllm_refuses_an_option(tmp_path: Path) -> None:
    refused = {"generator.inference_engine.engine_init_kwargs": {"kv_cache_dtype": "banana"}}
    done = serve(free_port(), tmp_path, **refused)
    assert done.returncode == 2, done.stderr
    key = "generator.inference_engine.engine_init_kwargs.kv_cache_dtype"
    assert f'\nskyrl serve: {key}="banana": vLLM refuses it: argument --kv-cache-dtype: invalid choice' in done.stderr
    assert f"\nthe end of {tmp_path}/logs/vllm.log:\n" in done.stderr
    assert (tmp_path / "logs" / "vllm.log").read_text().count("vllm: start") == 1
    assert "\rLoading" not in (tmp_path / "logs" / "engine.log").read_text(), (
        "the log has no progress bars of libraries"
    )


IGNORED = "o_proj"
KEY = "key-of-the-external-vllm"


@pytest.fixture(scope="module", params=["with skyrl's plugin", "stock"])
def external(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSpec]:
    """A vLLM that somebody else runs, in bfloat16, with adapters on fewer layers than the trainer trains. The plugin
    refuses adapters on the others; without it vLLM ignores that part of an adapter."""
    plugins = {} if request.param != "stock" else {"VLLM_PLUGINS": ""}
    directory = tmp_path_factory.mktemp("external")
    options = {"generator.inference_engine.engine_init_kwargs": {"dtype": "bfloat16"}}
    config = load_config({"base_model": "tiny", "state_dir": directory, "backend_config": options})
    spec = vllm_spec(config, free_port(), KEY, cuda=False)
    argv = [word for word in spec.argv if word != IGNORED]
    assert len(argv) == len(spec.argv) - 1
    with (directory / "vllm.log").open("wb") as log:
        process = subprocess.Popen(argv, env=os.environ | spec.env | plugins, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=spec.url, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False) as http:
            deadline = time.monotonic() + SLOW_START_S
            while not answers(http):
                assert process.poll() is None, (directory / "vllm.log").read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield spec
    finally:
        process.terminate()
        process.wait()


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/health").is_success
    except httpx.TransportError:
        return False


def serve_with(external: ServerSpec, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    file = directory / "skyrl.toml"
    file.write_text(f'external_inference_url = "{external.url}"\nexternal_inference_api_key = "{KEY}"\n')
    compared = {"generator.inference_engine.compare_with_trainer": True}
    return serve(free_port(), directory / "state", "--config", str(file), *options, **compared)


@pytest.mark.slow
@pytest.mark.vllm
def test_serve_ends_with_a_reason_if_vllm_has_no_adapters_on_a_layer_that_is_trained(
    external: ServerSpec, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    done = serve_with(external, tmp_path)
    assert done.returncode == 2, done.stderr
    said = re.search(r"\nskyrl serve: base_model: (.*)", done.stderr)
    assert said is not None, done.stderr
    if "stock" in request.node.name:
        start = rf"a random adapter on self_attn\.{IGNORED} changes the trainer's logprobs"
        assert re.match(rf"{start} by [\d.]+ and vLLM's by 0 \(.*\): vLLM ignores it, so ", said[1]), said[1]
    else:
        assert said[1].startswith("vLLM refuses what clients would ask it for (an adapter on self_attn.")
        assert f"self_attn.{IGNORED}, which vLLM computes without adapters; generator." in said[1]
    log = (tmp_path / "state" / "logs" / "engine.log").read_text()
    assert log.count("engine: start") == 1
    assert "Traceback" not in log
    assert not [*(tmp_path / "state" / "adapters").iterdir()], "the adapters of the comparison are deleted"


@pytest.mark.slow
@pytest.mark.vllm
def test_serve_ends_with_a_reason_if_vllm_serves_other_weights(external: ServerSpec, tmp_path: Path) -> None:
    shape = json.loads((model_path() / "config.json").read_text())
    other = Path(save_random(shape, tmp_path / "other"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, other / name)
    done = serve_with(external, tmp_path, "--base-model", str(other), "--served-model-name", "tiny")
    assert done.returncode == 2, done.stderr
    assert "\nskyrl serve: base_model: vLLM's logprobs of the base model differ from the trainer's by " in done.stderr
    assert ", so vLLM serves other weights or computes another model; " in done.stderr
