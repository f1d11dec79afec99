"""A server with two base models: a student that trains, and a teacher that is only sampled from.

The tests share one server and run in the order of this file; the last ones kill processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families
from tinker import types
from typer.testing import CliRunner

from skyrl.cli.demo.server import DemoServer
from skyrl.cli.main import app
from tests.servers import ready, student_and_teacher

from .conftest import ask, cross_entropy, train, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = types.ModelInput.from_ints([1, 7, 300, 12, 45])
ENDPOINT = "SELECT inference_proxy_url FROM engine_state WHERE base_model = :name"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    with ready(student_and_teacher(tmp_path_factory.mktemp("two"))) as running:
        until(lambda: all(of_model["ready"] for of_model in readiness(running).values()))
        yield running


def readiness(server: DemoServer) -> dict[str, dict[str, object]]:
    return httpx.get(f"{server.url}/readyz", trust_env=False).json()["base_models"]


def processes(server: DemoServer) -> dict[str, psutil.Process]:
    """The server's processes, by the names of their logs."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.Process(server.pid).children():
        with suppress(FileNotFoundError, PermissionError):  # it has ended meanwhile
            log = os.readlink(f"/proc/{process.pid}/fd/1")
            found[log.rpartition("/")[2].removesuffix(".log")] = process
    return found


def endpoint(server: DemoServer, name: str) -> str | None:
    return ask(server, ENDPOINT, name=name)[0][0]


def logprobs(service: tinker.ServiceClient, name: str) -> list[float]:
    """Of the prompt's tokens but the first."""
    client = service.create_sampling_client(base_model=name).result()
    found = client.compute_logprobs(PROMPT).result()
    return [value for value in found if value is not None]


def test_each_base_model_has_its_processes_and_the_teacher_no_engine(server: DemoServer) -> None:
    assert set(processes(server)) == {"vllm-student", "vllm-teacher", "engine-student", "api"}
    logged = (server.state_dir / "serve.log").read_text()
    assert "serving student, teacher on" in logged
    assert "which fits" in logged


def test_the_rows_say_where_each_base_model_is_sampled(server: DemoServer) -> None:
    rows = ask(server, "SELECT base_model, training_ready, reason, vocab_size, max_context FROM engine_state")
    assert sorted(rows) == [
        ("student", 1, "", 512, 4096),
        ("teacher", 0, "this base model is only sampled from", 512, 4096),
    ]
    urls = [endpoint(server, name) for name in ("student", "teacher")]
    assert None not in urls
    assert len(set(urls)) == 2


def base_models_of(server: DemoServer, metric: str) -> set[str | None]:
    """The label `base_model` of a metric's series; None for a series without it."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", trust_env=False).text)
    samples = (sample for family in families for sample in family.samples if sample.name == metric)
    return {sample.labels.get("base_model") for sample in samples}


def test_each_process_labels_its_metrics_with_the_base_model(server: DemoServer) -> None:
    until(lambda: base_models_of(server, "vllm:num_requests_running") == {"student", "teacher"})
    both = ("skyrl_ready", "skyrl_samples_total", "skyrl_adapter_loads_total", "skyrl_vllm_restarts_total")
    found = {metric: base_models_of(server, metric) for metric in both}
    assert found == dict.fromkeys(both, {"student", "teacher"})
    students = ("skyrl_commands_waiting", "skyrl_models", "skyrl_engine_heartbeat_age_seconds", "skyrl_sessions")
    assert {metric: base_models_of(server, metric) for metric in students} == dict.fromkeys(students, {"student"})
    of_server = ("skyrl_samples_refused_total", "skyrl_http_requests_total", "skyrl_state_dir_free_bytes")
    assert {metric: base_models_of(server, metric) for metric in of_server} == dict.fromkeys(of_server, {None})


def test_status_has_the_parts_of_each_base_model(server: DemoServer) -> None:
    environment = {"TINKER_API_KEY": "tml-test", "TINKER_BASE_URL": server.url, "COLUMNS": "160"}
    done = CliRunner().invoke(app, ["status"], env=environment)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert done.exit_code == 0
    assert {"student training and sampling ● ready", "teacher sampling ● ready"} <= set(lines)
    first, second = lines.index("student"), lines.index("teacher")
    assert lines[first + 1 : first + 2] + lines[second + 1 : second + 2] == ["trainer ready", "trainer none"]
    assert [line.startswith("vLLM 0: 0 run, 0 wait") for line in lines].count(True) == 2


def test_student_and_teacher_score_the_same_tokens_differently(
    server: DemoServer, connect: Callable[[], tinker.ServiceClient]
) -> None:
    service = connect()
    student, teacher = logprobs(service, "student"), logprobs(service, "teacher")
    assert len(student) == len(teacher) == 4
    assert max(abs(a - b) for a, b in zip(student, teacher, strict=True)) > 0.01


def test_the_student_trains_while_the_teachers_vllm_is_killed(
    server: DemoServer, connect: Callable[[], tinker.ServiceClient]
) -> None:
    service, before = connect(), processes(server)
    training = service.create_lora_training_client(base_model="student", rank=4).result()
    os.kill(before["vllm-teacher"].pid, signal.SIGKILL)
    data = [cross_entropy(PROMPT.to_ints())]
    losses = train(training, data, steps=4, learning_rate=1e-2)
    assert losses[-1] < losses[0]
    assert len(logprobs(service, "student")) == 4
    until(lambda: processes(server).get("vllm-teacher", before["vllm-teacher"]) != before["vllm-teacher"])
    assert len(logprobs(service, "teacher")) == 4, "it waits for the teacher's vLLM"
    after = processes(server)
    assert {name: after[name] for name in after if name != "vllm-teacher"} == {
        name: before[name] for name in before if name != "vllm-teacher"
    }


def test_the_teacher_is_sampled_while_the_students_engine_is_killed(
    server: DemoServer, connect: Callable[[], tinker.ServiceClient]
) -> None:
    service, engine = connect(), processes(server)["engine-student"]
    os.kill(engine.pid, signal.SIGKILL)
    assert len(logprobs(service, "teacher")) == 4
    until(lambda: processes(server).get("engine-student", engine) != engine)
    training = service.create_lora_training_client(base_model="student", rank=4).result()
    losses = train(training, [cross_entropy(PROMPT.to_ints())], steps=2, learning_rate=1e-2)
    assert losses[-1] < losses[0]


def test_a_teacher_that_cannot_start_leaves_the_student_alone(tmp_path: Path) -> None:
    wrong = {"generator.inference_engine.engine_init_kwargs": {"no_such_option": 1}}
    with ready(student_and_teacher(tmp_path, backend_config=wrong)) as server:
        until(lambda: readiness(server)["student"]["ready"])
        until(lambda: "unrecognized arguments: --no-such-option" in str(readiness(server)["teacher"]["reasons"]))
        until(lambda: set(processes(server)) == {"vllm-student", "engine-student", "api"})
        with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
            assert len(logprobs(service, "student")) == 4
        until(lambda: "ready at" in (server.state_dir / "serve.log").read_text())
        logged = (server.state_dir / "serve.log").read_text()
        assert "teacher cannot start and is given up" in logged
