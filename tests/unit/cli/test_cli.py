"""The command line: exit codes, messages, and the imports that help must not need. What one real process has shown, the
others of a kind show in the process of the tests."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from skyrl import __version__
from skyrl.base.config.server import ServerConfig
from skyrl.cli.launcher import main as launcher
from skyrl.cli.launcher.main import MOST_THREADS
from skyrl.cli.main import app
from skyrl.inference.sidecar import main as sidecar_main
from skyrl.router.policies import DEFAULT_POLICY
from skyrl.runtime.processes import runtime
from skyrl.runtime.processes.ports import free_port
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import migrate

HEAVY = ("torch", "transformers", "vllm", "sqlalchemy", "fastapi", "numpy")


def run_skyrl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SKYRL_")}
    command = [sys.executable, "-X", "importtime", "-m", "skyrl.cli.main", *arguments]
    done = subprocess.run(
        command, env=clean | {"COLUMNS": "200"} | environment, capture_output=True, text=True, timeout=150, check=False
    )
    lines = done.stderr.splitlines()
    done.imported = {line.split("|")[-1].strip() for line in lines if line.startswith("import time:")}  # type: ignore[attr-defined]
    done.stderr = "\n".join(line for line in lines if not line.startswith("import time:"))
    return done


ServeHere = Callable[..., tuple[int, str]]


@pytest.fixture
def serve_here(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> ServeHere:
    """`skyrl serve` with these arguments and this environment in this process, for starts that are refused. Returns the
    exit code, and what is logged and said on stderr."""
    monkeypatch.setattr(launcher, "set_up_process", lambda *_: None)  # the log of this process stays pytest's
    caplog.set_level("INFO")

    def run(*arguments: str, **environment: str) -> tuple[int, str]:
        for name in [name for name in os.environ if name.startswith("SKYRL_")]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        done = CliRunner().invoke(app, ["serve", *arguments])
        assert isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, "".join(f"{line}\n" for line in caplog.messages) + done.stderr

    return run


def heavy_imports(done: subprocess.CompletedProcess[str]) -> list[str]:
    imported = done.imported  # type: ignore[attr-defined]
    assert "typer" in imported, "the probe sees imports"
    return [name for name in HEAVY if any(module.split(".")[0] == name for module in imported)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--help"], ["serve", "doctor"]), (["serve", "--help"], ["--backend-config", "--state-dir", "--port"])],
)
def test_help_answers_without_a_heavy_import(arguments: list[str], words: list[str]) -> None:
    done = run_skyrl(*arguments)
    assert done.returncode == 0
    assert all(word in done.stdout for word in words)
    assert heavy_imports(done) == []


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("serve", f"Default: the machine's cores, up to {MOST_THREADS}; 1 with Ray or a GPU."),
        ("router", f"{DEFAULT_POLICY} (default)"),
        ("rollout", "Seconds between two health probes of a worker. Default: 5; for skyrl rollout 0.5."),
        ("rollout", "Failed probes in a row until a worker gets no requests. Default: 3; for skyrl rollout 2."),
    ],
)
def test_help_tells_defaults_that_the_command_chooses_itself(command: str, default: str) -> None:
    assert default in CliRunner(env={"COLUMNS": "400"}).invoke(app, [command, "--help"]).stdout


def test_status_asks_a_server_without_a_heavy_import() -> None:
    done = run_skyrl("status", "--url", f"http://127.0.0.1:{free_port()}", TINKER_API_KEY="tml-k")
    assert (done.returncode, "Connection refused" in done.stderr) == (2, True)
    assert heavy_imports(done) == []


def test_version_prints_the_version_without_a_heavy_import() -> None:
    done = run_skyrl("version")
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")
    assert heavy_imports(done) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "megatron"], "backend: no backend 'megatron'; there are: fsdp, none"),
        (["--port", "70000"], "port: Input should be less than or equal to 65535"),
        (["--backend-config", '{"trainer.microbatch": 1}'], "backend_config: unknown key 'trainer.microbatch'; the"),
        (["--config", "nowhere.toml"], "config file nowhere.toml: "),
    ],
)
def test_a_bad_value_is_refused_in_one_line_that_names_it(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["serve", "--state-dir", str(tmp_path / "state"), *arguments])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"skyrl serve: {message}")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(("word", "bound"), [("None", None), ("none", None), ("null", None), ("3", 3)])
def test_a_bound_may_be_taken_away_as_operators_type_it(
    word: str, bound: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[ServerConfig] = []
    monkeypatch.setattr("skyrl.cli.launcher.main.serve", configs.append)
    monkeypatch.setenv("SKYRL_FORWARDING_INFERENCE_MAX_CONNECTIONS", "64")
    flags = ["--state-dir", str(tmp_path), "--forwarding-inference-max-connections", word]
    done = CliRunner().invoke(app, ["serve", *flags])
    assert (done.exit_code, done.output) == (0, "")
    assert configs[0].forwarding_inference_max_connections == bound


def test_a_bound_that_is_no_number_is_refused(tmp_path: Path) -> None:
    flags = ["--state-dir", str(tmp_path / "state"), "--forwarding-inference-max-connections", "many"]
    done = CliRunner().invoke(app, ["serve", *flags])
    assert done.exit_code == 2
    assert done.stderr.startswith("skyrl serve: forwarding_inference_max_connections: Input should be a valid integer")


def test_a_bad_database_url_is_refused_in_one_line(tmp_path: Path) -> None:
    options = ["--port", str(free_port()), "--state-dir", str(tmp_path), "--log-level", "error"]
    done = run_skyrl("serve", "--database-url", "nosuch://host/db", *options)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("skyrl serve: database_url: must begin with sqlite:/// or postgresql://, got 'nosuch'")
    assert not (tmp_path / "logs").exists(), "no child was started"


@pytest.mark.parametrize("arguments", [["--port", "http"], ["--prot", "1"]], ids=["wrong type", "unknown"])
def test_the_message_about_a_bad_flag_names_the_flag(arguments: list[str]) -> None:
    done = run_skyrl("serve", *arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr
    assert "Traceback" not in done.stderr
    assert heavy_imports(done) == []


def test_serve_refuses_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_skyrl("serve", "--port", str(port), "--state-dir", str(tmp_path))
    assert done.returncode == 2
    assert f"skyrl serve: port: cannot listen on 127.0.0.1:{port} (Address already in use)" in done.stderr
    assert not (tmp_path / "logs").exists(), "no child was started"


@pytest.mark.parametrize("url", ["http://user:password@host:8000", "http://host:0", "http://host/?a=1", "host:8000"])
def test_a_sidecar_refuses_an_address_of_vllm_that_it_cannot_use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_main, "run_sidecar", lambda settings: None)
    ran = CliRunner().invoke(app, ["sidecar", "--port", "30001", "--vllm-url", url])
    assert ran.exit_code == 2
    assert "--vllm-url" in ran.output


@pytest.mark.parametrize(
    "arguments", [("router",), ("rollout",), ("sidecar", "--port", "30001", "--vllm-url", "http://127.0.0.1:1")]
)
def test_a_log_level_that_there_is_not_is_refused(arguments: tuple[str, ...]) -> None:
    ran = CliRunner().invoke(app, [*arguments, "--log-level", "verbose"])
    assert ran.exit_code == 2
    assert "--log-level" in ran.output


def test_a_router_refuses_a_state_directory_that_it_cannot_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "set_up_process", lambda *_: None)
    (tmp_path / "file").touch()
    ran = CliRunner().invoke(
        app, ["router", "--port", str(free_port()), "--state-dir", str(tmp_path / "file" / "state")]
    )
    assert ran.exit_code == 2
    assert "skyrl router: --state-dir: [Errno 20] Not a directory" in ran.output


@pytest.mark.parametrize(
    ("base_model", "message"),
    [
        ("./nope", "skyrl serve: base_model: there is no directory './nope'"),
        (".", "skyrl serve: base_model: the directory {} is empty"),
    ],
)
def test_serve_refuses_a_missing_or_empty_base_model_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve_here: ServeHere, base_model: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    options = ["--port", str(free_port()), "--state-dir", str(tmp_path / "state")]
    code, said = serve_here("--base-model", base_model, *options)
    assert code == 2
    (line,) = said.splitlines()
    assert line.startswith(message.format(tmp_path / "empty"))
    assert not (tmp_path / "state").exists(), "serve made no directory"


def test_serve_refuses_ranks_for_which_no_gpu_will_come(tmp_path: Path, serve_here: ServeHere) -> None:
    key = "trainer.placement.policy_num_gpus_per_node"
    options = ["--port", str(free_port()), "--state-dir", str(tmp_path / "state")]
    code, said = serve_here("--backend-config", f'{{"{key}": 2}}', *options, CUDA_VISIBLE_DEVICES="")
    assert code == 2
    (line,) = said.splitlines()
    assert line.startswith(f"skyrl serve: {key}: no node has 2 GPU: this machine has no GPU, and no other node will")
    assert not (tmp_path / "state").exists(), "serve made no directory"


def test_serve_refuses_a_state_directory_in_use(tmp_path: Path, serve_here: ServeHere) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, said = serve_here("--port", str(free_port()), "--state-dir", str(tmp_path))
    assert code == 2
    assert f"skyrl serve: state-dir: another skyrl server is running in {tmp_path}" in said
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("chosen", "lines"),
    [({}, 1), ({"SKYRL_LOSSES": '{"stable_reinforce": "refuse"}'}, 0), ({"SKYRL_BACKEND": "none"}, 0)],
    ids=["no choice", "refuse", "gateway"],
)
def test_serve_mentions_stable_reinforce_once_unless_its_operator_chose(
    chosen: dict[str, str], lines: int, tmp_path: Path, serve_here: ServeHere
) -> None:
    gateway = {"SKYRL_BASE_MODEL": "tiny", "SKYRL_EXTERNAL_INFERENCE_URL": "http://127.0.0.1:1"}
    # Another server's lock ends this server when it has read its configuration.
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        options = ("--port", str(free_port()), "--state-dir", str(tmp_path))
        _, said = serve_here(*options, **chosen, **gateway if "SKYRL_BACKEND" in chosen else {})
    assert "another skyrl server is running" in said
    found = [line for line in said.splitlines() if "stable_reinforce" in line]
    assert len(found) == lines
    assert all("loss_fn=ppo" in line and 'losses.stable_reinforce = "cispo"' in line for line in found)


def test_serve_refuses_a_newer_database(tmp_path: Path, serve_here: ServeHere) -> None:
    database = Database(f"sqlite:///{tmp_path / 'skyrl.db'}")
    migrate(database)
    database.write(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    database.close()
    code, said = serve_here("--port", str(free_port()), "--state-dir", str(tmp_path))
    assert code == 2
    assert "skyrl serve: the database is at revision 9999, which this version of skyrl does not know" in said
    assert not (tmp_path / "logs").exists(), "no child was started"


def test_serve_exits_with_1_and_hides_the_password_when_postgresql_is_away(tmp_path: Path) -> None:
    url = f"postgresql://skyrl:secret@127.0.0.1:{free_port()}/skyrl"
    done = run_skyrl("serve", "--port", str(free_port()), "--state-dir", str(tmp_path), SKYRL_DATABASE_URL=url)
    assert done.returncode == 1
    assert "skyrl serve: the database postgresql" in done.stderr
    assert "Connection refused" in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr


def test_doctor_exits_with_1_when_a_check_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_skyrl("doctor", "--port", str(free_port()), "--state-dir", str(tmp_path / "file" / "state"))
    assert done.returncode == 1
    assert "cannot be written" in done.stdout
    assert [name for name in heavy_imports(done) if name in ("torch", "transformers", "vllm")] == []
