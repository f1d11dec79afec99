"""The Compose files: their form, the commands and settings in them, passwords, volumes, and what watches the server."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.keys import STOP_GRACE_S
from skyrl.cli.launcher.inference_parts import INFERENCE_GRACE_S
from skyrl.cli.launcher.skyrl_processes import (
    API_GRACE_S,
    PLACEMENT_GRACE_S,
    RAY_GRACE_S,
    ROUTER_GRACE_S,
)
from tests.deploy.files import (
    DEPLOY,
    SETTINGS,
    NotSet,
    ReadServe,
    check_vllm,
    documents,
    image_environment,
    interpolated,
    strings,
)

FILES = ("compose.yaml", "compose.gpu.yaml", "compose.gateway.yaml")
SECRET = re.compile(r"PASSWORD|_KEY|SECRET|DATABASE_URL")
STOP_S = {
    "skyrl": API_GRACE_S + STOP_GRACE_S + ROUTER_GRACE_S + PLACEMENT_GRACE_S + RAY_GRACE_S,
    "gateway": API_GRACE_S + STOP_GRACE_S + ROUTER_GRACE_S + INFERENCE_GRACE_S,
}
"""The longest stop of each server. That of `skyrl` is one with a Ray cluster of its own."""


def compose(name: str) -> dict[str, Any]:
    [document] = documents(DEPLOY / name)
    return document


def services(name: str) -> dict[str, Any]:
    return interpolated(compose(name)["services"], SETTINGS)


ALL = {name: service for file in FILES for name, service in services(file).items() if "image" in service}


@pytest.mark.parametrize("name", FILES)
def test_a_compose_file_has_the_form_of_the_specification(name: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_server_and_the_gateway_start_with_these_settings(read_serve: ReadServe) -> None:
    configs = {}
    for name in ("skyrl", "gateway"):
        words = [word.replace("/etc/skyrl", str(DEPLOY)) for word in ALL[name]["command"]]
        assert f"./skyrl.toml:{'/etc/skyrl/skyrl.toml'}:ro" in ALL[name]["volumes"]
        configs[name] = read_serve(words, image_environment() | ALL[name]["environment"])
        assert configs[name].api_keys == "managed"
        assert configs[name].served_names == ("Qwen/Qwen3-8B",)
        [port] = ALL[name]["ports"]
        assert port.endswith(f":{configs[name].port}")
    assert configs["skyrl"].modes.manages_inference
    assert not configs["gateway"].modes.trains
    assert configs["gateway"].database == configs["skyrl"].database == "postgresql://skyrl:0a1b2c@postgres:5432/skyrl"
    assert configs["gateway"].state_dir != configs["skyrl"].state_dir


def test_the_gateway_uses_its_vllm(read_serve: ReadServe) -> None:
    check_vllm(ALL["vllm"]["command"], ALL["vllm"]["environment"])
    words = [word.replace("/etc/skyrl", str(DEPLOY)) for word in ALL["gateway"]["command"]]
    gateway = read_serve(words, image_environment() | ALL["gateway"]["environment"])
    assert gateway.external_inference_url == "http://vllm:8000"
    assert gateway.external_inference_priority
    assert {"--host=0.0.0.0", "--port=8000", f"--served-model-name={gateway.served_names[0]}"} <= {
        *ALL["vllm"]["command"]
    }
    assert gateway.external_inference_api_key == ALL["vllm"]["environment"]["VLLM_API_KEY"]


def test_server_gateway_and_vllm_see_the_state_directory_at_one_path() -> None:
    mounts = {name: [volume for volume in ALL[name]["volumes"] if volume.startswith("state:")] for name in ALL_THREE}
    assert mounts == {
        "skyrl": ["state:/var/lib/skyrl"],
        "gateway": ["state:/var/lib/skyrl"],
        "vllm": ["state:/var/lib/skyrl:ro"],
    }
    assert image_environment()["SKYRL_STATE_DIR"] == "/var/lib/skyrl"


def test_the_gateway_starts_with_the_secrets_of_the_server() -> None:
    configured = {name: ALL[name]["environment"] for name in ("skyrl", "gateway")}
    server, own = ((image_environment() | configured[name])["SKYRL_STATE_DIR"] for name in ("skyrl", "gateway"))
    secrets = ALL["gateway-secrets"]
    assert secrets["entrypoint"] == ["cp", f"{server}/token-secret", f"{server}/url-secret", f"{own}/"]
    assert secrets["depends_on"] == {"skyrl": {"condition": "service_healthy"}}
    assert ALL["gateway"]["depends_on"]["gateway-secrets"] == {"condition": "service_completed_successfully"}
    assert {volume.removesuffix(":ro") for volume in secrets["volumes"]} <= {*ALL["gateway"]["volumes"]}


ALL_THREE = ("skyrl", "gateway", "vllm")


@pytest.mark.parametrize("file", FILES)
def test_no_password_has_a_default(file: str) -> None:
    """A value whose name speaks of a secret comes from a variable that must be set."""
    secret = {path: text for path, text in strings(compose(file)["services"]) if SECRET.search(path[-1])}
    assert secret or file == "compose.gpu.yaml"
    for text in secret.values():
        with pytest.raises(NotSet):
            interpolated(text, {})
    filled = re.findall(r"^(\w*(?:PASSWORD|KEY)\w*)=(.+)$", (DEPLOY / "example.env").read_text(), re.M)
    assert filled == []


def test_the_example_names_each_setting() -> None:
    named = {*re.findall(r"^(?:# )?(\w+)=", (DEPLOY / "example.env").read_text(), re.M)}
    used = {name for file in FILES for name in re.findall(r"\$\{(\w+)", (DEPLOY / file).read_text())}
    used |= {secret["environment"] for file in FILES for secret in compose(file).get("secrets", {}).values()}
    assert named - {"COMPOSE_FILE"} == used


def test_ports_are_open_on_this_machine_alone() -> None:
    ports = [port for service in ALL.values() for port in service.get("ports", [])]
    assert len(ports) == 4
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    assert len({port.split(":")[1] for port in ports}) == len(ports)


def test_mounted_files_and_volumes_exist() -> None:
    volumes = {name for file in FILES for name in compose(file).get("volumes", {})}
    sources = {volume.split(":")[0] for service in ALL.values() for volume in service.get("volumes", [])}
    assert volumes <= sources
    files = sources - volumes - {"./models"}
    assert files
    assert [name for name in files if not (DEPLOY / name).exists()] == []


@pytest.mark.parametrize("name", ["skyrl", "gateway"])
def test_a_server_has_time_to_stop_and_no_rights(name: str) -> None:
    service = ALL[name]
    assert int(service["stop_grace_period"].removesuffix("s")) > STOP_S[name]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]


def test_the_server_hands_saves_over_in_shared_memory() -> None:
    assert ALL["skyrl"]["shm_size"] == "2gb"


def test_prometheus_scrapes_the_services_of_compose() -> None:
    [prometheus] = documents(DEPLOY / "prometheus.yml")
    [job] = prometheus["scrape_configs"]
    [server], [gateways] = job["static_configs"], job["dns_sd_configs"]
    port = image_environment()["SKYRL_PORT"]
    assert server["targets"] == [f"skyrl:{port}"]
    assert (gateways["names"], str(gateways["port"])) == (["gateway"], port)
    assert {"skyrl", "gateway"} <= ALL.keys()
    [secret] = ALL["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert compose("compose.yaml")["secrets"] == {secret: {"environment": "METRICS_KEY"}}


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian's package prometheus)")
def test_prometheus_accepts_its_configuration_and_the_rules(tmp_path: Path) -> None:
    (tmp_path / "metrics_key").write_text("tml-x")
    text = (DEPLOY / "prometheus.yml").read_text()
    for there, here in {"/run/secrets": tmp_path, "/etc/prometheus/rules": DEPLOY / "prometheus/rules"}.items():
        assert there in text
        text = text.replace(there, str(here))
    (tmp_path / "prometheus.yml").write_text(text)
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_prometheus_gets_its_files_where_it_looks_for_them() -> None:
    prometheus = ALL["prometheus"]
    assert "--config.file=/etc/prometheus/prometheus.yml" in prometheus["command"]
    assert "./prometheus.yml:/etc/prometheus/prometheus.yml:ro" in prometheus["volumes"]
    assert "./prometheus/rules:/etc/prometheus/rules:ro" in prometheus["volumes"]
    [configuration] = documents(DEPLOY / "prometheus.yml")
    assert configuration["rule_files"] == ["/etc/prometheus/rules/*.yml"]


def test_grafana_finds_prometheus_and_the_boards() -> None:
    [sources] = documents(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")
    [boards] = documents(DEPLOY / "grafana/provisioning/dashboards/skyrl.yaml")
    [source], [provider] = sources["datasources"], boards["providers"]
    [port] = ALL["prometheus"]["ports"]
    assert source["url"] == f"http://prometheus:{port.rpartition(':')[2]}"
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in ALL["grafana"]["volumes"]
    assert "./grafana/provisioning:/etc/grafana/provisioning:ro" in ALL["grafana"]["volumes"]
