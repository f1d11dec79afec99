"""`skyrl rollout --ray-address`: what is refused before anything starts, and the commands of its engines on nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skyrl.base.config.loading import load_config
from skyrl.cli.launcher.preflight import Findings
from skyrl.cli.launcher.rollout_plane import placed_processes
from skyrl.cli.main import app
from skyrl.http.admin_key import ADMIN_KEY_VARIABLE, ROUTER_KEY_VARIABLE
from skyrl.inference import engine_kinds
from skyrl.inference.engine_kinds import RolloutVllm
from skyrl.inference.placement import Spot
from skyrl.inference.remote.settings import ADMIN_KEY, CLIENT_KEY, STORE, PlacedSidecar
from skyrl.runtime.processes.ports import HeldPorts
from skyrl.runtime.processes.runtime import RUNTIME_ENV


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets them: they are gone after the test, too."""
    for name in (ROUTER_KEY_VARIABLE, ADMIN_KEY_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--ray-address", "ray://head:10001"), 2, "is the address of a Ray client server"),
        (("--ray-address", "head"), 2, "is not auto, local or HOST:PORT"),
        (("--ray-address", "auto", "--num-engines", "0", "--engine-url", "http://a"), 2, "no engines to place"),
        (("--ray-address", "10.0.0.1:6379"), 2, f"set {ROUTER_KEY_VARIABLE} and {ADMIN_KEY_VARIABLE}"),
        (("--ray-address", "auto", "--admin-api-key", "k"), 2, f"without a key: set {ROUTER_KEY_VARIABLE}\n"),
    ],
)
def test_what_cannot_be_placed_is_refused_before_anything_starts(
    tmp_path: Path, flags: tuple[str, ...], code: int, message: str
) -> None:
    ran = CliRunner().invoke(app, ["rollout", "--state-dir", str(tmp_path), *flags], env={"COLUMNS": "300"})
    assert ran.exit_code == code
    assert message in ran.output
    assert list(tmp_path.iterdir()) == []


def test_an_engine_on_a_node_has_a_sidecar_with_both_keys_and_joins_groups_over_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_kinds, "interface_of", {"10.0.0.3": "eth1"}.get)
    kind = RolloutVllm(load_config({}), "of-vllm", client_key="of-clients", admin_key="of-trainers")
    spec = kind.spec("vllm-2", Spot("10.0.0.3", 9123, None, cuda=False, sidecar_port=9124))
    assert (spec.env["GLOO_SOCKET_IFNAME"], spec.env["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")
    sidecar = spec.sidecar
    assert sidecar is not None
    placed = PlacedSidecar.from_environment(sidecar.env)
    assert (placed.vllm_url, placed.host, placed.port) == ("http://10.0.0.3:9123", "10.0.0.3", 9124)
    assert (sidecar.env[CLIENT_KEY], sidecar.env[ADMIN_KEY]) == ("of-clients", "of-trainers")
    assert STORE not in sidecar.env
    on_loopback = kind.spec("vllm-2", Spot("127.0.0.2", 9123, None, cuda=False, sidecar_port=9124))
    assert on_loopback.env["GLOO_SOCKET_IFNAME"] == "lo"


def test_an_address_without_an_interface_is_told(caplog: pytest.LogCaptureFixture) -> None:
    spec = RolloutVllm(load_config({}), "of-vllm").spec(
        "vllm-2", Spot("192.0.2.1", 9123, None, cuda=False, sidecar_port=9124)
    )
    assert spec.env["NCCL_SOCKET_IFNAME"] == "lo"
    assert "no network interface has the address 192.0.2.1" in caplog.text


def test_the_variable_of_skyrl_serve_is_refused(tmp_path: Path) -> None:
    given = {"COLUMNS": "300", "SKYRL_RAY_ADDRESS": "auto"}
    ran = CliRunner().invoke(app, ["rollout", "--state-dir", str(tmp_path)], env=given)
    assert ran.exit_code == 2
    assert "--ray-address: the variable SKYRL_RAY_ADDRESS is of skyrl serve: give the option" in ran.output
    assert list(tmp_path.iterdir()) == []


def test_the_placement_gets_the_router_and_the_cluster_and_no_key_on_its_command_line(tmp_path: Path) -> None:
    config = load_config({"state_dir": str(tmp_path)})
    found = Findings([], ray_address="10.0.0.1:6379")
    there = placed_processes(config, "auto", found, tmp_path, "http://r:1", "secret", HeldPorts())
    assert there.ray is None
    runtime = json.loads(Path(there.placement.env[RUNTIME_ENV]).read_text())
    assert (runtime["each"][0]["inference_url"], runtime["ray_address"]) == ("http://r:1", "10.0.0.1:6379")
    assert not any("secret" in word for word in there.placement.argv)
    with HeldPorts() as held:
        here = placed_processes(config, "local", Findings([]), tmp_path, "http://r:1", "secret", held)
    assert here.ray is not None
    assert here.placement.env["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "ray-token")
