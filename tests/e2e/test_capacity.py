"""`skyrl capacity`: its course on a running server, and the whole command, which leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl.base.config.backend import MAX_LORAS
from skyrl.base.config.loading import load_config
from skyrl.cli.capacity import measure
from skyrl.cli.capacity.answer import Load
from skyrl.cli.capacity.client import Clock
from skyrl.cli.capacity.measure import Course
from skyrl.cli.capacity.memory import HostMemory
from skyrl.cli.demo.server import DemoServer
from skyrl.cli.launcher.auto_slots import with_slots
from skyrl.cli.launcher.main import with_threads
from tests.servers import SLOW_START_S

pytestmark = pytest.mark.vllm

WINDOWS = {"sampling, 1 adapter", "sampling, 2 adapters", "training alone", "training and sampling"}
OPERATIONS = {
    *("create_model", "forward", "forward_backward", "optim_step", "save_weights_for_sampler", "sample"),
    *("first token of a new version", "save_weights", "load_weights"),
}


def test_a_course_measures_every_operation_and_all_parts_of_a_server(
    server: DemoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the waits for a trainer at rest, and with windows of a moment."""
    monkeypatch.setattr(measure, "SHORTEST_S", 0.2)
    monkeypatch.setattr(measure, "LONGEST_S", 0.2)
    monkeypatch.setattr(measure, "SETTLE_S", 10_000.0)
    memory, said = HostMemory(), []
    memory.launcher = server.pid
    load = Load(prompt=8, answer=4, samples=2, trained=64)
    shape: dict[str, Any] = {
        "base_model": "tiny",
        "rank": 8,
        "vocabulary": 512,
        "rows": 128,
        "adapter": 4e6,
        "slots": 2,
    }
    with ExitStack() as stack:
        found = Course(server, memory, Clock(600), load, say=said.append, **shape).run(stack)
    assert {each.name for each in found.operations} == OPERATIONS
    assert all(0 < each.seconds <= each.most for each in found.operations)
    assert {row.what for row in found.throughput} == WINDOWS
    by_name = {row.what: row for row in found.throughput}
    assert by_name["training alone"].sampled_per_s == 0 < by_name["training alone"].trained_per_s
    assert by_name["sampling, 1 adapter"].trained_per_s == 0 < by_name["sampling, 1 adapter"].sampled_per_s
    assert all(0.1e9 < found.ready[part] < 3e9 for part in ("trainer", "vLLM", "server"))
    assert found.passed is not None
    assert found.passed.full
    assert found.passed.rows == 128
    assert found.cache_tokens is not None
    assert found.cache_tokens > 10_000
    assert found.adapter is None
    assert found.notes == ["not measured, give more --minutes: adapters in training"]
    assert said[0] == "training"


def command(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    """`skyrl capacity` with a cache and a directory for temporary files of its own."""
    (directory / "tmp").mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SKYRL_")}
    own = {"XDG_CACHE_HOME": str(directory / "cache"), "TMPDIR": str(directory / "tmp")}
    line = [sys.executable, "-m", "skyrl.cli.main", "capacity", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, env=clean | own, stdout=pipe, stderr=pipe, text=True)


def left_behind(directory: Path) -> list[str]:
    return [path.name for path in (directory / "tmp").iterdir() if path.name.startswith("skyrl-capacity-")]


@pytest.mark.slow
def test_the_command_measures_the_tiny_model_and_leaves_only_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = command(tmp_path, "--json", "--minutes", "6", "--trained-tokens", "256")
    out, err = running.communicate(timeout=SLOW_START_S)
    assert running.returncode == 0, err
    answer: dict[str, Any] = json.loads(out)
    assert left_behind(tmp_path) == []
    assert answer["tenants"] > 100
    assert {limit["what"] for limit in answer["limits"]} == {
        *("memory", "slots", "kept adapters", "key-value cache", "cores")
    }
    parts = {"trainer", "vLLM", "server", "all", "pass", "adapter in training", "adapter in vLLM"}
    assert answer["off"].keys() == parts
    assert {part: off for part, off in answer["off"].items() if abs(off) > 0.15} == {}
    for name in [name for name in os.environ if name.startswith("SKYRL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, why = with_slots(with_threads(load_config({"backend_config": {MAX_LORAS: "auto"}})))
    assert config.backend_config.lora.slots == answer["auto"]
    assert "skyrl capacity has measured it" in why


@pytest.mark.slow
def test_a_command_that_is_ended_ends_its_server(tmp_path: Path) -> None:
    running = command(tmp_path, "--minutes", "6")
    process = psutil.Process(running.pid)
    deadline = time.monotonic() + SLOW_START_S
    while not (started := process.children(recursive=True)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=SLOW_START_S)
    assert running.returncode == 128 + signal.SIGTERM
    assert left_behind(tmp_path) == []
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in started)
