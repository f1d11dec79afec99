"""The Kubernetes manifests: their form, commands, probes, references to each other, and rights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.loading import load_config
from tests.deploy.conftest import GetStatus
from tests.deploy.files import DEPLOY, ReadServe, check_vllm, documents, image_environment, of_image
from tests.deploy.test_compose import STOP_S

FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OBJECTS = {(each["kind"], each["metadata"]["name"]): each for file in FILES for each in documents(file)}
PODS = {name: each["spec"]["template"] for (kind, name), each in OBJECTS.items() if kind == "Deployment"}
SERVERS = {"skyrl": ("skyrl", "skyrl"), "gateway": ("skyrl-gateway", "gateway")}
"""Containers that run skyrl: their Deployments and names."""


def container(pod: str, name: str) -> dict[str, Any]:
    [found] = [each for each in containers(pod) if each["name"] == name]
    return found


def containers(pod: str) -> list[dict[str, Any]]:
    spec = PODS[pod]["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def variables(each: dict[str, Any]) -> dict[str, str]:
    """The variables of a container, with the values of the Secrets' example."""
    found: dict[str, str] = {}
    for source in each.get("envFrom", []):
        found |= OBJECTS["Secret", source["secretRef"]["name"]]["stringData"]
    for variable in each.get("env", []):
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        else:
            reference = variable["valueFrom"]["secretKeyRef"]
            found[variable["name"]] = OBJECTS["Secret", reference["name"]]["stringData"][reference["key"]]
    return found


@pytest.mark.parametrize("file", [file for file in FILES if file.stem != "servicemonitor"], ids=lambda file: file.stem)
def test_kubernetes_accepts_a_manifest(file: Path) -> None:
    """With unknown keys refused. The ServiceMonitor is the Prometheus operator's and has no schema here."""
    done = subprocess.run(
        [Path(sys.executable).with_name("kubernetes-validate"), "--strict", file], capture_output=True, text=True
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert output.count(" passed for resource ") == len(documents(file)), output


def test_no_manifest_names_a_namespace() -> None:
    assert [key for key, each in OBJECTS.items() if "namespace" in each["metadata"]] == []


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_starts_with_these_settings(name: str, read_serve: ReadServe, tmp_path: Path) -> None:
    each = container(*SERVERS[name])
    (tmp_path / "skyrl.toml").write_text(OBJECTS["ConfigMap", "skyrl"]["data"]["skyrl.toml"])
    words = [word.replace("/etc/skyrl", str(tmp_path)) for word in each["args"]]
    config = read_serve(words, image_environment() | variables(each))
    assert config.api_keys == "managed"
    assert config.database.startswith("postgresql://")
    [port] = each["ports"]
    assert port["containerPort"] == config.port
    mounts = [mount["mountPath"] for mount in each["volumeMounts"]]
    assert [path for path in mounts if config.state_dir.is_relative_to(path)] != []
    assert config.modes.trains == (name == "skyrl")


def test_a_gateway_uses_the_vllm_of_its_pod(read_serve: ReadServe, tmp_path: Path) -> None:
    (tmp_path / "skyrl.toml").write_text(OBJECTS["ConfigMap", "skyrl"]["data"]["skyrl.toml"])
    gateway, vllm = container("skyrl-gateway", "gateway"), container("skyrl-gateway", "vllm")
    words = [word.replace("/etc/skyrl", str(tmp_path)) for word in gateway["args"]]
    config = read_serve(words, image_environment() | variables(gateway))
    check_vllm(vllm["args"], variables(vllm))
    assert config.external_inference_url == "http://127.0.0.1:8001"
    expected = {"--host=127.0.0.1", "--port=8001", f"--model={config.base_model}"}
    assert expected | {f"--served-model-name={config.served_names[0]}"} <= {*vllm["args"]}
    assert config.external_inference_api_key == variables(vllm)["VLLM_API_KEY"]
    assert config.external_inference_priority


def test_server_gateway_and_vllm_see_the_state_directory_at_one_path() -> None:
    seen = [
        (claim_of(pod, mount["name"]), mount["mountPath"])
        for pod, name in (*SERVERS.values(), ("skyrl-gateway", "vllm"))
        for mount in container(pod, name)["volumeMounts"]
        if mount["name"] == "state"
    ]
    assert seen == [("skyrl-state", "/var/lib/skyrl")] * 3
    [init] = PODS["skyrl-gateway"]["spec"]["initContainers"]
    server = variables(container("skyrl", "skyrl"))["SKYRL_STATE_DIR"]
    own = variables(container("skyrl-gateway", "gateway"))["SKYRL_STATE_DIR"]
    assert init["command"] == ["cp", f"{server}/token-secret", f"{server}/url-secret", f"{own}/"]


def claim_of(pod: str, volume: str) -> str:
    [found] = [each for each in PODS[pod]["spec"]["volumes"] if each["name"] == volume]
    return found["persistentVolumeClaim"]["claimName"]


@pytest.mark.parametrize("name", SERVERS)
async def test_the_paths_and_ports_of_the_probes_exist(name: str, status_of: GetStatus) -> None:
    each = container(*SERVERS[name])
    paths = {kind: each[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert {paths["liveness"], paths["readiness"]} == {"/api/v1/healthz", "/readyz"}
    assert await status_of(paths["liveness"]) == 200
    assert await status_of(paths["readiness"]) == 503, "there is no engine"
    assert await status_of(paths["startup"]) in (200, 503)
    ports = {each[f"{kind}Probe"]["httpGet"]["port"] for kind in paths}
    assert ports == {port["name"] for port in each["ports"]}


def test_a_model_has_an_hour_to_load() -> None:
    probe = container("skyrl", "skyrl")["startupProbe"]
    assert probe["httpGet"]["path"] == "/readyz"
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600


def test_two_servers_never_share_the_state_directory() -> None:
    spec = OBJECTS["Deployment", "skyrl"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_kubernetes_sets_no_variable_that_skyrl_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name, pod in PODS.items() if pod["spec"]["enableServiceLinks"]] == []
    monkeypatch.setenv("SKYRL_PORT", "tcp://10.0.0.1:8000")  # what it would set for the Service skyrl
    with pytest.raises(ValueError, match="port"):
        load_config({})


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_has_time_to_stop_and_no_rights(pod: str) -> None:
    spec = PODS[pod]["spec"]
    assert spec["terminationGracePeriodSeconds"] > STOP_S[pod.removeprefix("skyrl-")]
    security = spec["securityContext"]
    user, group = map(int, of_image("USER").split(":"))
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (user, group, group)
    assert security["runAsNonRoot"]
    for each in containers(pod):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, each["name"]


def test_every_reference_leads_to_an_object() -> None:
    for pod, template in PODS.items():
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        mounted = {mount["name"] for each in containers(pod) for mount in each["volumeMounts"]}
        assert mounted == volumes.keys()
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in OBJECTS
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in OBJECTS
        for each in containers(pod):
            variables(each)  # raises KeyError for a Secret or a key that the example does not have


def test_services_and_prometheus_select_the_pods() -> None:
    [endpoint] = OBJECTS["ServiceMonitor", "skyrl"]["spec"]["endpoints"]
    watched = OBJECTS["ServiceMonitor", "skyrl"]["spec"]["selector"]["matchLabels"]
    for pod, template in PODS.items():
        service, labels = OBJECTS["Service", pod], template["metadata"]["labels"]
        assert service["spec"]["selector"] == labels == OBJECTS["Deployment", pod]["spec"]["selector"]["matchLabels"]
        [port] = service["spec"]["ports"]
        assert port["targetPort"] in {each["name"] for part in containers(pod) for each in part.get("ports", [])}
        assert port["name"] == endpoint["port"]
        assert watched.items() <= service["metadata"]["labels"].items()
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["key"] in OBJECTS["Secret", credentials["name"]]["stringData"]
