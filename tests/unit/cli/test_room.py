"""How many tenants fit, what binds first, and which number `max_loras = "auto"` takes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.backend import MAX_LORAS
from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.tiny import model_path
from skyrl.cli.doctor import checks
from skyrl.cli.launcher import auto_slots, kept_capacity
from skyrl.cli.launcher.auto_slots import with_slots
from skyrl.cli.launcher.kept_capacity import Kept
from skyrl.cli.launcher.room import LORA, MOST_SLOTS, Cores, Room, limits, slots_that_fit
from skyrl.runtime.processes import gpus
from skyrl.runtime.processes.gpus import MIB, GpuMemory, parse

GB = 10**9


def room(**changes: Any) -> Room:
    """20 GB, of which 11 are left for adapters in training with no adapter in vLLM."""
    values = {
        "available": 20.0,
        "ready": 4.0,
        "passing": 3.0,
        "sampling": 2.0,
        "adapter": 0.5,
        "slot": 0.1,
        "kept": 0.1,
    }
    counts = {name: changes.pop(name) for name in ("engines", "of_longest") if name in changes}
    return Room(**{name: value * GB for name, value in (values | changes).items()}, **counts)


def test_tenants_divide_what_vllm_and_the_largest_pass_leave() -> None:
    assert room().tenants(0, 0) == 22
    assert room().tenants(10, 20) == 16, "3 GB less"
    assert room(engines=2).tenants(10, 20) == 6, "each vLLM has its cache, its slots and its adapters"
    assert room(available=9.0).tenants(0, 0) == 0
    assert room(available=9.0).tenants(10, 20) == 0
    assert room(adapter=0.0).tenants(1, 1) == 0, "unknown is not boundless"


def test_auto_takes_a_slot_for_each_tenant_that_fits_and_no_more() -> None:
    number = slots_that_fit(room(), kept=8, most=MOST_SLOTS)
    assert room().tenants(number, number) >= number
    assert room().tenants(number + 1, number + 1) < number + 1
    assert slots_that_fit(room(available=500.0), kept=8, most=MOST_SLOTS) == MOST_SLOTS
    assert slots_that_fit(room(available=500.0), kept=8, most=5) == 5
    assert slots_that_fit(room(available=1.0), kept=8, most=MOST_SLOTS) == 1, "a vLLM has one slot at least"


def test_what_binds_first_comes_first_with_the_key_that_changes_it() -> None:
    found = limits(room(), 8, 20, cores=Cores(there=2, busy=1.9), sequences=160.0, of_tenant=16, threads=2)
    assert [(limit.what, limit.tenants) for limit in found] == [
        ("cores", 1),
        ("slots", 8),
        ("key-value cache", 10),
        ("memory", 16),
        ("kept adapters", 20),
    ]
    keys = {limit.what: limit.key for limit in found}
    assert keys["slots"] == MAX_LORAS
    assert keys["kept adapters"] == f"{LORA}.max_cpu_loras"
    assert keys["cores"] == "none: more cores"
    (cores,) = (each for each in limits(room(), 8, 20, cores=Cores(8, 2.0), threads=2) if each.what == "cores")
    assert (cores.tenants, cores.key) == (4, "threads")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, f"{LORA}.max_lora_rank"),
        ({"passing": 10.0}, "trainer.micro_batch_tokens"),
        ({"passing": 10.0, "of_longest": True}, "generator.inference_engine.max_model_len"),
        ({"kept": 0.5}, f"{LORA}.max_cpu_loras"),
        ({"slot": 1.2}, MAX_LORAS),
        ({"sampling": 9.0}, "generator.inference_engine.max_model_len"),
    ],
)
def test_where_memory_binds_the_key_is_that_of_the_largest_part(changes: dict[str, float], key: str) -> None:
    (memory,) = (limit for limit in limits(room(**changes), 8, 16) if limit.what == "memory")
    assert memory.key == key


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, and a machine without GPUs with 20 GB of free memory."""
    for name in [name for name in os.environ if name.startswith("SKYRL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in (auto_slots, kept_capacity):
        monkeypatch.setattr(module, "cuda_devices", list)
    monkeypatch.setattr(auto_slots, "free_host_bytes", lambda: 20.0 * GB)
    return tmp_path / "cache" / "skyrl" / "capacity"


def auto(**keys: Any) -> ServerConfig:
    return load_config({"backend_config": {MAX_LORAS: "auto"} | keys})


def chosen(config: ServerConfig) -> tuple[int, str]:
    done, sentence = with_slots(config)
    return done.backend_config.lora.slots, sentence


@pytest.mark.usefixtures("cache")
def test_auto_is_estimated_where_nothing_was_measured_and_other_keys_bound_it(tmp_path: Path) -> None:
    number, sentence = chosen(auto())
    assert number == MOST_SLOTS
    assert f"{MAX_LORAS}: auto is {MOST_SLOTS}: estimated by 20.0 GB of free memory" in sentence
    assert sentence.endswith("skyrl capacity has not measured this model here")
    assert chosen(auto(**{f"{LORA}.max_cpu_loras": 6}))[0] == 6
    assert chosen(auto(**{"generator.inference_engine.max_num_seqs": 3}))[0] == 3
    large = json.loads((model_path() / "config.json").read_text()) | {"hidden_size": 8192, "num_hidden_layers": 64}
    (tmp_path / "config.json").write_text(json.dumps(large))
    (tmp_path / "model.safetensors").write_bytes((model_path() / "model.safetensors").read_bytes())
    config = load_config({"base_model": str(tmp_path), "backend_config": {MAX_LORAS: "auto"}})
    few, sentence = chosen(config)
    assert 1 <= few < 8, sentence
    mixture = large | {"num_experts": 8, "moe_intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(mixture))
    assert chosen(config)[0] == 8
    assert "the default, as config.json does not tell" in chosen(config)[1]


def test_auto_takes_the_number_of_a_capacity_run_of_the_same_configuration_and_machine(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, _ = with_slots(auto())
    file = kept_capacity.write(done, Kept(11, 19.0 * GB, "today"))
    assert file.parent == cache
    assert chosen(auto()) == (11, f"{MAX_LORAS}: auto is 11: skyrl capacity has measured it on today")
    assert chosen(load_config({"port": 9000, "backend_config": {MAX_LORAS: "auto"}}))[0] == 11, "not capacity's matter"
    shutil.copytree(model_path(), tmp_path / "tiny")
    changed = {"base_model": str(tmp_path / "tiny"), "backend_config": {MAX_LORAS: "auto"}}
    others = [auto(**{f"{LORA}.max_lora_rank": 8}), auto(**{"trainer.micro_batch_tokens": 64}), load_config(changed)]
    for other in others:
        assert "has not measured" in chosen(other)[1]
    kept_capacity.write(with_slots(others[2])[0], Kept(12, 19.0 * GB, "today"))
    assert chosen(others[2])[0] == 12
    with (tmp_path / "tiny" / "model.safetensors").open("ab") as weights:
        weights.write(b"more")
    assert "has not measured" in chosen(others[2])[1]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(kept_capacity, "limit_bytes", lambda: 64.0 * GB)
        assert "has not measured" in chosen(auto())[1]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(kept_capacity, "cuda_devices", lambda: ["0"])
        files = set()
        for total in (40.0, 80.0):
            elsewhere.setattr(kept_capacity, "gpu_memory", lambda total=total: {"0": GpuMemory(total * GB, 0)})
            files.add(kept_capacity.file_of(done))
        assert len(files) == 2
    monkeypatch.setattr(auto_slots, "free_host_bytes", lambda: 12.0 * GB)
    number, sentence = chosen(auto())
    assert number == MOST_SLOTS
    assert sentence.endswith("12.0 GB are free, and 19.0 GB were at the measurement of today")
    file.write_text("[]")
    assert "has not measured" in chosen(auto())[1]


def test_the_cache_keeps_the_newest_answers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_capacity, "MOST_FILES", 3)
    configs = [with_slots(auto(**{"trainer.micro_batch_tokens": 64 + number}))[0] for number in range(5)]
    for number, config in enumerate(configs):
        file = kept_capacity.write(config, Kept(number + 1, 1.0, "today"))
        os.utime(file, (number, number))
    assert [kept_capacity.read(config) is not None for config in configs] == [False, False, True, True, True]
    assert len(list(cache.iterdir())) == 3


@pytest.mark.usefixtures("cache")
def test_auto_is_refused_where_there_is_no_one_base_model_with_adapters_here() -> None:
    entries = [{"base_model": "tiny"}, {"base_model": "tiny", "served_model_names": ["b"], "uses": ["sample"]}]
    backend = {"backend_config": {MAX_LORAS: "auto"}}
    for given in (
        {"base_models": entries, **backend},
        {"base_models": [{"base_model": "tiny", **backend}]},
        {"ray_address": "local", **backend},
        {"backend_config": {MAX_LORAS: "auto", "trainer.full_finetuning": True}},
    ):
        with pytest.raises(ConfigError, match=rf'^{MAX_LORAS}: "auto" is for a server of one base model'):
            with_slots(load_config(given))
    with pytest.raises(ConfigError, match=MAX_LORAS):
        assert auto().backend_config.lora.slots
    gateway = load_config(
        {"backend": "none", "base_model": "x", "external_inference_url": "http://127.0.0.1:1", **backend}
    )
    assert with_slots(gateway) == (gateway, "")
    given = load_config({"backend_config": {MAX_LORAS: 5}})
    assert with_slots(given) == (given, "")


@pytest.mark.parametrize("value", [0, -1, 2.5, "x", "", None, [], float("inf"), float("nan"), "Auto"])
def test_another_value_than_a_number_or_auto_is_refused_by_the_keys_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{MAX_LORAS}': must be a whole number of at least 1, or \"auto\""):
        load_config({"backend_config": {MAX_LORAS: value}})


def test_numbers_may_be_written_in_several_ways() -> None:
    found = [load_config({"backend_config": {MAX_LORAS: value}}).backend_config.lora.slots for value in (4, "4", 4.0)]
    assert found == [4, 4, 4]


@pytest.mark.usefixtures("cache")
def test_auto_keeps_the_other_keys_and_doctor_shows_it(tmp_path: Path) -> None:
    keys = {"generator.inference_engine.port": 12_345, f"{LORA}.alpha": 16.0}
    done = with_slots(auto(**keys))[0].backend_config
    assert (done.inference.port, done.lora.alpha) == (12_345, 16.0)
    file = tmp_path / "skyrl.toml"
    file.write_text(f'backend_config = {{ "{MAX_LORAS}" = "auto" }}')
    (row,) = (row for row in checks(None, tmp_path, file) if row.name == "adapters")
    assert row.found.startswith(f"{MAX_LORAS}: auto is ")


def test_on_a_gpu_slots_take_a_part_of_what_vllm_has_beside_its_weights(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what nvidia-smi prints; no GPU is asked."""
    printed = "0, GPU-a, 81559, 4\n1, GPU-b, [N/A], [N/A]\n"
    assert parse(printed) == {name: GpuMemory(81559.0 * MIB, 4.0 * MIB) for name in ("0", "GPU-a")}
    assert parse("") == parse("No devices were found\n") == {}
    monkeypatch.setattr(gpus, "COMMAND", ("/no/such/program",))
    assert gpus.gpu_memory() == {}
    for module in (auto_slots, kept_capacity):
        monkeypatch.setattr(module, "cuda_devices", lambda: ["0"])
    assert "not known" in chosen(auto())[1]
    monkeypatch.setattr(auto_slots, "gpu_memory", lambda: {"0": GpuMemory(40.0 * MIB, 0)})
    beside = 20 * MIB - 2 * 648_320
    slot = 2 * 32 * (3 * (7 * 128 + 2 * 128 + 2 * 64 + 3 * 320) + 128 + 512)
    assert chosen(auto())[0] == beside // 4 // slot == 10
    monkeypatch.setattr(auto_slots, "gpu_memory", lambda: parse(printed))
    assert chosen(auto())[0] == MOST_SLOTS
    monkeypatch.setattr(
        gpus.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0, stdout=printed, stderr="")
    )
    assert gpus.gpu_memory() == parse(printed)
