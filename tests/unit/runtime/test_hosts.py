"""The actor that runs a server on a node, called without Ray: logs, ends, ports, and what it leaves behind."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from skyrl.base.config.server import ConfigError
from skyrl.runtime.processes.ports import HeldPort
from skyrl.runtime.ray_cluster import hosts
from skyrl.runtime.ray_cluster.hosts import Look, ServerHost

WAIT_S = 60.0
SLEEPS = "import os, time; print('up', os.environ.get('RAY_JOB_ID'), os.environ['OWN'], flush=True); time.sleep(600)"


@dataclass(frozen=True)
class Spec:
    argv: tuple[str, ...]
    env: dict[str, str]
    url: str
    sidecar: Spec | None = None


@dataclass(frozen=True)
class Program:
    code: str
    refuses: str = ""
    sidecar_code: str = ""

    def check(self) -> None:
        if self.refuses:
            raise ConfigError(self.refuses)

    def command(self, host: str, port: int, sidecar_port: int, directory: Path) -> Spec:
        sidecar = Spec(_python(self.sidecar_code), {}, f"http://{host}:{sidecar_port}") if self.sidecar_code else None
        return Spec(_python(self.code), {"OWN": "given"}, f"http://{host}:{port}", sidecar)


def _python(code: str) -> tuple[str, ...]:
    return sys.executable, "-S", "-c", code


class HostAlone(ServerHost):
    """Ends its process when nobody asks, as an actor does."""

    def node(self) -> tuple[str, str]:
        return "id", "127.0.0.1"


class HostHere(HostAlone):
    def _end_if_unasked(self) -> None:
        """An actor ends its process, which is the tests' here."""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., HostHere]]:
    monkeypatch.setattr(hosts.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("RAY_JOB_ID", "secret")
    made: list[HostHere] = []

    def new(code: str = SLEEPS, port: int | None = None, refuses: str = "", sidecar: str = "") -> HostHere:
        made.append(HostHere("server", Program(code, refuses, sidecar), port))
        return made[-1]

    yield new
    for host in made:
        host.stop(0)


def looked(host: ServerHost, condition: Callable[[Look], object]) -> Look:
    deadline = time.monotonic() + WAIT_S
    while not condition(look := host.look(0)):
        assert time.monotonic() < deadline, look
        time.sleep(0.01)
    return look


def test_a_server_runs_logs_and_is_killed(make: Callable[..., HostHere]) -> None:
    host = make()
    started = host.start()
    assert started.url is not None
    assert looked(host, lambda look: look.log).log == b"up None given\n", "Ray's own variables are not the server's"
    assert host.look(len(b"up ")).log == b"None given\n"
    host.kill()
    assert looked(host, lambda look: look.code is not None).code == -9
    host.ended()
    again = host.start()
    assert again.url == started.url, "the port is the same again"
    assert again.incarnation != started.incarnation


def test_the_rest_of_a_log_comes_before_the_exit_code(make: Callable[..., HostHere]) -> None:
    host = make(f"import sys; print('x' * {hosts.LOG_BYTES + 9}); sys.exit(4)")
    host.start()
    first = looked(host, lambda look: len(look.log) == hosts.LOG_BYTES)
    assert first.code is None
    deadline = time.monotonic() + WAIT_S
    while (rest := host.look(first.next_offset)).code is None:
        assert time.monotonic() < deadline
    assert (rest.code, len(rest.log)) == (4, 10)


def test_a_long_log_is_emptied_once_it_was_read(make: Callable[..., HostHere], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "LOG_FILE_BYTES", 10)
    host = make("import time; print('more than ten bytes', flush=True); time.sleep(600)")
    host.start()
    assert looked(host, lambda look: look.log).next_offset == 0
    assert host.look(0).log == b""


def test_a_node_that_cannot_run_the_server_says_why(make: Callable[..., HostHere]) -> None:
    started = make(refuses="vLLM is not installed").start()
    assert (started.url, started.trouble) == (None, "on node 127.0.0.1: vLLM is not installed")


def test_ports_are_held_to_the_stop_and_change_only_when_somebody_listens(
    make: Callable[..., HostHere],
) -> None:
    host = make("import time; time.sleep(600)", sidecar=SIDECAR)

    def restarted() -> list[int]:
        if host._child is not None:
            host.kill()
            looked(host, lambda look: look.code is not None)
            host.ended()
        started = host.start()
        assert started.url is not None
        assert started.sidecar_url is not None
        return [int(url.rpartition(":")[2]) for url in (started.url, started.sidecar_url)]

    first = restarted()
    for port in first:
        with pytest.raises(OSError, match="already in use"):
            HeldPort(port)  # nobody listens there
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", first[0]))
        stranger.listen()
        second = restarted()
    assert (second[0] != first[0], second[1]) == (True, first[1])
    host.stop(0)
    for port in (*first, *second):
        HeldPort(port).close()


def test_a_configured_port_that_is_taken_is_an_error(make: Callable[..., HostHere]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        started = make(port=taken.getsockname()[1]).start()
    assert started.url is None
    assert "Address already in use" in started.trouble


def test_a_stop_ends_all_processes_and_removes_the_directory(make: Callable[..., HostHere], tmp_path: Path) -> None:
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    host = make(f"{child}print('up', flush=True); time.sleep(600)")
    host.start()
    looked(host, lambda look: look.log)
    assert host._child is not None
    server = psutil.Process(host._child.pid)
    processes = [server, *server.children(recursive=True)]
    assert len(processes) >= 2
    host.stop(5)
    assert psutil.wait_procs(processes, timeout=WAIT_S)[1] == []
    assert list(tmp_path.glob("skyrl-host-*")) == []


SIDECAR = "import time; print('sidecar', flush=True); time.sleep(600)"


def sidecar_of(host: ServerHost) -> psutil.Process:
    assert host._sidecar is not None
    return psutil.Process(host._sidecar.pid)


def test_a_sidecar_that_ends_is_started_again_and_the_server_goes_on(
    make: Callable[..., HostHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "SIDECAR_AGAIN_S", 0.0)
    host = make(sidecar=SIDECAR)
    started = host.start()
    assert started.sidecar_url is not None
    assert started.sidecar_url != started.url
    looked(host, lambda look: look.sidecar_log == b"sidecar\n" and b"up" in look.log)
    server, before = host._child, sidecar_of(host)
    before.kill()
    looked(host, lambda look: look.sidecar_log.count(b"sidecar\n") == 2)
    assert sidecar_of(host).pid != before.pid
    assert host._child is server
    assert host.look(0).code is None


def test_a_sidecar_that_ends_after_each_start_is_in_trouble_and_then_gets_another_port(
    make: Callable[..., HostHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "SIDECAR_AGAIN_S", 0.0)
    host = make(sidecar="raise OSError('the address is taken')")
    started = host.start()
    running = looked(host, lambda look: look.sidecar_trouble)
    assert (running.code, running.log) in ((None, b""), (None, b"up None given\n"))
    why = "it has ended 2 times in a row, the last time with: OSError: the address is taken"
    assert running.sidecar_trouble == why
    ended = looked(host, lambda look: look.code is not None)
    assert ended.code == -9
    assert ended.sidecar_trouble == why.replace("2", str(hosts.SIDECAR_ENDS))
    assert ended.sidecar_log.count(b"OSError: the address is taken") == hosts.SIDECAR_ENDS
    host.ended()
    again = host.start()
    assert again.url == started.url
    assert again.sidecar_url not in (started.sidecar_url, again.url)
    assert host.look(0).sidecar_trouble == ""


def test_ends_of_a_sidecar_that_has_run_for_long_are_no_trouble(
    make: Callable[..., HostHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "SIDECAR_AGAIN_S", 0.0)
    monkeypatch.setattr(hosts, "SIDECAR_STABLE_S", 0.0)
    host = make(sidecar="print('sidecar')")
    host.start()
    look = looked(host, lambda look: look.sidecar_log.count(b"sidecar") > hosts.SIDECAR_ENDS)
    assert (look.code, look.sidecar_trouble) == (None, "")


def test_a_sidecar_ends_with_its_server_and_the_next_one_has_the_same_ports(make: Callable[..., HostHere]) -> None:
    host = make(sidecar=SIDECAR)
    started = host.start()
    looked(host, lambda look: look.sidecar_log)
    sidecar = sidecar_of(host)
    host.kill()
    looked(host, lambda look: look.code is not None)
    assert not sidecar.is_running()
    host.look(0)
    assert host._sidecar is None, "without its server it is not started"
    host.ended()
    again = host.start()
    assert (again.url, again.sidecar_url) == (started.url, started.sidecar_url)


def test_a_stop_ends_the_sidecar_too(make: Callable[..., HostHere]) -> None:
    host = make(sidecar=SIDECAR)
    host.start()
    looked(host, lambda look: look.sidecar_log)
    sidecar = sidecar_of(host)
    host.stop(0)
    assert not sidecar.is_running()


def test_directories_that_killed_actors_have_left_are_removed(
    make: Callable[..., HostHere], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "LEFT_S", 0.0)
    (tmp_path / "skyrl-host-left").mkdir()
    make()
    make()
    left = list(tmp_path.glob("skyrl-host-*"))
    assert len(left) == 2, "directories of running actors are locked"
    assert tmp_path / "skyrl-host-left" not in left


def test_an_actor_that_nobody_asks_ends_with_its_server(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from skyrl.runtime.ray_cluster import hosts
from test_hosts import SLEEPS, HostAlone, Program
hosts.UNASKED_S = 3.0
host = HostAlone("server", Program(SLEEPS, sidecar_code=SLEEPS), None)
host.start()
print(host._child.pid, host._sidecar.pid, flush=True)
import time; time.sleep(600)
"""
    environment = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, cwd=root) as actor:
        assert actor.stdout is not None
        both = [psutil.Process(int(pid)) for pid in actor.stdout.readline().split()]
        assert actor.wait(WAIT_S) == 1
        assert psutil.wait_procs(both, timeout=WAIT_S)[1] == []
