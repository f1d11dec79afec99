"""Log lines: the two formats, and limits on the lines that clients can cause."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import logging.config
import shutil
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from skyrl.cli.launcher import state_dir
from skyrl.cli.launcher.state_dir import rotate_once
from skyrl.runtime.processes import logs
from skyrl.runtime.processes.logs import (
    INTERVAL_S,
    MAX_CAUSES,
    MAX_LINES,
    JsonFormat,
    LimitedLog,
    about_request,
    formatter,
    plain,
    vllm_logging,
)
from skyrl.runtime.processes.startup import running_now
from skyrl.runtime.tracing import RequestTrace, Span, SpanContext, current_trace


def record(message: str, *arguments: object, **about: Any) -> logging.LogRecord:
    made = logging.LogRecord("skyrl.api", logging.WARNING, "f.py", 1, message, arguments, None)
    vars(made).update(about)
    return made


def line(made: logging.LogRecord) -> dict[str, Any]:
    text = JsonFormat("api-0").format(made)
    assert "\n" not in text
    return json.loads(text)


def test_a_line_of_json_has_the_time_the_level_the_process_and_what_it_is_about() -> None:
    made = record("refused %s", "it", **about_request("r1", tenant="3a1f", duration_ms=1.5, model_id=None))
    found = line(made)
    at = datetime.fromisoformat(found.pop("ts"))
    assert at.utcoffset() == timedelta(0)
    assert abs(at.timestamp() - made.created) < 0.01
    assert found == {
        "level": "warning",
        "logger": "skyrl.api",
        "process": "api-0",
        "msg": "refused it",
        "request_id": "r1",
        "tenant": "3a1f",
        "duration_ms": 1.5,
    }


def test_a_line_of_json_holds_a_stack_trace_and_any_text() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        made = record("broken \ud800 \x00 \n\u2028", exc_info=sys.exc_info())
    found = line(made)
    assert "ValueError: first\nsecond" in found["error"]
    assert "test_logs.py" in found["error"]
    assert found["msg"].startswith("broken \\ud800")


class _Nowhere:
    def record(self, span: Span) -> None:
        """Not used."""

    def close(self) -> None:
        """Not used."""


def test_a_line_about_a_traced_request_names_its_trace() -> None:
    context = SpanContext.new()
    token = current_trace.set(RequestTrace(_Nowhere(), context))
    try:
        found = line(record("x"))
    finally:
        current_trace.reset(token)
    assert (found["trace_id"], found["span_id"]) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")
    assert "trace_id" not in line(record("x"))


def test_a_line_of_text_ends_with_the_request() -> None:
    text = formatter("text", "api-0").format(record("refused", request_id="r1"))
    assert text.endswith("WARNING skyrl.api: refused [request r1]")
    assert formatter("text", "api-0").format(record("refused")).endswith(": refused")


def test_vllm_logs_json_by_its_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("vllm.test")
    logging.config.dictConfig(vllm_logging("vllm-0") | {"incremental": False, "root": {}})
    try:
        logger.info("Using %s", "CPU")
        found = json.loads(capsys.readouterr().err)
    finally:
        logging.getLogger("vllm").handlers = []
    assert (found["process"], found["logger"], found["msg"]) == ("vllm-0", "vllm.test", "Using CPU")


def test_a_long_file_is_copied_and_emptied_and_so_many_copies_stay(tmp_path: Path) -> None:
    file = tmp_path / "api.log"
    (tmp_path / "short.log").write_text("12345")
    with file.open("a") as open_log:  # the process keeps its file open
        for number in range(4):
            open_log.write(f"{number}" * 20)
            open_log.flush()
            rotate_once(tmp_path, 10, 2)
        open_log.write("after")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "api.log": "after",
        "api.log.1": "3" * 20,
        "api.log.2": "2" * 20,
        "short.log": "12345",
    }


def test_a_full_disk_costs_no_older_copy_and_stops_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("api.log", "vllm.log"):
        (tmp_path / name).write_text("x" * 20)
        (tmp_path / f"{name}.1").write_text("older")

    def full(source: Path, target: Path) -> None:
        target.write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    rotate_once(tmp_path, 10, 2)
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == {"api.log": "x" * 20, "api.log.1": "older", "vllm.log": "x" * 20, "vllm.log.1": "older"}
    assert [name in caplog.text for name in ("api.log could not be", "vllm.log could not be")] == [True, True]


async def test_a_directory_that_cannot_be_listed_now_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The launcher ends the server when one of its own tasks ends."""
    monkeypatch.setattr(state_dir, "LOG_LOOK_S", 0.001)
    (tmp_path / "api.log").write_text("x" * 20)
    listed, fails = Path.glob, [True]

    def glob(directory: Path, pattern: str) -> Any:
        if fails and fails.pop():
            raise OSError(errno.EMFILE, "Too many open files")
        return listed(directory, pattern)

    monkeypatch.setattr(Path, "glob", glob)
    rotating = asyncio.create_task(state_dir.rotate_logs(tmp_path, 10, 1))
    async with asyncio.timeout(100):
        while not (tmp_path / "api.log.1").exists():
            assert not rotating.done()
            await asyncio.sleep(0.005)
    rotating.cancel()
    await asyncio.gather(rotating, return_exceptions=True)
    assert "could not be rotated: [Errno 24] Too many open files" in caplog.text


def test_without_copies_a_long_file_is_only_emptied(tmp_path: Path) -> None:
    (tmp_path / "api.log").write_text("x" * 20)
    rotate_once(tmp_path, 10, 0)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"api.log": ""}


def test_what_the_engine_ran_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "running.json"
    assert running_now(file) == []
    file.write_text('{"running": ["r1", "r2"], "deaths": {}}\nrest of a longer line"}')
    assert running_now(file) == ["r1", "r2"]
    file.write_text("damaged")
    assert running_now(file) == []


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock, caplog: pytest.LogCaptureFixture) -> LimitedLog:
    caplog.set_level(logging.INFO)
    return LimitedLog(logging.getLogger("skyrl.test"), clock)


def test_a_cause_has_one_line_in_ten_seconds_and_the_next_line_counts_the_rest(
    log: LimitedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        log.say(logging.INFO, "a", "one")
    log.say(logging.WARNING, "b", "two")
    assert caplog.messages == ["one", "two"]
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
    clock.now = INTERVAL_S
    log.say(logging.INFO, "a", "one")
    log.say(logging.INFO, "b", "two")
    assert caplog.messages[2:] == ["one (and 4 more like it since the last line)", "two"]


def test_lines_of_all_causes_together_are_limited_and_the_omitted_ones_counted(
    log: LimitedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(MAX_LINES + 30):
        log.say(logging.INFO, number, f"line {number}")
    assert len(caplog.messages) == MAX_LINES
    clock.now = INTERVAL_S
    log.say(logging.INFO, "new", "later")
    assert caplog.messages[MAX_LINES:] == ["30 lines about other requests were left out", "later"]


def test_old_causes_are_forgotten(log: LimitedLog, clock: Clock) -> None:
    for number in range(3 * MAX_CAUSES):
        clock.now = float(number)
        log.say(logging.INFO, number, "line")
    assert len(log._causes) == MAX_CAUSES


def test_text_of_clients_is_escaped_to_one_line_of_bounded_length() -> None:
    assert plain("a\nb\x1b[31m\u2028é") == "a\\nb\\x1b[31m\\u2028é"
    assert plain("x" * 1_000) == "x" * logs.MAX_TEXT + "... (1000 characters)"
