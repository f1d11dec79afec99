"""`skyrl capacity`: what follows from measurements, what it refuses, what its server finds, and what it prints."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.cli.capacity.answer import Answer, Found, Load, Operation, Passed, Setting, Throughput, advice, answer_of
from skyrl.cli.capacity.client import Clock, Failed, Tenant, kept_busy
from skyrl.cli.capacity.measure import Course
from skyrl.cli.capacity.memory import DeviceMemory, HostMemory
from skyrl.cli.capacity.run import environment_of
from skyrl.cli.capacity.view import view
from skyrl.cli.demo.server import DemoServer
from skyrl.cli.launcher.kept_capacity import of_backend
from skyrl.cli.launcher.memory_estimate import need_of, size_of
from skyrl.cli.main import app
from skyrl.runtime.processes.usage import parts_of_server, shared_bytes

GB, MB = 1e9, 1e6
LORA = "trainer.policy.model.lora"
SETTING = Setting("tiny", 32, 8, 64, 32, engines=1, cores=2, threads=2, gpus=())
LOAD = Load(prompt=64, answer=32, samples=16, trained=512)
FOUND = Found(
    available=20 * GB,
    ready={"trainer": 0.4 * GB, "vLLM": 0.8 * GB, "server": 0.2 * GB},
    passed=Passed(4096, 0.6 * GB, full=True),
    adapter=4 * MB,
    sampled=1 * MB,
    cache_tokens=174_784,
    throughput=[Throughput("training and sampling", 300.0, 700.0, {"trainer": 0.4, "vLLM": 0.9, "server": 0.1})],
    operations=[Operation("optim_step", 3, 0.02, 0.03)],
    start_s=20.0,
    notes=["something was not measured"],
)


def answer(found: Found = FOUND, setting: Setting = SETTING, **keys: Any) -> Answer:
    config = load_config({"base_model": "tiny", "backend_config": keys})
    size = size_of(config.base_model_path)
    assert size is not None
    return answer_of(setting, LOAD, found, need_of(config, size))


def test_tenants_slots_and_limits_follow_from_what_was_measured() -> None:
    found = answer()
    assert found.room is not None
    tenants = {limit.what: limit.tenants for limit in found.limits}
    assert found.limits[0].what == "cores"
    assert tenants["cores"] == 1, "a tenant keeps 1.4 of 2 cores busy"
    assert tenants["slots"] == 8
    assert tenants["kept adapters"] == 64
    assert tenants["key-value cache"] == 174_784 // 96 // 16
    assert tenants["memory"] == found.tenants
    kept = 1 * MB * (3 * 2240 + 640) / (3 * 2240 + 2 * 640)
    assert (found.room.kept, found.room.slot) == (pytest.approx(kept), pytest.approx(1 * MB - kept)), "the output layer"
    beside = found.room.sampling + 8 * (1 * MB - kept) + 64 * kept
    at_most = 0.6 * GB - 0.4 * GB - 4 * MB
    assert found.room.passing == pytest.approx(at_most), "as a longest sequence fills a micro-batch here"
    assert found.tenants == int((20 - 1.4) * GB - at_most - beside) // int(4 * MB)
    assert found.auto == 32
    assert "set 32" in advice(found)
    assert answer(setting=replace(SETTING, slots=32)).slots == 32
    assert "takes 32 from now on" in advice(answer(setting=replace(SETTING, slots=None)))
    little = answer(replace(FOUND, available=1.7 * GB))
    assert (little.tenants, little.auto, little.limits[0].what) == (0, 1, "memory")


def test_what_was_not_measured_is_estimated_and_without_an_estimate_nothing_follows_from_it() -> None:
    estimated = answer(replace(FOUND, adapter=None)).room
    assert estimated is not None
    assert estimated.adapter == 16 * 32 * (3 * 2240 + 640)
    smaller = replace(FOUND, passed=Passed(512, 0.5 * GB, full=False))
    drawn = answer(smaller)
    assert drawn.room is not None
    factor = 0.5 * GB / drawn.predicted["pass"]
    assert drawn.room.passing == pytest.approx(factor * drawn.predicted["largest pass"] - 0.4 * GB - 4 * MB)
    assert (drawn.off["pass"], "largest pass" in drawn.off) == (pytest.approx(1 / factor - 1), False)
    none = replace(FOUND, passed=None, adapter=None, sampled=None, throughput=[])
    assert answer(none).tenants is not None
    for found in (none, replace(FOUND, adapter=None), smaller):
        little = answer_of(SETTING, LOAD, found, None)
        assert (little.tenants, little.auto, little.limits) == (None, None, [])
        assert "give more --minutes" in advice(little)


def test_api_processes_that_the_measured_server_lacks_count() -> None:
    one, three = answer().room, answer(setting=replace(SETTING, more_apis=2)).room
    assert one is not None
    assert three is not None
    assert three.ready == one.ready + 220 * MB


def test_a_prediction_that_is_far_off_is_said() -> None:
    def printed(found: Found, estimated: bool = True) -> str:
        console = Console(file=io.StringIO(), width=200)
        console.print(view(answer(found) if estimated else answer_of(SETTING, LOAD, found, None)))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    near = printed(FOUND)
    assert "more than 15 %" not in near
    assert "note: something was not measured" in near
    assert f"{LORA}.max_loras" in near
    assert "optim_step" in near
    far = printed(replace(FOUND, ready=FOUND.ready | {"vLLM": 2.0 * GB}))
    assert "more than 15 % from what skyrl doctor predicts: vLLM, ready" in far
    little = printed(replace(FOUND, passed=None, adapter=None), estimated=False)
    assert "tenants can train" not in little
    assert "binds first" not in little
    assert "optim_step" in little
    assert "trainer, at most" not in little
    assert [line.split()[-2:] for line in far.splitlines() if line.startswith("trainer, at most")] == [["–", "539.7"]]


def test_on_gpus_a_vllms_share_does_not_change_with_its_adapters() -> None:
    ready = {"trainer": 50 * GB}
    passed = Passed(4096, 50.206 * GB, full=True)
    measured = replace(FOUND, available=80 * GB, ready=ready, passed=passed)
    found = answer_of(replace(SETTING, gpus=("0",)), LOAD, measured, None)
    assert found.tenants == int((80 - 50.202) * GB // (4 * MB))
    assert "cores" not in {limit.what for limit in found.limits}
    assert found.off == {}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"backend_config": json.dumps({"trainer.full_finetuning": True})}, "trainer.full_finetuning"),
        ({"config": 'external_inference_url = "http://127.0.0.1:1"'}, "external_inference_url"),
        ({"config": 'ray_address = "local"'}, "ray_address"),
        ({"config": '[[base_models]]\nbase_model = "tiny"'}, "base_models"),
        ({"config": 'backend = "none"\nexternal_inference_url = "http://127.0.0.1:1"\nbase_model = "x"'}, "backend"),
        ({"base_model": "/nowhere"}, "base_model"),
        ({"backend_config": '{"trainer.policy.model.lora.max_loras": 0}'}, f"{LORA}.max_loras"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_the_name_of_its_key(
    given: dict[str, str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("SKYRL_")]:
        monkeypatch.delenv(name)
    if "config" in given:
        (tmp_path / "skyrl.toml").write_text(given["config"])
        given["config"] = str(tmp_path / "skyrl.toml")
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    done = CliRunner().invoke(app, ["capacity", *flags])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("skyrl capacity: ")
    assert key in done.stderr


def test_the_measured_server_has_the_keys_of_its_capacity_and_none_of_a_real_servers_state(tmp_path: Path) -> None:
    file = tmp_path / "skyrl.toml"
    file.write_text(
        f'state_dir = "{tmp_path}"\ndatabase_url = "postgresql://real/server"\nport = 9000\napi_keys = "managed"\n'
        f'adapter_dtype = "bfloat16"\nbase_model = "{model_path()}"\nserved_model_names = ["a", "b"]\nthreads = 1\n'
        '[losses]\nstable_reinforce = "cispo"\n'
        "[backend_config.generator.inference_engine]\nport = 9001\nmax_model_len = 512\n"
    )
    config = load_config({}, file)
    found = environment_of(config, {"PATH": "/bin", "SKYRL_STATE_DIR": "/real", "SKYRL_THREADS": "7"})
    assert found == {
        "PATH": "/bin",
        "SKYRL_ADAPTER_DTYPE": "bfloat16",
        "SKYRL_BASE_MODEL": str(model_path()),
        "SKYRL_SERVED_MODEL_NAMES": '["a", "b"]',
        "SKYRL_LOSSES": '{"stable_reinforce": "cispo"}',
        "SKYRL_THREADS": "1",
        "SKYRL_SESSION_TIMEOUT_S": "86400",
        "SKYRL_STOP_GRACE_S": "5.0",
    }
    assert of_backend(config) == {"generator.inference_engine.max_model_len": 512}


@pytest.mark.parametrize(("row_s", "rows"), [(1e-6, 4096), (0.01, 1536), (10.0, 512)])
def test_the_largest_pass_is_what_the_time_allows(
    row_s: float, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With 107 s left."""
    course = course_in(tmp_path, Clock(107))
    monkeypatch.setattr(course, "_peak", lambda tenant, rows: 1000.0 + 2 * rows)
    monkeypatch.setattr(course, "_row_s", row_s)
    course._tenants.append(cast(Tenant, None))
    course._largest_pass()
    assert course._passed == Passed(rows, 1000.0 + 2 * rows, full=rows == 4096)


def course_in(directory: Path, clock: Clock) -> Course:
    shape: dict[str, Any] = {"base_model": "tiny", "rank": 8, "vocabulary": 512, "adapter": 4e6, "slots": 2}
    return Course(DemoServer(directory), HostMemory(), clock, LOAD, rows=4096, say=lambda what: None, **shape)


def test_what_the_time_does_not_allow_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over before the first operation, and while operations are repeated."""
    clock = Clock(-1)
    course = course_in(tmp_path, clock)
    monkeypatch.setattr(course._memory, "used", lambda: {"trainer": 1.0, "vLLM": 2.0, "server": 3.0})
    monkeypatch.setattr("skyrl.cli.capacity.measure._cache_tokens", lambda logs: None)
    monkeypatch.setattr(DemoServer, "pid", 1)
    with ExitStack() as stack:
        found = course.run(stack)
    assert found.ready == {"trainer": 1.0, "vLLM": 2.0, "server": 3.0}
    assert (found.passed, found.operations, found.throughput) == (None, [], [])
    (note,) = found.notes
    for part in ("training", "the largest training pass", "adapters in training", "training and sampling"):
        assert part in note
    assert list(course._repeated()) == [0]
    assert list(course_in(tmp_path, Clock(60))._repeated()) == [0, 1, 2]


def test_time_that_is_over_ends_the_measurement() -> None:
    Clock(60).check()
    with pytest.raises(Failed, match="--minutes"):
        Clock(-1).check()


def test_workers_are_called_until_the_time_is_over_and_their_errors_come_out() -> None:
    calls: list[float] = []

    def works() -> float:
        time.sleep(0.01)
        calls.append(3.0)
        return 3.0

    (counted,) = kept_busy([works], 0.5)
    assert sum(calls[:-1]) <= counted <= sum(calls), "the last call counts with the part before the end"
    assert counted > 0

    def fails() -> float:
        raise Failed("no more")

    with pytest.raises(Failed, match="no more"):
        kept_busy([works, fails], 0.5)


def test_gpus_that_do_not_tell_their_memory_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.cli.capacity.memory.gpu_memory", dict)
    with pytest.raises(Failed, match="GPU 3"):
        DeviceMemory(["3"])


def test_pages_that_processes_share_count_once_whoever_else_has_them() -> None:
    """Two processes of the same program share its files; the sum does not change with a third one that is not asked
    for."""
    program = "import numpy, sys; print(1, flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    children = [subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) for _ in range(3)]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"1\n"
        first, second, third = (child.pid for child in children)
        alone, both = shared_bytes([first])[first], shared_bytes([first, second])
        assert both[first] < 0.9 * alone
        assert sum(both.values()) < 1.9 * alone
        assert third not in both
        parts = parts_of_server(os.getpid())
        assert {first, second, third, os.getpid()} <= set(parts["server"])
        assert parts["trainer"] == parts["vLLM"] == []
    finally:
        for child in children:
            child.communicate()
    assert shared_bytes([first]) == {first: 0}, "it has ended"


def test_the_peak_of_a_trainer_is_what_it_rose_to_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of files that it shares with another part of the server count half, at the peak as before it."""
    memory = HostMemory()
    program = "import numpy, sys; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        parts = {"trainer": [os.getpid()], "vLLM": [other.pid]}
        monkeypatch.setattr("skyrl.cli.capacity.memory.parts_of_server", lambda pid: parts)
        memory.watch()
        before = memory.used()["trainer"]
        assert memory.peak() - before < 8 * MB
        assert sum(bytearray(b"x" * int(80 * MB))[::4096])
        assert 70 * MB < memory.peak() - before < 300 * MB
        other.communicate()
