"""`skyrl status` with a stand-in for servers that are not ready or no skyrl: exit codes, messages.
`tests/e2e/test_status_page.py` runs it against a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from skyrl.cli.main import app
from skyrl.inference.placement import free_port

NOT_READY = {"version": "9", "ready": False, "reasons": ["training: the engine is starting"], "scopes": ["train"]}
RUN = {
    "id": "session:train:0",
    "name": None,
    "state": "waiting",
    "sentence": "the trainer cannot run commands now: the engine is starting",
    "steps": 7,
    "last_step": {"loss": 1.25, "gap": None, "tokens_per_second": 640.0},
    "last_request_at": 0.0,
}


class StandIn(ThreadingHTTPServer):
    """Answers every path with `body`; notes path and key of each request."""

    def __init__(self) -> None:
        self.body = json.dumps({"server": NOT_READY, "runs": [RUN], "samplers": []})
        self.asked: list[tuple[str, str | None]] = []
        super().__init__(("127.0.0.1", 0), Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: StandIn  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["X-API-Key"]))
        content = self.server.body.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def status(*arguments: str, key: str | None = "tml-k") -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    environment = {"TINKER_API_KEY": key, "TINKER_BASE_URL": None, "COLUMNS": "200"}
    done = CliRunner().invoke(app, ["status", *arguments], env=environment)
    return done.exit_code, done.stdout, done.stderr


def test_a_server_that_is_not_ready_gives_1_and_the_reason(stand_in: StandIn) -> None:
    code, output, errors = status("--url", stand_in.url)
    assert (code, errors) == (1, "")
    assert "▲ not ready training: the engine is starting" in output
    for shown in ("session:train:0", "◆ waiting: the trainer cannot run commands now", "7", "1.25", "–", "640"):
        assert shown in output
    assert stand_in.asked == [("/ui/api/state", "tml-k")], "only a key with the scope admin asks for the box"


def test_json_is_the_answer_of_the_server(stand_in: StandIn) -> None:
    code, output, _ = status("--url", stand_in.url, "--json")
    assert (code, json.loads(output)) == (1, json.loads(stand_in.body))


def test_a_server_that_is_away_or_no_skyrl_gives_2_and_one_line(stand_in: StandIn) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    assert status("--url", away) == (2, "", f"skyrl status: {away}: [Errno 111] Connection refused\n")
    stand_in.body = "<html>"
    code, output, errors = status("--url", stand_in.url)
    assert (code, output) == (2, "")
    assert errors.endswith("answered /ui/api/state with status 200 and no JSON: it is no skyrl\n")


def test_without_a_key_nothing_is_asked(stand_in: StandIn) -> None:
    code, _, errors = status("--url", stand_in.url, key=None)
    assert code == 2
    assert errors == "skyrl status: TINKER_API_KEY is not set: set it to the key that your training script uses\n"
    assert status("--url", stand_in.url, key="tml-\n")[0] == 2
    assert stand_in.asked == []


def test_watch_asks_again_until_ctrl_c(stand_in: StandIn) -> None:
    command = [sys.executable, "-m", "skyrl.cli.main", "status", "--url", stand_in.url, "--watch"]
    environment = os.environ | {"TINKER_API_KEY": "tml-k", "COLUMNS": "200"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        deadline = time.monotonic() + 60.0
        while len(stand_in.asked) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60.0)
    assert (process.returncode, errors) == (1, "")
    assert "session:train:0" in output
