"""Configurations that `skyrl serve` refuses before it starts a process. A server on this machine plays the model
hub."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.tiny import model_path
from skyrl.cli.launcher import model_location, preflight
from skyrl.cli.launcher.preflight import check, check_base_model, check_gpus, check_inference_port
from skyrl.inference import features
from skyrl.inference.features import check_vllm
from skyrl.inference.vllm_plugin.protocol import TESTED_VERSIONS


class Hub(BaseHTTPRequestHandler):
    """Answers as the real hub does: one model exists, each other name has another fault."""

    def do_HEAD(self) -> None:
        codes = {"/good/": (200, ""), "/gated/": (401, "GatedRepo"), "/data/": (404, "EntryNotFound")}
        codes |= {
            "/unknown/": (401, "RepoNotFound"),
            "/ill/": (503, ""),
            "/elsewhere/": (302, ""),
            "/renamed/": (307, ""),
        }
        status, code = next(answer for start, answer in codes.items() if self.path.startswith(start))
        assert self.path.endswith("/model/resolve/main/config.json")
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if status == 302:
            self.send_header("Location", "http://store.invalid/config.json")
        if status == 307:
            self.send_header("Location", self.path.replace("/renamed/", "/unknown/"))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of the hub, which the libraries now use. The local cache is empty."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield url
    server.shutdown()
    server.server_close()


def config_of(model: Path | str, **inference: Any) -> ServerConfig:
    return load_config({"base_model": str(model), "backend_config": {"generator.inference_engine": inference}})


def put_in_cache(cache: Path, name: str) -> None:
    """Lay out a model as the hub's library does after a download."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")


def test_a_directory_with_a_model_and_the_built_in_model_are_accepted(tmp_path: Path) -> None:
    assert check_base_model(config_of(model_path()))
    assert check_base_model(config_of("tiny"))
    assert check_base_model(load_config({}))


@pytest.mark.parametrize(
    ("base_model", "message"),
    [
        ("./models/Qwen3", "there is no directory './models/Qwen3'"),
        ("/no/such/model", "there is no directory '/no/such/model'"),
        ("~/no/such/model", "there is no directory '~/no/such/model'"),
        ("a/b/c", "there is no directory 'a/b/c'"),
    ],
)
def test_a_path_without_a_directory_is_refused(base_model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^base_model: {message}.*it is no hub name$"):
        check_base_model(config_of(base_model))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is empty"),
        ({"README.md": "x"}, "it has no config.json"),
        ({"config.json": "{"}, "config.json cannot be read"),
        ({"config.json": "[]"}, "it is no JSON object"),
        ({"config.json": "{}", "tokenizer.json": "{}"}, "holds no weights"),
    ],
    ids=["empty", "no config", "no JSON", "no object", "no weights"],
)
def test_a_directory_without_a_complete_model_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text)
    with pytest.raises(ConfigError, match=f"^base_model: .*{message}"):
        check_base_model(config_of(directory))


@pytest.mark.parametrize(
    ("base_model", "message"),
    [
        ("x" * 300, "cannot be read: .*File name too long"),
        ("~nobody-of-this-name/model", "cannot be read: Could not determine home directory"),
        ("two--dashes", "there is no directory 'two--dashes' in .*; as a hub name: Cannot have -- or .. in repo_id"),
        ("Org/Name.git", "as a hub name: Repo_id cannot end by '.git'"),
    ],
    ids=["too long", "no such user", "no hub name", "address of a repository"],
)
def test_an_unreadable_path_and_an_invalid_hub_name_are_refused(hub: str, base_model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^base_model: .*{message}"):
        check_base_model(config_of(base_model))


def test_a_directory_without_read_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ConfigError, match="^base_model: '.*' cannot be read: .*Permission denied"):
        check_base_model(config_of(tmp_path))


def test_a_file_in_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="is a file; give the directory"):
        check_base_model(config_of(tmp_path / "model.gguf"))


def test_a_model_that_the_hub_has_is_accepted_without_a_download(hub: str) -> None:
    assert not check_base_model(config_of("good/model"))
    assert not check_base_model(config_of("ill/model")), (
        "an error of the hub refuses nothing; the processes will report it"
    )
    assert not check_base_model(config_of("elsewhere/model")), "a mirror that redirects to its file store"


@pytest.mark.parametrize(
    ("base_model", "message"),
    [
        ("unknown/model", "the hub has no model of that name"),
        ("gated/model", "accepted its terms"),
        ("data/model", "no config.json"),
        ("renamed/model", "the hub has no model of that name"),
    ],
)
def test_a_model_that_the_hub_refuses_is_refused(hub: str, base_model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^base_model: there is no directory '{base_model}' in .*{message}"):
        check_base_model(config_of(base_model))


def test_without_the_hub_only_a_cached_model_is_accepted(
    hub: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(ConfigError, match="the model hub http://127.0.0.1:.* cannot be reached"):
            check_base_model(config_of("good/model"))
        put_in_cache(tmp_path / "cache", "good/model")
        assert check_base_model(config_of("good/model")), "the processes start offline, without asking the hub again"


@pytest.mark.parametrize("endpoint", ["no address", "http://[", "http://host:port"])
def test_an_invalid_hub_address_is_refused(hub: str, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(ConfigError, match="the model hub .* cannot be reached"):
        check_base_model(config_of("good/model"))


def test_a_hub_that_does_not_answer_is_given_up_after_the_timeout(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_location, "HUB_TIMEOUT_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match="the model hub"):
            check_base_model(config_of("good/model"))


def test_a_hub_name_that_is_not_cached_is_refused_offline(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        check_base_model(config_of("good/model"))


@pytest.mark.parametrize("name", ["vllm_version", "plugin_installed"])
def test_a_missing_vllm_or_plugin_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(features, name, lambda: "" if name == "vllm_version" else False)
    with pytest.raises(ConfigError, match="install"):
        check_vllm(cuda=False, colocated=False)


def test_an_untested_vllm_is_refused_where_its_samples_could_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_vllm(cuda=False, colocated=False), "the installed version is tested"
    monkeypatch.setattr(features, "vllm_version", lambda: "0.99.0")
    with pytest.raises(ConfigError, match=rf"tested with vLLM {TESTED_VERSIONS[0]}\*, and 0.99.0 is .*another tenant"):
        check_vllm(cuda=False, colocated=False)
    with pytest.raises(ConfigError, match="colocate_all"):
        check_vllm(cuda=True, colocated=True)
    assert not check_vllm(cuda=True, colocated=False), (
        "an untested version runs on a GPU, without development endpoints"
    )


def test_gpus_that_the_machine_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.os, "listdir", lambda _: ["nvidia0", "nvidia1", "nvidiactl"])
    check_gpus(load_config({}), ["0", "1"])
    check_gpus(load_config({}), ["GPU-ab12"])
    with pytest.raises(ConfigError, match="^CUDA_VISIBLE_DEVICES: names GPU 2, and this machine has 2"):
        check_gpus(load_config({}), ["0", "2"])
    with pytest.raises(ConfigError, match="tensor_parallel_size: 4 needs as many GPUs, and there are 2"):
        check_gpus(config_of("tiny", tensor_parallel_size=4), ["0", "1"])
    check_gpus(config_of("tiny", num_engines=2), ["0", "1"])
    check_gpus(config_of("tiny", num_engines=3), [])
    too_few = "num_engines: 2 vLLMs with tensor_parallel_size 2 need 4 GPUs, and there are 2"
    with pytest.raises(ConfigError, match=too_few):
        check_gpus(config_of("tiny", num_engines=2, tensor_parallel_size=2), ["0", "1"])


def test_full_fine_tuning_needs_a_tested_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others do not say which weights have sampled a token."""
    monkeypatch.setattr(preflight, "check_vllm", lambda **_: False)
    with pytest.raises(ConfigError, match="trainer.full_finetuning: needs skyrl's changes to vLLM"):
        check(load_config({"backend_config": {"trainer.full_finetuning": True}}))
    check(load_config({}))


def test_a_port_for_vllm_that_is_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"inference_engine.port: vLLM cannot listen on 127.0.0.1:{port}"):
            check_inference_port(config_of("tiny", port=port))
        either = f"({port - 1}|{port})"  # another program may have the first port
        with pytest.raises(ConfigError, match=f"vLLM cannot listen on 127.0.0.1:{either} "):
            check_inference_port(config_of("tiny", port=port - 1, num_engines=2))
    check_inference_port(config_of("tiny", port=port))
    with pytest.raises(ConfigError, match="8000 is this server's own port"):
        check_inference_port(config_of("tiny", port=8000))


def test_a_gateway_needs_no_base_model_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = {"backend": "none", "base_model": "./nope", "external_inference_url": "http://127.0.0.1:1"}
    assert not check(load_config(gateway)).offline
    with pytest.raises(ConfigError, match="base_model"):
        check(load_config({"base_model": "./nope", "external_inference_url": "http://127.0.0.1:1"}))


def test_a_good_configuration_is_accepted_and_runs_offline(tmp_path: Path) -> None:
    shutil.copytree(model_path(), tmp_path / "model")
    findings = check(config_of(tmp_path / "model"))
    assert (findings.offline, findings.vllm_tested) == (True, True)
    assert json.loads((tmp_path / "model" / "config.json").read_text())
