"""A Ray cluster on loopback for the tests of this folder: a head at 127.0.0.2, and nodes that tests add.

The cluster's files are in a directory of its own with a short path: Ray has sockets there. Tests that start servers
give them the address: the last cluster that was started on this machine may be another.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
STORE_BYTES = 80 * 2**20


class LoopbackCluster:
    """A head with `head` of the resource "head" and no CPUs, so that actors run on the nodes that tests add."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._directory = Path(tempfile.mkdtemp(prefix="skr"))
        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "node_ip_address": "127.0.0.2",
                "include_dashboard": False,
                "object_store_memory": STORE_BYTES,
                "temp_dir": str(self._directory),
                "_system_config": HEALTH,
            },
        )
        self._nodes = 0

    @property
    def address(self) -> str:
        """HOST:PORT of the head."""
        return self._cluster.address

    def add_node(self, **resources: float) -> Any:
        """Add a node with an address of its own; `CPU` and `GPU` are resources, too. Call it on the main thread: Ray
        sets signal handlers."""
        self._nodes += 1
        return self._cluster.add_node(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            node_ip_address=f"127.0.0.{2 + self._nodes}",
            object_store_memory=STORE_BYTES,
        )

    def remove_node(self, node: Any) -> None:
        self._cluster.remove_node(node)

    def close(self) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[LoopbackCluster]:
    """The cluster. This process is not connected to it."""
    cluster = LoopbackCluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def ray_driver(ray_cluster: LoopbackCluster) -> Iterator[LoopbackCluster]:
    """The cluster; this process is a driver of it."""
    from skyrl.cluster import connection

    connection.connect(ray_cluster.address, namespace="tests")
    yield ray_cluster
    connection.disconnect()
