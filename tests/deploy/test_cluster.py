"""The files for a Ray cluster: one configuration in three sizes, the job, and KubeRay's manifest."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyrl.base.config.backend import dotted_keys
from skyrl.base.config.keys import STOP_GRACE_S
from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig
from skyrl.cli.launcher.skyrl_processes import API_GRACE_S, PLACEMENT_GRACE_S, ROUTER_GRACE_S
from tests.deploy.conftest import GetStatus
from tests.deploy.files import DEPLOY, ReadServe, documents, image_environment, of_image

CONFIGS = DEPLOY / "configs"
SIZES = ("laptop", "eight-gpus", "three-nodes")
STOP_S = API_GRACE_S + STOP_GRACE_S + ROUTER_GRACE_S + PLACEMENT_GRACE_S
KUBERAY = DEPLOY / "kuberay" / "cluster.yaml"
OBJECTS = {(each["kind"], each["metadata"]["name"]): each for each in documents(KUBERAY)}
CLUSTER = OBJECTS["RayCluster", "skyrl"]
GROUPS = {"head": CLUSTER["spec"]["headGroupSpec"], "gpu": CLUSTER["spec"]["workerGroupSpecs"][0]}


def keys_in(text: str) -> set[str]:
    """All keys of a configuration, those of `backend_config` dotted."""
    values = tomllib.loads(text)
    backend = values.pop("backend_config")
    return {*values, *dotted_keys(backend)}


def config_of(size: str) -> ServerConfig:
    return load_config({}, CONFIGS / f"{size}.toml")


def test_the_three_sizes_have_the_same_keys() -> None:
    laptop, eight, three = (keys_in((CONFIGS / f"{size}.toml").read_text()) for size in SIZES)
    assert laptop | {"ray_address"} == eight == three
    assert "# ray_address" in (CONFIGS / "laptop.toml").read_text()


@pytest.mark.parametrize(
    ("size", "ray", "routed", "ranks", "engines", "gpus", "database"),
    [
        ("laptop", None, False, 1, 1, 1, "sqlite"),
        ("eight-gpus", "local", True, 4, 4, 8, "postgresql"),
        ("three-nodes", "auto", True, 8, 4, 24, "postgresql"),
    ],
)
def test_what_each_size_means(
    size: str, ray: str | None, routed: bool, ranks: int, engines: int, gpus: int, database: str
) -> None:
    config = config_of(size)
    placement, inference = config.backend_config.trainer.placement, config.backend_config.inference
    assert (config.ray, config.routed, placement.ranks, inference.num_engines) == (ray, routed, ranks, engines)
    assert config.database.startswith(f"{database}:")
    used = ranks + engines * inference.tensor_parallel_size
    assert used == gpus if config.ray else used >= gpus, "with Ray each rank and each vLLM has GPUs of its own"
    assert config.modes.trains
    assert config.modes.forwards
    assert config.host == "127.0.0.1"


def test_nodes_that_share_no_files_have_an_object_store() -> None:
    stores = [(config_of(size).checkpoint_store or "").partition(":")[0] for size in SIZES]
    assert stores == ["file", "file", "s3"]


def test_no_file_holds_a_password() -> None:
    for size in SIZES:
        assert "@" not in config_of(size).database or ":" not in config_of(size).database.split("//")[1].split("@")[0]
        assert config_of(size).external_inference_api_key is None


def job() -> list[str]:
    """The words of the command in submit.sh."""
    text = (DEPLOY / "ray" / "submit.sh").read_text()
    return shlex.split(text[text.index("exec ray") :].replace("\\\n", " "))


def test_the_job_starts_the_server_with_a_file_that_it_is_sent(read_serve: ReadServe) -> None:
    environment = yaml.safe_load((DEPLOY / "ray" / "runtime-env.yaml").read_text())
    sent = (DEPLOY / "ray" / environment["working_dir"]).resolve()
    words = job()
    [program, *rest] = words[words.index("--") + 1 :]
    assert program == "skyrl"
    config = read_serve([str(sent / word) if word.endswith(".toml") else word for word in rest], {})
    assert config.ray == "auto"
    assert (sent / "three-nodes.toml").is_file()


def test_the_job_has_time_to_stop_and_no_secrets() -> None:
    environment = yaml.safe_load((DEPLOY / "ray" / "runtime-env.yaml").read_text())
    assert int(environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > STOP_S
    assert not [name for name in environment["env_vars"] if any(word in name for word in ("KEY", "URL", "PASS"))]


def test_the_options_of_the_job_are_rays() -> None:
    """Ray's own command line without ray[default] cannot submit, but it knows the options."""
    ray = pytest.importorskip("ray.dashboard.modules.job.cli", reason="needs Ray (pip install 'skyrl[ray]')")
    words = job()
    given = {word for word in words[: words.index("--")] if word.startswith("--")}
    assert given <= {
        option for parameter in ray.submit.params for option in (*parameter.opts, *parameter.secondary_opts)
    }


def test_the_script_is_a_shell_script() -> None:
    done = subprocess.run(["sh", "-n", DEPLOY / "ray" / "submit.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def pod(group: str) -> dict[str, Any]:
    return GROUPS[group]["template"]


def container(group: str) -> dict[str, Any]:
    [found] = pod(group)["spec"]["containers"]
    return found


def test_kubernetes_accepts_all_but_the_ray_cluster(tmp_path: Path) -> None:
    """RayCluster has no schema here. Its pods are checked as pods."""
    known = [each for (kind, _), each in OBJECTS.items() if kind != "RayCluster"]
    pods = [{"apiVersion": "v1", "kind": "Pod", **pod(group)} for group in GROUPS]
    for number, each in enumerate(pods):
        each["metadata"] = {"name": f"pod-{number}", **each["metadata"]}
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all([*known, *pods]))
    done = subprocess.run(
        [Path(sys.executable).with_name("kubernetes-validate"), "--strict", tmp_path / "all.yaml"],
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert output.count(" passed for resource ") == len(known) + len(pods), output


def test_the_ray_cluster_has_the_fields_that_kuberay_knows() -> None:
    assert CLUSTER["apiVersion"] == "ray.io/v1"
    assert CLUSTER["spec"].keys() == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert GROUPS["head"].keys() == {"rayStartParams", "template"}
    expected = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    assert GROUPS["gpu"].keys() == expected
    values = [value for group in GROUPS.values() for value in group["rayStartParams"].values()]
    assert all(isinstance(value, str) for value in values), "KubeRay takes strings only"
    assert CLUSTER["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    for group in GROUPS:
        assert "$KUBERAY_GEN_RAY_START_CMD" in container(group)["args"][0]


def test_the_versions_of_ray_agree() -> None:
    ray = CLUSTER["spec"]["rayVersion"]
    for hardware in ("gpu", "cpu"):
        assert f"\nray=={ray}\n" in (DEPLOY.parent / f"requirements/{hardware}.txt").read_text()


def test_the_options_of_ray_start_exist() -> None:
    ray = pytest.importorskip("ray.scripts.scripts", reason="needs Ray (pip install 'skyrl[ray]')")
    known = {option for parameter in ray.start.params for option in parameter.opts}
    assert {f"--{name}" for group in GROUPS.values() for name in group["rayStartParams"]} <= known
    assert "--address" in {option for parameter in ray.healthcheck.params for option in parameter.opts}


@pytest.mark.parametrize("group", GROUPS)
def test_the_commands_of_the_pods_are_shell(group: str) -> None:
    each = container(group)
    assert each["command"][-2:] == ["bash", "-c"]
    done = subprocess.run(["bash", "-n", "-c", each["args"][0]], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_pod_of_the_head_ends_with_the_server_and_lets_it_stop(tmp_path: Path) -> None:
    """The command runs with a `ray` and a `skyrl` that only note what happens to them."""
    noted = tmp_path / "noted"
    noted.touch()
    (tmp_path / "ray").write_text("#!/bin/bash\n[ $1 = start ] || exit 0\nexec sleep 60\n")
    (tmp_path / "skyrl").write_text(
        f"#!/bin/bash\ntrap 'sleep 0.2; echo stopped >> {noted}; exit 0' TERM\necho \"$* $RAY_ADDRESS\" >> {noted}\n"
        "while true; do sleep 0.05; done\n"
    )
    for name in ("ray", "skyrl"):
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "POD_IP": "10.0.0.7",
        "KUBERAY_GEN_RAY_START_CMD": "ray start --head --block",
    }
    [script] = container("head")["args"]
    with subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True) as process:
        try:
            while not noted.read_text():
                assert process.poll() is None
            process.terminate()
            assert process.wait(20) == 0
        finally:
            subprocess.run(["bash", "-c", f"kill -9 -{process.pid}"], capture_output=True)
    assert noted.read_text().split("\n")[:2] == ["serve --config /etc/skyrl/skyrl.toml 10.0.0.7:6379", "stopped"]


def test_the_server_of_the_head_starts_with_these_settings(read_serve: ReadServe, tmp_path: Path) -> None:
    each = container("head")
    (tmp_path / "skyrl.toml").write_text(OBJECTS["ConfigMap", "skyrl-ray"]["data"]["skyrl.toml"])
    secret = next(s for s in documents(DEPLOY / "kubernetes/secret.example.yaml") if s["metadata"]["name"] == "skyrl")
    variables = {variable["name"]: variable["value"] for variable in each["env"] if "value" in variable}
    own = {name: value for name, value in variables.items() if name.startswith("SKYRL_")}
    config = read_serve(
        ["serve", "--config", str(tmp_path / "skyrl.toml")], image_environment() | own | secret["stringData"]
    )
    assert config.api_keys == "managed"
    assert config.ray == "auto"
    assert config.database.startswith("postgresql://")
    assert {"containerPort": config.port, "name": "http"} in each["ports"]
    same = config_of("three-nodes")
    assert config.backend_config == same.backend_config
    assert (config.checkpoint_store, config.api_processes) == (same.checkpoint_store, same.api_processes)


def test_the_workers_have_the_gpus_that_the_configuration_asks_for() -> None:
    config = config_of("three-nodes").backend_config
    gpus = int(container("gpu")["resources"]["limits"]["nvidia.com/gpu"])
    assert config.trainer.placement.policy_num_gpus_per_node <= gpus
    assert gpus % config.inference.tensor_parallel_size == 0, "a vLLM lies on one node"
    wanted = config.trainer.placement.ranks + config.inference.num_engines * config.inference.tensor_parallel_size
    assert wanted <= gpus * GROUPS["gpu"]["replicas"]
    assert GROUPS["head"]["rayStartParams"]["num-gpus"] == "0"


async def test_the_probes_ask_what_exists(status_of: GetStatus) -> None:
    each = container("head")
    for kind in ("startup", "liveness", "readiness"):
        assert await status_of(each[f"{kind}Probe"]["httpGet"]["path"]) in (200, 503)
        assert each[f"{kind}Probe"]["httpGet"]["port"] == "http"
    worker = container("gpu")
    [port] = [port for port in worker["ports"] if port["name"] == "raylet"]
    assert str(port["containerPort"]) == GROUPS["gpu"]["rayStartParams"]["node-manager-port"]
    assert {worker[f"{kind}Probe"]["tcpSocket"]["port"] for kind in ("startup", "liveness", "readiness")} == {"raylet"}


def test_nobody_outside_reaches_ray() -> None:
    assert GROUPS["head"]["rayStartParams"]["include-dashboard"] == "false"
    policy = OBJECTS["NetworkPolicy", "skyrl-ray"]["spec"]
    labels = {"app.kubernetes.io/name": "skyrl-ray"}
    inside, outside = policy["ingress"]
    assert inside == {"from": [{"podSelector": {"matchLabels": labels}}]}
    assert outside == {"ports": [{"port": 8000}]}
    assert policy["podSelector"]["matchLabels"] == labels
    for group in GROUPS:
        assert labels.items() <= pod(group)["metadata"]["labels"].items()
    service = OBJECTS["Service", "skyrl-ray"]["spec"]
    assert service["selector"] == pod("head")["metadata"]["labels"]
    assert [port["targetPort"] for port in service["ports"]] == ["http"]


@pytest.mark.parametrize("group", GROUPS)
def test_a_pod_has_time_to_stop_no_rights_and_its_volumes(group: str) -> None:
    spec, each = pod(group)["spec"], container(group)
    assert spec["terminationGracePeriodSeconds"] > STOP_S
    user, own_group = map(int, of_image("USER").split(":"))
    security = spec["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["runAsNonRoot"]) == (user, own_group, True)
    assert each["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not spec["enableServiceLinks"]
    assert {mount["name"] for mount in each["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    for volume in spec["volumes"]:
        if "persistentVolumeClaim" in volume:
            assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in OBJECTS
    assert next(mount["mountPath"] for mount in each["volumeMounts"] if mount["name"] == "models") == "/models"
