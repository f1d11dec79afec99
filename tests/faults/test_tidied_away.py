"""A cleaner of temporary directories deletes a running server's sockets and the files from which its processes
start."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.e2e.mortal_server import WAIT_S, Client, MortalServer, Upstream, insist


def test_processes_restart_although_their_directory_was_deleted(tmp_path: Path) -> None:
    with Upstream() as upstream:
        gateway = ("--backend", "none", "--base-model", "tiny", "--external-inference-url", upstream.url)
        server = MortalServer(tmp_path, *gateway)
        server.start()
        try:
            server.wait_ready(WAIT_S)
            client = Client(server.url)
            sampler = client.sampler()
            private = (tmp_path / "run").resolve()
            shutil.rmtree(private)
            server.kill_api()
            promise = insist(lambda: client.sample(sampler, 0))
            assert insist(lambda: client.result(promise["request_id"]))
            assert private.stat().st_mode & 0o777 == 0o700
            client.close()
        finally:
            server.stop()
        assert not private.exists()
