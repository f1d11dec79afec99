"""A vLLM without skyrl's plugin takes adapters with other names and samples the base model: the probe finds that out,
and passes those that it uses."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from skyrl.base.adapter_files import PEFT_JSON, PEFT_TENSORS
from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.base.types.weights import LoraSpec
from skyrl.http.client import HttpClient
from skyrl.inference.vllm_command import vllm_spec
from skyrl.runtime.processes.ports import free_port
from skyrl.sampling.adapter_probe import LEAST_CHANGE, AdapterProbe
from skyrl.trainer import create_backend

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

KEY = "key-of-the-external-vllm"


@pytest.fixture(scope="module")
def stock_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("stock")
    config = load_config({"base_model": "tiny", "state_dir": directory})
    spec = vllm_spec(config, free_port(), KEY, cuda=False)
    with (directory / "vllm.log").open("wb") as log:
        process = subprocess.Popen(spec.argv, env=os.environ | spec.env | {"VLLM_PLUGINS": ""}, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 400
        while not _answers(spec.url):
            assert process.poll() is None, (directory / "vllm.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield spec.url
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that barely changes anything, the same with the names of another class, and one that changes nothing."""
    config = load_config({"base_model": str(model_path()), "state_dir": tmp_path_factory.mktemp("trainer")})
    backend = create_backend(config)
    found = {name: tmp_path_factory.mktemp(name) for name in ("fits", "renamed", "zero")}
    spec = LoraSpec(4, 32.0, 1)
    kinds = [each.name.rpartition("layers.")[2].partition(".")[2] or each.name for each in backend.layers_of(spec)]
    backend.create_probe("fits", spec, kinds, 1e-7)
    backend.create_model("zero", spec)
    for name in ("fits", "zero"):
        backend.save_adapter(name, found[name])
    backend.close()
    tensors = load_file(found["fits"] / PEFT_TENSORS)
    other = {name.replace("model.layers", "model.language_model.layers"): each for name, each in tensors.items()}
    other = {name: each for name, each in other.items() if "lm_head" not in name}
    save_file(other, found["renamed"] / PEFT_TENSORS)
    described = json.loads((found["fits"] / PEFT_JSON).read_text())
    described["target_modules"] = [name for name in described["target_modules"] if name != "lm_head"]
    (found["renamed"] / PEFT_JSON).write_text(json.dumps(described))
    return found


def test_an_ignored_adapter_is_found_however_small_it_is(
    stock_url: str, adapters: dict[str, Path], tmp_path: Path
) -> None:
    found, changes = asyncio.run(_ask(stock_url, adapters, tmp_path / "scratch"))
    assert found == {"fits": False, "renamed": True, "zero": False}
    assert changes["renamed"] < LEAST_CHANGE / 10
    assert changes["fits"] > 4 * LEAST_CHANGE
    assert not list((tmp_path / "scratch").iterdir()), "the larger adapters are deleted"
    headers = {"Authorization": f"Bearer {KEY}"}
    listed = httpx.get(f"{stock_url}/v1/models", headers=headers, trust_env=False).json()["data"]
    assert {each["id"] for each in listed} == {"tiny"}, "the larger adapters are unloaded"


async def _ask(url: str, adapters: dict[str, Path], scratch: Path) -> tuple[dict[str, bool], dict[str, float]]:
    transport, changes = HttpClient(), {}
    probe = Noted(transport, KEY, "tiny", scratch)
    try:
        found = {}
        for name, directory in adapters.items():
            found[name] = await probe.ignored(url, str(directory))
            changes[name] = probe.change
        assert not await probe.ignored(url, str(adapters["fits"]))
        assert probe.asked == 2, "known layers are not compared again"
        return found, changes
    finally:
        await transport.close()


class Noted(AdapterProbe):
    """Keeps what was measured."""

    asked, change = 0, math.nan

    async def _change(self, url: str, name: str, probe: Path) -> float | None:
        self.asked += 1
        began = time.monotonic()
        change = await super()._change(url, name, probe)
        print(f"a change of {change} nats, found in {time.monotonic() - began:.3f} s")
        assert change is not None
        self.change = change
        return change
