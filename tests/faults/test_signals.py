"""A launcher that gets several stop signals: what it logs, and that it ends in order."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from tests.e2e.mortal_server import WAIT_S, MortalServer, Upstream


def serve_log(server: MortalServer) -> str:
    return (server.state_dir / "serve.log").read_text()


def test_the_second_interrupt_is_explained_and_the_last_line_says_stopped(tmp_path: Path) -> None:
    with Upstream() as upstream:
        gateway = ("--backend", "none", "--base-model", "tiny", "--external-inference-url", upstream.url)
        server = MortalServer(tmp_path, *gateway)
        server.start()
        try:
            server.wait_ready(WAIT_S)
            api = server.api()
            api.suspend()  # so that the API process does not end before the second signal
            os.kill(server.pid, signal.SIGINT)
            deadline = time.monotonic() + WAIT_S
            while "stopping; this takes at most" not in serve_log(server):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(server.pid, signal.SIGINT)
            while "already stopping" not in serve_log(server):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            api.resume()
            assert psutil.Process(server.pid).wait(WAIT_S) == 0
        finally:
            server.stop()
        assert serve_log(server).splitlines()[-1].endswith("skyrl.cli.launcher.main: stopped")
