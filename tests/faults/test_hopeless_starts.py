"""`skyrl serve` ends soon, with a sentence, if it can never become ready: with the real engine and the real vLLM."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.tiny import model_path
from skyrl.runtime.processes.ports import free_port
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
