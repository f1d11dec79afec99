"""The largest real cluster that fits on one machine: PostgreSQL, servers with one API process each, one router and
fake replicas, all processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.processes import parts_of
from benchmarks.samples import MODEL
from benchmarks.simulation.clients import ClientsSpec
from benchmarks.stage import NullUpstream, wait_ready
from skyrl.cli.demo.server import DemoServer
from skyrl.runtime.processes.ports import free_port
from skyrl.runtime.processes.supervision import dies_with_parent
from tests.postgres_server import PostgresServer


@dataclass
class RealCluster:
    """`database` is the process id of PostgreSQL's first process, `router` that of the router."""

    servers: list[DemoServer]
    replicas: list[NullUpstream]
    database: int
    router: int
    url: str
    """Of the database."""

    def groups(self) -> dict[str, list[int]]:
        """The process ids by part, for ClientsSpec."""
        return {
            "api": [parts_of(server.pid)["api"] for server in self.servers],
            "database": [self.database],
            "router": [self.router],
            "replicas": [replica.pid for replica in self.replicas],
        }

    def load(self, clients: int, in_flight: int, seconds: float, **more: Any) -> Load:
        urls = [server.url for server in self.servers]
        return Load(replace(ClientsSpec(urls, clients, in_flight, seconds, groups=self.groups()), **more))

    def commits(self) -> dict[str, float]:
        """Of the first server so far: `groups` that were committed, their `rows`, and their `seconds` in all."""
        text = httpx.get(f"{self.servers[0].url}/metrics", timeout=30, trust_env=False).text
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("skyrl_db_"))
        groups = sum(float(v) for k, v in found.items() if k.startswith("skyrl_db_rows_per_commit_count"))
        rows = sum(float(v) for k, v in found.items() if k.startswith("skyrl_db_rows_per_commit_sum"))
        seconds = sum(float(v) for k, v in found.items() if k.startswith("skyrl_db_commit_seconds_sum"))
        return {"groups": groups, "rows": rows, "seconds": seconds}

    def kill_server(self, number: int) -> None:
        """End a server at once with all its processes, as a machine that loses its power."""
        launcher = psutil.Process(self.servers[number].pid)
        for process in (launcher, *launcher.children(recursive=True)):
            process.kill()


class Load:
    """Clients in a process of their own, from the first sample to `result`."""

    def __init__(self, spec: ClientsSpec) -> None:
        command = [sys.executable, "-m", "benchmarks.simulation.clients", json.dumps(asdict(spec))]
        self._process = subprocess.Popen(dies_with_parent(command), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "open\n", "the clients could not open their sessions"

    def result(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        output = self._process.stdout.read()
        self._process.wait()
        return json.loads(output)


@contextmanager
def cluster(
    servers: int, replicas: int, delay_ms: float = 0.0, module: str = "benchmarks.null_upstream", *more_flags: str
) -> Generator[RealCluster]:
    """A running cluster. A replica, which is the program `module`, answers after `delay_ms`. `more_flags` are those of
    the servers."""
    with ExitStack() as stack:
        upstreams, router_url, router = stack.enter_context(_upstreams(replicas, delay_ms, module))
        url = stack.enter_context(_database())
        started: list[DemoServer] = []
        for _ in range(servers):
            state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-cluster-")))
            flags = ("--backend", "none", "--base-model", MODEL, "--external-inference-url", router_url, *more_flags)
            server = DemoServer(state, *flags, "--database-url", url)
            stack.callback(server.stop)
            server.start()
            server.wait_api()
            started.append(server)
        time.sleep(5)  # two rounds, so that all know of each other
        yield RealCluster(started, upstreams, postgres_pid(), router, url)


@contextmanager
def training_server(apis: int, replicas: int, delay_ms: float) -> Generator[str]:
    """The URL of one server with an engine of the tiny model and several API processes on PostgreSQL, in front of fake
    replicas that answer after `delay_ms`."""
    with ExitStack() as stack:
        _, router_url, _ = stack.enter_context(_upstreams(replicas, delay_ms))
        url = stack.enter_context(_database())
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-cluster-")))
        flags = ("--external-inference-url", router_url, "--database-url", url, "--api-processes", str(apis))
        server = DemoServer(state, *flags)
        stack.callback(server.stop)
        server.start()
        server.wait_ready()
        yield server.url


@contextmanager
def _upstreams(
    replicas: int, delay_ms: float, module: str = "benchmarks.null_upstream"
) -> Generator[tuple[list[NullUpstream], str, int]]:
    """Fake replicas that answer after `delay_ms`, and the address and process id of the router in front of them."""
    with ExitStack() as stack:
        upstreams = [stack.enter_context(NullUpstream(module)) for _ in range(replicas)]
        for upstream in upstreams:
            upstream.control(f"delay_ms={delay_ms}")
        yield (upstreams, *stack.enter_context(_router([upstream.url for upstream in upstreams])))


@contextmanager
def _database() -> Generator[str]:
    """The URL of a new database on a PostgreSQL of its own."""
    server = PostgresServer()
    try:
        server.start()
        yield server.url(server.new_database())
    finally:
        server.remove()


@contextmanager
def _router(workers: list[str]) -> Generator[tuple[str, int]]:
    """Address and process id of a router."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "skyrl.cli.main", "router", "--port", str(port), "--worker", *workers]
    process = subprocess.Popen(dies_with_parent(command), stderr=subprocess.DEVNULL)
    try:
        wait_ready(f"{url}/readyz")
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def postgres_pid() -> int:
    """PostgreSQL's first process: the only child named postgres of this process's children."""
    for child in psutil.Process(os.getpid()).children(recursive=True):
        parent = child.parent()
        if child.name() == "postgres" and parent is not None and parent.name() != "postgres":
            return child.pid
    raise RuntimeError("PostgreSQL does not run")
