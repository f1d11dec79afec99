"""What kind of cluster it is: asked once before a server starts, by a process that ends afterwards.

So the launcher does not import Ray, and a cluster that cannot be used is known before anything was started.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from skyrl.base.config.server import ConfigError
from skyrl.runtime.processes.startup import CANNOT_START, MARK, MAY_START, cause_of_own
from skyrl.runtime.ray_cluster.connection import NoCluster, check_installed, connect

WITHIN_S = 90.0


@dataclass(frozen=True)
class ClusterFacts:
    """`gpus` of all living nodes, and the number of these nodes."""

    nodes: int
    gpus: float


def ask(address: str) -> ClusterFacts:
    """Raises ConfigError and NoCluster, as `connect` does."""
    check_installed()
    command = [sys.executable, "-m", "skyrl.runtime.ray_cluster.facts", address]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoCluster(f"ray_address: the Ray cluster at {address} gave no answer in {WITHIN_S:.0f} s") from error
    if asked.returncode == 0:
        return ClusterFacts(**json.loads(asked.stdout.splitlines()[-1]))
    cause = cause_of_own(asked.returncode, asked.stderr)
    if cause is None:
        last_line = (asked.stderr.strip() or f"exit code {asked.returncode}").splitlines()[-1]
        raise NoCluster(f"ray_address: cannot connect to the Ray cluster at {address}: {last_line[:300]}")
    raise ConfigError(cause.sentence) if cause.final else NoCluster(cause.sentence)


def main() -> None:
    try:
        connect(sys.argv[1], namespace="skyrl-facts")
    except (ConfigError, NoCluster) as error:
        print(f"{MARK}{' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(CANNOT_START if isinstance(error, ConfigError) else MAY_START)
    from skyrl.runtime.ray_cluster.capacity import nodes

    living = nodes()
    print(json.dumps({"nodes": len(living), "gpus": sum(node.total.get("GPU", 0.0) for node in living)}))


if __name__ == "__main__":
    main()
