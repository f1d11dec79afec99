"""`skyrl status` with a stand-in for servers that are not ready or no skyrl: exit codes, messages.
`tests/e2e/test_status_page.py` runs it against a real server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from skyrl.cli.main import app
from skyrl.cli.status_view import view
from skyrl.runtime.processes.ports import free_port

WATCHED_S = 120.0
NOT_READY = {"version": "9", "ready": False, "reasons": ["training: the engine is starting"], "scopes": ["train"]}
STUCK = [
    {"run": None, "sentence": "nothing can be trained now: the engine is starting", "since": None},
    {"run": "session:train:0", "sentence": "command 4 of this model has not arrived", "since": 0.0},
]
SLOW = [{"run": "session:train:0", "sentence": "forward_backward (command 3) began 6 min ago", "since": None}]
RUN = {
    "id": "session:train:0",
    "name": None,
    "state": "waiting",
    "sentence": "the trainer cannot run commands now: the engine is starting",
    "steps": 7,
    "last_step": {"loss": 1.25, "gap": None, "tokens_per_second": 640.0},
    "last_request_at": 0.0,
}


AGENT = {
    "session_id": "01ab",
    "name": "task-7\x1b[31m",
    "model": "tiny",
    "state": "open",
    "end_reason": None,
    "turns": 12,
    "sampled": 3456,
    "forks": 2,
    "reward": None,
    "used_at": 0.0,
}


class StandIn(ThreadingHTTPServer):
    """Answers every path with `body`; notes path and key of each request."""

    def __init__(self) -> None:
        self.body = json.dumps({"server": NOT_READY, "runs": [RUN], "samplers": [], "stuck": STUCK, "slow": SLOW})
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


def status(*arguments: str, key: str | None = "tml-k", columns: int = 200) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    environment = {"TINKER_API_KEY": key, "TINKER_BASE_URL": None, "COLUMNS": str(columns)}
    done = CliRunner().invoke(app, ["status", *arguments], env=environment)
    return done.exit_code, done.stdout, done.stderr


def test_a_server_that_is_not_ready_gives_1_and_the_reason(stand_in: StandIn) -> None:
    code, output, errors = status("--url", stand_in.url)
    assert (code, errors) == (1, "")
    assert "▲ not ready training: the engine is starting" in output
    for shown in ("session:train:0", "◆ waiting: the trainer cannot run commands now", "7", "1.25", "–", "640"):
        assert shown in output
    assert stand_in.asked == [("/ui/api/state", "tml-k")], "only a key with the scope admin asks for the box"


HEALTH = {
    "state": "unusual",
    "sentences": ["truncated samples rose from 3 % to 41 % since step 120: max_tokens may be too small"],
    "time": "a step takes 10 s: sampling 50 %, training 50 %",
}
LINES = [
    {"name": "truncated samples", "text": "41 %", "usual": "3 %", "missing": None},
    {"name": "reward", "text": "not known", "usual": None, "missing": "no rewards came"},
]


def drawn(answer: dict[str, Any], columns: int) -> str:
    console = Console(file=io.StringIO(), width=columns)
    console.print(view(answer))
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


@pytest.mark.parametrize("columns", [60, 200])
def test_the_health_of_a_run_comes_before_its_state_and_in_one_run_before_all_else(columns: int) -> None:
    server = NOT_READY | {"ready": True, "reasons": []}
    state = {"server": server, "runs": [RUN | {"health": HEALTH}], "samplers": [], "stuck": [], "slow": []}
    shown = drawn(state, columns)
    assert "▲ health: unusual" in shown
    assert shown.index("rose from 3 % to 41 %") < shown.index("◆ waiting")
    one = drawn(RUN | {"server": server, "history": [], "health": HEALTH | {"lines": LINES}}, columns)
    for part in (
        "▲ health: unusual",
        "a step takes 10 s",
        "truncated samples 41 % 3 %",
        "not known",
        "no rewards came",
    ):
        assert part in one, one
        assert one.index(part) < one.index("◆ waiting")


def test_a_server_of_an_earlier_version_tells_no_health_of_a_run() -> None:
    shown = drawn(RUN | {"server": NOT_READY | {"ready": True, "reasons": []}, "history": []}, 120)
    assert "◆ waiting" in shown
    assert "health" not in shown


MODELS = [
    {"name": "acme/student", "uses": ["train", "sample"], "ready": True, "reasons": []},
    {"name": "acme/teacher", "uses": ["sample"], "ready": False, "reasons": ["sampling: its files are gone"]},
]
DEGRADED = {
    "version": "9",
    "ready": True,
    "reasons": ["acme/teacher: sampling: its files are gone", "disk: 10 MB are free"],
    "scopes": ["train"],
    "base_models": MODELS,
}


def test_of_several_base_models_each_has_its_line_and_runs_name_theirs(stand_in: StandIn) -> None:
    run = RUN | {"base_model": "acme/student"}
    stand_in.body = json.dumps({"server": DEGRADED, "runs": [run], "samplers": [], "stuck": [], "slow": []})
    code, output, _ = status("--url", stand_in.url)
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert lines[:3] == [
        "skyrl 9 ◆ degraded disk: 10 MB are free",
        "acme/student training and sampling ● ready",
        "acme/teacher sampling ▲ not ready sampling: its files are gone",
    ]
    assert code == 0, "as /readyz: requests for the others are served"
    start = next(number for number, line in enumerate(lines) if line.startswith(RUN["id"]))
    assert lines[start + 1] == "acme/student"
    _, narrow, _ = status("--url", stand_in.url, columns=80)
    assert "acme/student\n  ◆ waiting" in narrow.replace(" \n", "\n")


def part(trouble: str | None, places: int | None) -> dict[str, object]:
    return {
        "trainer": None if trouble is None else {"trouble": trouble},
        "models": {"running": 1, "waiting": {}, "longest_wait_since": None, "commands_waiting": 0},
        "adapters": {"servable": 3, "places": places},
        "vllm": [{"replica": 0, "kv_use": 0.5, "running": 1, "waiting": 0}],
    }


def test_the_parts_of_several_base_models_stand_below_their_names() -> None:
    of_server = {"api_processes": [1], "pending": {"STEP": 2}, "disk": {"free_bytes": 1e9, "total_bytes": 2e9}}
    of_server |= {"database_bytes": 1e6, "held_back": 3}
    models = [{"name": "student"} | part("it loads", 8), {"name": "teacher"} | part(None, None)]
    answer = {"server": DEGRADED, "runs": [], "samplers": [], "stuck": [], "slow": []}
    assert box_lines(answer | {"box": of_server | {"base_models": models}}) == [
        "API processes 1",
        "pending requests step 2",
        "held back 3 samples wait to be sent to the inference servers",
        "disk 1.0 GB of 2.0 GB are free",
        "database 1.0 MB",
        "student",
        "trainer it loads",
        "models 1 with a running command; waiting for: none",
        "adapters 3 can be sampled, 8 at a time",
        "vLLM 0: 1 run, 0 wait, cache 50 % used",
        "teacher",
        "trainer none",
        "models 1 with a running command; waiting for: none",
        "adapters 3 can be sampled",
        "vLLM 0: 1 run, 0 wait, cache 50 % used",
    ]
    names = [line.split()[0] for line in box_lines(answer | {"box": of_server | part("it loads", 8)})]
    assert names == ["trainer", "API", "pending", "held", "models", "adapters", "disk", "database", "vLLM"]


def test_the_newest_agent_sessions_stand_below_the_samplers() -> None:
    ended = AGENT | {"name": "", "state": "ended", "end_reason": "idle", "reward": 0.25}
    answer = {"server": DEGRADED, "runs": [], "samplers": [], "stuck": [], "slow": [], "agents": [AGENT, *[ended] * 12]}
    count, heads, *rows = box_lines(answer)
    assert (count, heads) == ("agent sessions: 1 open", "session model state turns sampled forks reward last use")
    assert rows[0].startswith("task-7�[31m tiny ● open 12 3456 2 – "), "a name cannot change colours"
    assert rows[1].startswith("01ab tiny ■ ended (idle) 12 3456 2 0.25 ")
    assert len(rows) == 10


def box_lines(answer: dict[str, Any]) -> list[str]:
    """The lines that `skyrl status` prints below the samplers."""
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(view(answer))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    return lines[lines.index("samplers: 0 open, 0 samples in flight") + 2 :]


def test_what_is_stuck_is_said_before_the_runs(stand_in: StandIn) -> None:
    _, output, _ = status("--url", stand_in.url)
    lines = output.splitlines()
    assert lines[1].rstrip() == "stuck: nothing can be trained now: the engine is starting"
    assert lines[2].startswith("stuck: session:train:0: command 4 of this model has not arrived, since ")
    assert lines[3].rstrip() == "slow: session:train:0: forward_backward (command 3) began 6 min ago"
    stand_in.body = json.dumps({"server": NOT_READY, "runs": [RUN], "samplers": [], "stuck": [], "slow": []})
    assert "stuck: nothing\n" in status("--url", stand_in.url)[1].replace(" \n", "\n")


def test_on_a_narrow_terminal_no_word_of_a_run_is_broken(stand_in: StandIn) -> None:
    _, output, _ = status("--url", stand_in.url, columns=80)
    lines = [line.rstrip() for line in output.splitlines()]
    start = lines.index(RUN["id"])
    assert lines[start + 1] == f"  ◆ waiting: {RUN['sentence']}"
    assert lines[start + 2].startswith("  steps 7, loss 1.25, gap –, tokens/s 640, ")


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


@contextlib.contextmanager
def watching(url: str, stdout: int) -> Iterator[subprocess.Popen[str]]:
    """The command as a shell starts it in the foreground: with SIGINT, which a shell without job control sets to be
    ignored in what it starts in the background, such as these tests. Killed after WATCHED_S and with the body, so that
    nothing waits for it or for its output any longer."""
    command = ["env", "--default-signal=INT", sys.executable, "-m", "skyrl.cli.main", "status", "--url", url, "--watch"]
    environment = os.environ | {"TINKER_API_KEY": "tml-k", "COLUMNS": "200", "TERM": "xterm"}
    with subprocess.Popen(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True) as process:
        bound = threading.Timer(WATCHED_S, process.kill)
        bound.start()
        try:
            yield process
        finally:
            bound.cancel()
            bound.join()
            process.kill()


def wait_until_asked(stand_in: StandIn, times: int) -> None:
    deadline = time.monotonic() + 60.0
    while len(stand_in.asked) < times:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_watch_prints_each_answer_into_a_pipe_until_ctrl_c(stand_in: StandIn) -> None:
    with watching(stand_in.url, subprocess.PIPE) as process:
        assert process.stdout is not None
        wait_until_asked(stand_in, 1)
        assert "not ready" in process.stdout.readline(), "it is there at once"
        wait_until_asked(stand_in, 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(60.0) == 1
        output = process.stdout.read()
    assert output.count("session:train:0") >= 3, "the first answer, the second, and the last once more"


def test_watch_has_the_screen_of_a_terminal_for_itself_until_ctrl_c(stand_in: StandIn) -> None:
    terminal, its_end = os.openpty()
    shown = b""
    with watching(stand_in.url, its_end) as process:
        os.close(its_end)
        while b"session:train:0" not in shown:
            shown += os.read(terminal, 4096)  # an error once the process was killed
        wait_until_asked(stand_in, 2)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # Linux's answer once nobody has the other end
            while more := os.read(terminal, 4096):
                shown += more
        assert process.wait(60.0) == 1
    os.close(terminal)
    enter, leave = b"\x1b[?1049h", b"\x1b[?1049l"
    assert shown.count(enter) == shown.count(leave) == 1
    assert b"session:train:0" in shown.partition(leave)[2], "the last answer stays on the terminal"
