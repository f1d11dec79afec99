"""The end of a server: nothing is left of a killed one, and signals, also several, end it in order."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from skyrl.cli.demo.server import DemoServer
from tests.e2e.conftest import find_process
from tests.e2e.mortal_server import WAIT_S, Client, MortalServer, Upstream, insist, running
from tests.servers import SLOW_START_S, ready

ENDED_S = 300.0


@dataclass
class ProcessTree:
    """All processes of a running server, and the shared memory that they have named."""

    processes: list[psutil.Process]
    shared: set[str]

    def assert_gone(self) -> None:
        _, alive = psutil.wait_procs(self.processes, timeout=ENDED_S)
        assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
        assert [path for path in self.shared if os.path.exists(path)] == []


def tree_of(server: DemoServer) -> ProcessTree:
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    shared = {region.path for process in processes for region in process.memory_maps() if "/dev/shm/" in region.path}
    assert any("EngineCore" in " ".join(process.cmdline()) for process in processes), "the tree includes grandchildren"
    return ProcessTree(processes, shared)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The server's directory for temporary files, with a short path, as sockets need it."""
    directory = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(directory))
    yield directory
    shutil.rmtree(directory)


def test_a_killed_launcher_leaves_nothing_but_a_directory_that_the_next_start_removes(
    temporary: Path, tmp_path: Path
) -> None:
    with Upstream() as upstream:
        server = MortalServer(tmp_path / "state", "--external-inference-url", upstream.url)
        with running(server):
            processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
            assert server.engine() in processes
            left = (tmp_path / "state" / "run").resolve()
            os.kill(server.pid, signal.SIGKILL)
            ProcessTree(processes, set()).assert_gone()
            assert list(temporary.iterdir()) == [left]
        gateway = ("--backend", "none", "--base-model", "tiny", "--external-inference-url", upstream.url)
        with running(MortalServer(tmp_path / "state", *gateway)):  # starts sooner, without an engine
            assert not left.exists()
            assert list(temporary.iterdir()) == [(tmp_path / "state" / "run").resolve()]
        assert list(temporary.iterdir()) == []


@pytest.mark.vllm
@pytest.mark.slow
def test_a_killed_launcher_and_a_server_stopped_with_a_hanging_vllm_leave_nothing(
    temporary: Path, tmp_path: Path
) -> None:
    server = DemoServer(tmp_path)
    server.start()
    try:
        server.wait_ready(SLOW_START_S)
        tree, left = tree_of(server), (tmp_path / "run").resolve()
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        tree.assert_gone()
        assert list(temporary.iterdir()) == [left], "no process removes the directory before the next start"

        server.start()
        server.wait_ready(SLOW_START_S)
        assert not left.exists()
        assert list(temporary.iterdir()) == [(tmp_path / "run").resolve()]
        tree = tree_of(server)
        find_process(server, "EngineCore").suspend()
        server.stop()
        tree.assert_gone()
        assert list(temporary.iterdir()) == []
        assert not (tmp_path / "run").is_symlink()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalServer]:
    with Upstream() as upstream:
        gateway = ("--backend", "none", "--base-model", "tiny", "--external-inference-url", upstream.url)
        with ready(MortalServer(tmp_path_factory.mktemp("gateway"), *gateway)) as running:
            yield running


def private(server: MortalServer) -> Path:
    return (server.state_dir / "run").resolve()


def test_processes_restart_although_their_directory_was_deleted(server: MortalServer) -> None:
    with closing(Client(server.url)) as client:
        sampler = client.sampler()
        shutil.rmtree(private(server))
        server.kill_api()
        promise = insist(lambda: client.sample(sampler, 0))
        assert insist(lambda: client.result(promise["request_id"]))
        assert private(server).stat().st_mode & 0o777 == 0o700


def test_the_second_interrupt_is_explained_and_the_last_line_says_stopped(server: MortalServer) -> None:
    directory, api = private(server), server.api()
    api.suspend()  # so that the API process does not end before the second signal
    for said in ("stopping; this takes at most", "already stopping"):
        os.kill(server.pid, signal.SIGINT)
        deadline = time.monotonic() + WAIT_S
        while said not in serve_log(server):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    api.resume()
    assert psutil.Process(server.pid).wait(WAIT_S) == 0
    assert serve_log(server).splitlines()[-1].endswith("skyrl.cli.launcher.main: stopped")
    assert not directory.exists()


def serve_log(server: MortalServer) -> str:
    return (server.state_dir / "serve.log").read_text()
