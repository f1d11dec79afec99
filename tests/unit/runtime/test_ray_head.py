"""The Ray cluster of one machine, and what a cluster has free, in words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.cli.launcher import preflight
from skyrl.cli.launcher import preflight as ray_room
from skyrl.runtime.ray_cluster import connection
from skyrl.runtime.ray_cluster.capacity import NodeCapacity, amounts, missing
from skyrl.runtime.ray_cluster.connection import ClusterFacts
from skyrl.runtime.ray_cluster.head import HOST, LONGEST_TMPDIR, LocalCluster, wanted_cpus

ENGINE = "generator.inference_engine"


def config_of(tmp_path: Path, ray: Any = "local", **backend: Any) -> ServerConfig:
    return load_config(
        {"state_dir": tmp_path, "ray_address": ray, "backend_config": backend, "checkpoint_store": "file:///store"}
    )


def test_the_sockets_of_ray_fit_into_the_shortest_and_the_longest_directory() -> None:
    longest = (
        f"{'x' * LONGEST_TMPDIR}/skyrl-abcdefgh/ray/session_2026-11-24_08-47-34_206311_4194304/sockets/plasma_store"
    )
    assert len(longest) <= 107


def test_only_this_server_may_use_its_cluster(tmp_path: Path) -> None:
    cluster = LocalCluster(config_of(tmp_path), 6543, tmp_path)
    cluster.write_token()
    token = tmp_path / "ray-token"
    assert token.stat().st_mode & 0o777 == 0o600
    first = token.read_text()
    cluster.write_token()
    assert token.read_text() != first
    assert cluster.client_environment() == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    assert cluster.environment([]).items() >= cluster.client_environment().items()
    assert cluster.environment([])["RAY_worker_niceness"] == "0", "as much of the cores as without Ray"
    assert cluster.address == f"{HOST}:6543"
    command = " ".join(cluster.command())
    assert f"--node-ip-address {HOST} --port 6543" in command
    assert str(tmp_path / "ray") in command


def test_a_machine_has_as_many_cpus_as_its_parts_want(tmp_path: Path) -> None:
    assert wanted_cpus(config_of(tmp_path, **{f"{ENGINE}.num_engines": 3})) == 4
    resources: dict[str, Any] = {f"{ENGINE}.num_engines": 2, f"{ENGINE}.resources": {"box": 1}}
    assert wanted_cpus(config_of(tmp_path, **resources)) == 1
    ranks = {"trainer.placement.policy_num_cpu_ranks": 2, "trainer.placement.policy_resources": {"memory": 1e9}}
    assert wanted_cpus(config_of(tmp_path, **ranks)) == 3, "each rank takes a CPU besides these"
    entry = {"base_model": "tiny", "backend_config": {f"{ENGINE}.num_engines": 64}}
    entries = [entry, entry | {"served_model_names": ["teacher"], "uses": ["sample"]}]
    several = load_config({"state_dir": tmp_path, "ray_address": "local", "base_models": json.dumps(entries)})
    command = LocalCluster(several, 1, tmp_path).command()
    assert command[command.index("--num-cpus") + 1] == str(max(129, os.cpu_count() or 1))
    many = LocalCluster(config_of(tmp_path, **{f"{ENGINE}.num_engines": 64}), 1, tmp_path).command()
    assert many[many.index("--num-cpus") + 1] == str(max(65, os.cpu_count() or 1))


def test_a_machine_with_too_few_gpus_for_vllms_and_trainer_is_refused(tmp_path: Path) -> None:
    two = config_of(tmp_path, **{f"{ENGINE}.num_engines": 2})
    ray_room.check_shared_gpus((two,), [])
    ray_room.check_shared_gpus((two,), ["0", "1", "2"])
    with pytest.raises(ConfigError, match="the vLLMs need 2 and the trainer needs 1, and this machine has 2"):
        ray_room.check_shared_gpus((two,), ["0", "1"])
    with pytest.raises(ConfigError, match="the vLLMs need 4 and the trainers need 2, and this machine has 5"):
        ray_room.check_shared_gpus((two, two), ["0", "1", "2", "3", "4"])
    on_cpus = config_of(tmp_path, **{f"{ENGINE}.num_engines": 2, "trainer.placement.policy_num_cpu_ranks": 4})
    ray_room.check_shared_gpus((on_cpus,), ["0", "1"])


ALONE = "and no other node will join, because the Ray cluster is this machine alone"


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (
            {"policy_num_gpus_per_node": 2},
            f"trainer.placement.policy_num_gpus_per_node: no node has 2 GPU: this machine has no GPU, {ALONE}: set "
            "trainer.placement.policy_num_cpu_ranks in its place, or give the ray_address of a cluster that has it",
        ),
        (
            {"policy_num_nodes": 2},
            "no node has 1 GPU for each of 2, and 0 of them fit: this machine has no GPU, and no",
        ),
        (
            {"policy_num_cpu_ranks": 2, "policy_resources": {"CPU": 1, "seat": 1}},
            "resources: no node has 1 seat",
        ),
    ],
)
def test_ranks_that_this_machine_can_never_place_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(preflight, "cuda_devices", list[str])
    with pytest.raises(ConfigError, match=re.escape(said)):
        preflight.check(config_of(tmp_path, **{"trainer.placement": placement}))


def test_ranks_that_wait_for_nothing_that_is_missing_for_ever_are_not_refused(tmp_path: Path) -> None:
    def check(devices: list[str], **placement: Any) -> None:
        ray_room.check_room_of_ranks(config_of(tmp_path, **{"trainer.placement": placement}), devices)

    check([])
    check([], policy_num_cpu_ranks=64)
    check([], policy_num_cpu_ranks=2, policy_resources={"memory": 1e9})
    check(["0", "1"], policy_num_gpus_per_node=2, policy_resources={"accelerator_type:H100": 0.001})


def test_vllms_that_this_machine_can_never_place_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = config_of(tmp_path, **{f"{ENGINE}.resources": {"CPU": 1, "box": 1}})
    wide = config_of(tmp_path, **{f"{ENGINE}.tensor_parallel_size": 2})
    monkeypatch.setattr(preflight, "cuda_devices", list[str])
    with pytest.raises(ConfigError, match=f"{ENGINE}.resources: no node has 1 box: this machine has no box, {ALONE}"):
        preflight.check(boxes)
    monkeypatch.setattr(preflight, "cuda_devices", lambda: ["0"])
    with pytest.raises(ConfigError, match=f"{ENGINE}.tensor_parallel_size: no node has 2 GPU: this machine has 1 of 1"):
        preflight.check_placed_vllms(wide, "local")


def test_on_a_cluster_with_an_address_ranks_wait_for_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_engine_with_ranks` has ranks that wait there."""
    monkeypatch.setattr(preflight, "cuda_devices", list[str])
    monkeypatch.setattr(preflight, "ask", lambda address: ClusterFacts(1, 0.0))
    config = config_of(tmp_path, "10.0.0.1:6379", **{"trainer.placement.policy_num_gpus_per_node": 2})
    assert preflight.check(config).ray_address == "10.0.0.1:6379"


def test_a_killed_leader_takes_its_group_with_it(tmp_path: Path) -> None:
    """`ray start` leaves two processes behind when it is killed."""
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    command = [sys.executable, "-m", "skyrl.runtime.ray_cluster.head_process", sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd=Path(__file__).parents[3]
    ) as leader:
        assert leader.stdout is not None
        left = psutil.Process(int(leader.stdout.readline()))
        leader.kill()  # perhaps before the watching process has opened its descriptor of the leader
        assert psutil.wait_procs([left], timeout=60)[1] == []


def test_a_start_with_a_cluster_asks_it_and_not_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(address: str) -> ClusterFacts:
        asked.append(address)
        return ClusterFacts(3, 16.0)

    monkeypatch.setattr(preflight, "ask", ask)
    monkeypatch.setattr(preflight, "check_vllm", lambda **_: pytest.fail("each node checks its own vLLM"))
    found = preflight.check(config_of(tmp_path, "10.0.0.1:6379", **{f"{ENGINE}.tensor_parallel_size": 4}))
    assert asked == ["10.0.0.1:6379"]
    assert (found.ray_address, found.cuda, found.devices) == ("10.0.0.1:6379", True, [])


def test_a_cluster_that_cannot_be_used_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Ray cluster answers at 127.0.0.1:1"):
        preflight.check(config_of(tmp_path, "127.0.0.1:1"))


def test_an_unknown_failure_of_the_question_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.sys, "executable", "/bin/false")
    with pytest.raises(connection.NoCluster, match="cannot connect to the Ray cluster at h:1: exit code 1"):
        connection.ask("h:1")


def node(number: int, total: dict[str, float], free: dict[str, float] | None = None) -> NodeCapacity:
    return NodeCapacity(f"id{number}", f"10.0.0.{number}", total, total if free is None else free)


def test_nothing_is_missing_where_the_bundles_fit():
    both = [node(1, {"CPU": 2}), node(2, {"CPU": 1, "GPU": 1})]
    assert missing([{"CPU": 1, "GPU": 1}, {"CPU": 1}, {"CPU": 1}], both) == ""


def test_each_node_with_what_it_is_short_of():
    cluster = [node(1, {"CPU": 8}), node(2, {"CPU": 8, "GPU": 4}, {"CPU": 0.5, "GPU": 1})]
    assert missing([{"GPU": 2, "CPU": 1}], cluster) == (
        "no node has 1 CPU and 2 GPU: 10.0.0.1 has no GPU; 10.0.0.2 has 0.5 of 8 CPU free and 1 of 4 GPU free"
    )


def test_a_bundle_after_the_ones_that_fit():
    cluster = [node(1, {"GPU": 2}), node(2, {"GPU": 1}, {})]
    assert missing([{"GPU": 1}] * 3, cluster) == (
        "no node has 1 GPU for each of 3, and 2 of them fit: 10.0.0.1 has 0 of 2 GPU free; 10.0.0.2 has 0 of 1 GPU free"
    )


def test_bundles_that_need_nodes_of_their_own():
    assert missing([{"CPU": 1}] * 2, [node(1, {"CPU": 9})], apart=True) == (
        "no other node has 1 CPU for each of 2, and 1 of them fit, each on its own node: there is no further node"
    )
    assert missing([{"CPU": 1}] * 2, [node(1, {"CPU": 9}), node(2, {"CPU": 1})], apart=True) == ""


def test_only_the_nearest_nodes_are_named():
    cluster = [node(number, {"CPU": 1}) for number in range(1, 10)]
    said = missing([{"CPU": 2}], cluster)
    assert said.count("CPU free") == 4
    assert said.endswith("and 5 more nodes")


def test_a_cluster_without_nodes():
    assert missing([{"CPU": 1}], []) == "the Ray cluster has no living node"


def test_amounts_without_trailing_zeros():
    assert amounts({"CPU": 2.0, "GPU": 0, "box": 0.5}) == "2 CPU and 0.5 box"
    assert amounts({}) == "no resource"


def test_ray_counts_ten_thousandths():
    assert missing([{"CPU": 0.1}] * 10, [node(1, {"CPU": 1})]) == ""
