"""The connection of this process, a driver, to a Ray cluster, and sentences for what keeps it from connecting.

Run as a program, it says what kind of cluster it is, and ends. `ask` runs it once before a server starts. So the
launcher does not import Ray, and a cluster that cannot be used is known before anything was started.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from skyrl.base.config.server import ConfigError
from skyrl.runtime.processes.startup import CANNOT_START, MARK, MAY_START, NotLoaded, cause_of_own

CONNECT_S = 5.0
"""How long the cluster's head may take to accept a connection. Ray itself tries for 80 s."""
GCS_TIMEOUT_VARIABLE, GCS_TIMEOUT_S = "RAY_gcs_server_request_timeout_seconds", "20"
"""How long Ray looks for the cluster's node on this machine; by default 60 s."""
RETRY_S = 0.3
ADDRESS_VARIABLE = "RAY_ADDRESS"


class NoCluster(NotLoaded):
    """The cluster cannot be used now. It may be started, or come back."""


def check_installed() -> None:
    """Raises ConfigError when Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("ray_address: Ray is not installed: pip install 'skyrl[ray]'")


def find_address(configured: str) -> str:
    """HOST:PORT of the cluster that `ray_address` means: for `auto` that of RAY_ADDRESS, or else the cluster that was
    started last on this machine. Raises NoCluster when there is none, ConfigError when RAY_ADDRESS cannot be used."""
    if configured != "auto":
        return configured
    address = os.environ.get(ADDRESS_VARIABLE, "")
    if address not in ("", "auto", "local"):
        if address.startswith("ray://") or not address.rpartition(":")[2].isdecimal():
            raise ConfigError(f"{ADDRESS_VARIABLE}: {address!r} is not HOST:PORT of the head of a Ray cluster")
        return address
    file = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    try:
        return file.read_text().strip()
    except OSError as error:
        raise NoCluster(
            f"ray_address: auto, but {ADDRESS_VARIABLE} is not set and this machine is no node of a Ray cluster: run "
            "`ray start --address=HOST:PORT` here first, or give --ray-address local"
        ) from error


def check_reachable(address: str) -> None:
    """Raises NoCluster when nothing accepts connections at the address."""
    host, port = split(address)
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        cause = error.strerror or str(error)
        raise NoCluster(
            f"ray_address: no Ray cluster answers at {address} ({cause}): start it with `ray start --head`, or correct "
            "the address"
        ) from error


def connect(address: str, *, namespace: str, patience_s: float = 0.0) -> None:
    """Make this process a driver of the cluster at `address`, HOST:PORT. Actors without another lifetime end with it.

    Call it on the main thread, before signal handlers are set: Ray sets its own for SIGTERM. A cluster that cannot be
    used is tried again for `patience_s`: it may be starting. One try blocks for up to half a minute. Raises NoCluster,
    and ConfigError when Ray is not installed or has another version than the cluster.
    """
    check_installed()
    until = time.monotonic() + patience_s
    while True:
        try:
            _connect(address, namespace)
            return
        except NoCluster:
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_S)


def _connect(address: str, namespace: str) -> None:
    check_reachable(address)
    os.environ.setdefault(GCS_TIMEOUT_VARIABLE, GCS_TIMEOUT_S)
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # else a thread that is left connects again, or starts Ray
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as of Ray 3; else Ray warns of the change
    import ray

    try:
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address=_own_loopback(split(address)[0]),
        )
    except ConnectionError as error:
        raise NoCluster(
            f"ray_address: {address} accepts connections, but does not answer as a Ray cluster: it is starting, or it "
            "wants a token (RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH)"
        ) from error
    except RuntimeError as error:
        raise _explained(address, error) from error


def disconnect() -> None:
    """End this driver, and with it its actors. Does nothing without a connection."""
    import ray

    ray.shutdown()


def split(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; the host of an IPv6 address without brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _own_loopback(host: str) -> str | None:
    """The driver's address on a cluster whose nodes are 127.0.0.2, 127.0.0.3 and so on. None elsewhere: Ray finds the
    node of this machine. Ray replaces 127.0.0.1 by the machine's outer address, so that no node can have it."""
    try:
        return host if ipaddress.ip_address(host).is_loopback and host not in ("127.0.0.1", "::1") else None
    except ValueError:  # a name
        return None


def _explained(address: str, error: RuntimeError) -> Exception:
    text = str(error)
    if "ersion mismatch" in text:
        return ConfigError(
            f"ray_address: the cluster at {address} and this server need the same versions of Ray and Python. "
            f"{' '.join(text.partition(': ')[2].split())}"
        )
    if "No node info found" in text:
        return NoCluster(
            f"ray_address: this machine is no node of the Ray cluster at {address}: run "
            f"`ray start --address={address}` here, or start this server on a node of the cluster"
        )
    return NoCluster(f"ray_address: cannot connect to the Ray cluster at {address}: {' '.join(text.split())[:300]}")


WITHIN_S = 90.0


@dataclass(frozen=True)
class ClusterFacts:
    """`gpus` of all living nodes, and the number of these nodes."""

    nodes: int
    gpus: float


def ask(address: str) -> ClusterFacts:
    """Raises ConfigError and NoCluster, as `connect` does."""
    check_installed()
    command = [sys.executable, "-m", "skyrl.runtime.ray_cluster.connection", address]
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
