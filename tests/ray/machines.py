"""A Ray cluster whose nodes are processes of their own with addresses on loopback: a test can kill one like a machine.

`ray.cluster_utils.Cluster` keeps killed nodes as zombies, which their workers take as alive. It also writes down its
address, and a thread that uses Ray after the end of its driver connects to that cluster and keeps a node from leaving.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from skyrl.runtime.processes.ports import free_port
from skyrl.runtime.ray_cluster.head import HEALTH_CHECKS, PRIORITY

ROOT = Path(__file__).parents[2]
HEAD = "127.0.0.2"
FIRST_NODE = 10
"""The last number of the first node's address. All nodes' addresses are as long then, and in the same order as numbers
and as text, however many nodes the earlier tests have added."""
STORE_BYTES = 80 * 2**20
WITHIN_S = 120.0
TRIES = 3
SIDECAR = "skyrl.inference.remote.sidecar"
"""The module of a placed vLLM's sidecar."""


@dataclass
class Machine:
    """One node: `ray start --block`, and what it has started."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path
    cache: Path
    """Where the node keeps weights, apart from other nodes."""

    def raylet(self) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if "raylet/raylet" in " ".join(process.cmdline()):
                return process
        raise LookupError(self.log.read_text())

    def actors(self) -> list[psutil.Process]:
        """The processes of the vLLMs' actors."""
        return [each for each in self.raylet().children() if each.name().startswith("ray::ServerHost")]

    def vllms(self) -> list[psutil.Process]:
        return [child for child, command in self._children() if SIDECAR not in command]

    def sidecars(self) -> list[psutil.Process]:
        return [child for child, command in self._children() if SIDECAR in command]

    def _children(self) -> list[tuple[psutil.Process, list[str]]]:
        """The living children of all actors, with their commands."""
        found = []
        for child in [child for actor in self.actors() for child in actor.children()]:
            with suppress(psutil.NoSuchProcess):  # it has just ended; a zombie, too
                found.append((child, child.cmdline()))
        return found

    def ranks(self) -> list[psutil.Process]:
        """The processes of the trainer's ranks."""
        return [each for each in self.raylet().children() if each.name().startswith("ray::RankActor")]

    def all(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def kill(self) -> None:
        """Kill Ray on this node. Its actors end within some seconds, and their vLLMs with them."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def freeze(self) -> list[psutil.Process]:
        """Stop all processes of this node, as if the machine were cut off. Returns them."""
        stopped = self.all()
        for process in reversed(stopped):
            process.suspend()
        return stopped


@dataclass
class Machines:
    """The cluster. The head has no CPUs, so that nothing is placed there but what asks for the resource `trainer`."""

    directory: Path
    port: int = field(default_factory=lambda: 20_000 + free_port() % 12_000)
    nodes: dict[str, Machine] = field(default_factory=dict)
    """All nodes by their addresses, also those that were killed. The head is the first one."""

    @property
    def address(self) -> str:
        return f"{HEAD}:{self.port}"

    def workers(self) -> list[Machine]:
        """The living nodes besides the head."""
        return [node for node in [*self.nodes.values()][1:] if node.process.poll() is None]

    def start_head(self) -> None:
        options = [f"--port={self.port}", "--head", "--include-dashboard=false", "--no-monitor", "--num-cpus=0"]
        options.append('--resources={"trainer": 1}')
        self._start(HEAD, [*options, "--disable-usage-stats"])

    def add(self, *, cpus: int = 0, resources: str = "{}") -> Machine:
        """Start a node with the next address; returns when it has joined."""
        options = [f"--address={self.address}", f"--num-cpus={cpus}", f"--resources={resources}"]
        return self._start(f"127.0.0.{FIRST_NODE + len(self.nodes) - 1}", options)

    def _start(self, address: str, options: list[str]) -> Machine:
        """Ray gives up a start after 30 s: on a busy machine it is tried again."""
        for _ in range(TRIES):
            machine = self.nodes[address] = self._once(address, options)
            deadline = time.monotonic() + WITHIN_S
            while machine.process.poll() is None and time.monotonic() < deadline:
                if "Ray runtime started" in machine.log.read_text():
                    return machine
                time.sleep(0.1)
            machine.kill()
        raise AssertionError(f"{address} has not started: {self.nodes[address].log.read_text()[-2000:]}")

    def _once(self, address: str, options: list[str]) -> Machine:
        where = [f"--node-ip-address={address}", f"--temp-dir={self.directory}", f"--object-store-memory={STORE_BYTES}"]
        ports = ["--min-worker-port=0", "--max-worker-port=0", "--include-log-monitor=false"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where, *ports, *options]
        hook = {
            "RAY_START_HOOK": "skyrl.runtime.ray_cluster.head.without_client_server",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        cache = self.directory / f"cache-{address}"
        own = {"PYTHONPATH": str(ROOT), "SKYRL_NODE_CACHE": str(cache)}
        log = self.directory / f"{address}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                env=os.environ | HEALTH_CHECKS | PRIORITY | hook | own,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        return Machine(address, process, log, cache)


@contextmanager
def machines() -> Iterator[Machines]:
    """A cluster with a head only; all its processes are killed at the end."""
    directory = Path(tempfile.mkdtemp(prefix="skyr-"))
    cluster = Machines(directory)
    try:
        cluster.start_head()
        yield cluster
    finally:
        for machine in cluster.nodes.values():
            if machine.process.poll() is None:
                running = machine.all()
                machine.kill()
                for process in running:
                    if process.is_running():
                        process.kill()
        shutil.rmtree(directory, ignore_errors=True)
