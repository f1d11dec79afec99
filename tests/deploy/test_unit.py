"""deploy/skyrl.service: systemd accepts it, the command exists, the server has time, GPUs stay visible."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from skyrl.base.config.keys import STOP_GRACE_S
from skyrl.cli.launcher.skyrl_processes import (
    API_GRACE_S,
    PLACEMENT_GRACE_S,
    RAY_GRACE_S,
    ROUTER_GRACE_S,
)
from tests.deploy.files import DEPLOY, ReadServe

NEEDS_SYSTEMD = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze of systemd")
EXPOSURE = 20
"""The exposure that `systemd-analyze security` may find, in tenths; 100 is a unit without any protection."""


def settings() -> dict[str, list[str]]:
    """The values of each key of the unit, in order."""
    lines = [line.partition("=") for line in (DEPLOY / "skyrl.service").read_text().splitlines() if line[:1].isupper()]
    found: dict[str, list[str]] = {}
    for key, _, value in lines:
        found.setdefault(key, []).append(value)
    return found


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that exists on this machine."""
    program = settings()["ExecStart"][0].split()[0]
    text = (DEPLOY / "skyrl.service").read_text()
    (tmp_path / "skyrl.service").write_text(text.replace(program, "/bin/true"))
    return tmp_path / "skyrl.service"


@NEEDS_SYSTEMD
def test_systemd_accepts_the_unit(unit: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert done.stdout + done.stderr == ""
    unit.write_text(unit.read_text() + "\n[Service]\nRestrt=no\n")
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert "Restrt" in done.stderr, "an unknown key would be seen"


@NEEDS_SYSTEMD
def test_the_unit_has_few_rights(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE}", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_unit_starts_an_existing_command(read_serve: ReadServe, tmp_path: Path) -> None:
    [start] = settings()["ExecStart"]
    program, *words = shlex.split(start)
    assert program.endswith("/skyrl")
    assert "/etc/skyrl/skyrl.toml" in words
    read_serve([word.replace("/etc/skyrl", str(DEPLOY)) for word in words], {})


def test_systemd_waits_for_the_server_and_watches_it() -> None:
    found = settings()
    assert found["Type"] == ["notify"]
    assert found["TimeoutStartSec"] == ["infinity"]
    assert int(found["WatchdogSec"][0]) > 0
    with_ray = API_GRACE_S + STOP_GRACE_S + ROUTER_GRACE_S + PLACEMENT_GRACE_S + RAY_GRACE_S
    assert int(found["TimeoutStopSec"][0]) > with_ray
    assert (found["KillMode"], found["Restart"], found["RestartPreventExitStatus"]) == (
        ["mixed"],
        ["on-failure"],
        ["2"],
    )


def test_the_unit_hides_no_gpu() -> None:
    """ProtectClock allows the clock's device, and with that no other device."""
    assert not {"PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock"} & settings().keys()


def test_saves_in_memory_outlive_the_unit() -> None:
    assert "RemoveIPC" not in settings()


def test_directories_of_the_unit_are_those_that_systemd_makes() -> None:
    found = settings()
    made = {f"/var/lib/{found['StateDirectory'][0]}", f"/var/cache/{found['CacheDirectory'][0]}"}
    variables = dict(word.split("=") for line in found["Environment"] for word in line.split())
    assert variables.keys() == {"HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"}
    assert [path for path in variables.values() if not path.startswith(tuple(made))] == []
