"""The parts that the launcher makes for each of several base models: their names, needs and environments."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.base.config.several import base_models_of
from skyrl.cli.launcher.base_model_parts import BaseModelParts
from skyrl.cli.launcher.first_ready import FirstReady
from skyrl.cli.launcher.metrics import RestartMetrics
from skyrl.cli.launcher.only_sampled import served_limits
from skyrl.cli.launcher.preflight import Findings, check_each, devices_of
from skyrl.cli.launcher.skyrl_processes import OwnProcesses
from skyrl.inference.placement import LocalPlacement
from skyrl.inference.vllm_command import vllm_spec
from skyrl.runtime.processes.ports import HeldPorts
from skyrl.runtime.processes.runtime import Runtime
from skyrl.runtime.processes.systemd import Systemd
from skyrl.storage.db.database import Database

STUDENT = {"base_model": "tiny", "served_model_names": ["student"]}
TEACHER = {"base_model": "tiny", "served_model_names": ["org/Teacher"], "uses": ["sample"]}
JUDGE = {"base_model": "judge", "uses": ["sample"], "external_inference_url": "http://127.0.0.1:1"}
TWO_VLLMS = {"backend_config": {"generator.inference_engine.num_engines": 2}}


async def needs_of(directory: Path, *entries: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """The parts of all entries with what each needs; those of a server with one base model without entries."""
    values = {"state_dir": directory, "base_models": json.dumps(entries)} if entries else {"state_dir": directory}
    config = load_config(values)
    ready = FirstReady(config, base_models_of(config), directory, Systemd())
    found: dict[str, tuple[str, ...]] = {}
    with HeldPorts() as held, closing(Database(config.database)) as database:
        made = [
            BaseModelParts(part, Findings([]), ready.observer(part), RestartMetrics(), held, LocalPlacement(directory))
            for part in base_models_of(config)
        ]
        runtimes = tuple(parts.runtime(directory, "server", None, 0.0) for parts in made)
        server = Runtime(config, directory, None, None, base_models=runtimes) if entries else runtimes[0]
        own = OwnProcesses(server, directory, ready, offline=True)
        for parts, runtime in zip(made, runtimes, strict=True):
            found |= {part.name: part.needs for part in parts.parts(own, runtime, database, ("claim",))}
    return found


async def test_the_only_base_model_has_parts_without_its_name(tmp_path: Path) -> None:
    assert await needs_of(tmp_path) == {
        "vllm": ("claim",),
        "vllm watch": ("vllm",),
        "engine": ("claim", "vllm watch"),
    }


async def test_each_base_model_has_parts_of_its_name_that_need_no_other_base_models(tmp_path: Path) -> None:
    assert await needs_of(tmp_path, STUDENT | TWO_VLLMS, TEACHER, JUDGE) == {
        "vllm-student-0": ("claim",),
        "vllm-student-0 watch": ("vllm-student-0",),
        "vllm-student-1": ("claim",),
        "vllm-student-1 watch": ("vllm-student-1",),
        "router-student": ("claim", "vllm-student-0 watch", "vllm-student-1 watch"),
        "router-student watch": ("router-student",),
        "engine-student": ("claim", "vllm-student-0 watch", "vllm-student-1 watch", "router-student watch"),
        "vllm-teacher": ("claim",),
        "vllm-teacher watch": ("vllm-teacher",),
        "sampled-teacher": ("claim", "vllm-teacher watch"),
    }


async def test_full_weights_come_through_sidecars_of_their_base_model(tmp_path: Path) -> None:
    full = {"backend_config": {"trainer.full_finetuning": True}}
    needs = await needs_of(tmp_path, STUDENT | full, STUDENT | full | {"served_model_names": ["other"]})
    assert [name for name in needs if name.startswith("sidecar")] == ["sidecar-student-0", "sidecar-other-0"]
    assert needs["sidecar-other-0"] == ("claim", "vllm-other watch")


def test_a_vllm_that_never_gets_adapters_has_no_room_for_them(tmp_path: Path) -> None:
    config = load_config({"state_dir": tmp_path, "base_models": json.dumps([STUDENT, TEACHER])})
    student, teacher = (vllm_spec(part, 1, "key", cuda=False).argv for part in base_models_of(config))
    assert "--enable-lora" in student
    assert not [word for word in teacher if "lora" in word]


def test_the_limits_of_a_base_model_that_is_only_sampled_from_are_those_of_its_vllm(tmp_path: Path) -> None:
    short = TEACHER | {"backend_config": {"generator.inference_engine.max_model_len": 256}}
    config = load_config({"state_dir": tmp_path, "base_models": json.dumps([STUDENT, short])})
    limits = served_limits(base_models_of(config)[1], cuda=False)
    assert (limits.vocab_size, limits.max_context) == (512, 256)


def test_a_base_model_has_the_gpus_of_its_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    entries = [STUDENT | {"devices": ["2", "5"]}, TEACHER, JUDGE | {"base_model": "other", "devices": ["0"]}]
    config = load_config({"state_dir": tmp_path, "base_models": json.dumps(entries)})
    first, second, third = base_models_of(config)
    assert devices_of(first) == ["2", "5"]
    assert devices_of(second) == ["2", "3", "5"]
    with pytest.raises(ConfigError, match="^devices: GPU 0 is none of this server's, which are 2, 3, 5$"):
        devices_of(third)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices_of(first) == [], "they have no effect on a CPU"


def test_a_message_about_one_of_several_base_models_begins_with_its_name(tmp_path: Path) -> None:
    broken = TEACHER | {"base_model": str(tmp_path)}
    config = load_config({"state_dir": tmp_path, "base_models": json.dumps([STUDENT, broken])})
    with pytest.raises(ConfigError, match=f"^org/Teacher: base_model: the directory {tmp_path} is empty"):
        check_each(base_models_of(config))
