"""A gateway whose directory a cleaner of temporary files has deleted, with its sockets and the files from which its
processes start; and its launcher, which gets several stop signals and ends in order."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.e2e.mortal_server import WAIT_S, Client, MortalServer, Upstream, insist
from tests.servers import ready


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
