"""The progress lines on the console while a server starts."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from skyrl.cli.launcher.progress import Progress, stages

NAMES = ["api", "engine", "vllm"]
RUNNING = {"api": 1.0, "engine": 2.0, "vllm": 12.3}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def logging_to(stream: io.StringIO) -> Iterator[None]:
    root, handler = logging.getLogger(), logging.StreamHandler(stream)
    level_before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level_before)


def test_each_process_is_shown_with_its_stage() -> None:
    assert stages(NAMES, None, RUNNING) == {
        "api": "starting (1 s)",
        "engine": "starting (2 s)",
        "vllm": "starting (12 s)",
    }
    reasons = ["training: loading the base model", "sampling: no inference server has been published"]
    assert stages(NAMES, reasons, RUNNING) == {
        "api": "ready",
        "engine": "loading the base model (2 s)",
        "vllm": "starting (12 s)",
    }
    reasons = ["sampling: no inference server has been published", "disk: 3 MiB free"]
    assert stages(NAMES, reasons, {"api": 1.0, "engine": 2.0}) == {
        "api": "ready",
        "engine": "ready",
        "vllm": "ended, starts again",
    }


def test_each_replica_is_shown_with_its_stage() -> None:
    names, running = ["vllm-0", "vllm-1", "router"], {"vllm-0": 3.0, "router": 4.0}
    assert stages(names, ["sampling: 0 of 2 replicas are in use"], running) == {
        "vllm-0": "0 of 2 replicas are in use (3 s)",
        "vllm-1": "ended, starts again",
        "router": "ready",
    }


def test_an_external_inference_server_is_shown_as_such() -> None:
    reasons = ["sampling: the inference server cannot be reached"]
    assert stages(["api"], reasons, {"api": 1.0}) == {
        "api": "ready",
        "inference server": "the inference server cannot be reached",
    }


def test_without_a_terminal_each_stage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    with caplog.at_level(logging.INFO):
        progress = Progress(stream)
        for seconds in (1, 2, 3):
            progress.show({"api": "ready", "vllm": f"starting ({seconds} s)"})
        progress.show({"api": "ready", "vllm": "ready"})
        progress.close()
    assert [record.getMessage() for record in caplog.records] == ["api: ready", "vllm: starting", "vllm: ready"]
    assert stream.getvalue() == ""


def test_on_a_terminal_log_lines_go_above_the_progress_line_which_vanishes_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    with logging_to(stream):
        progress = Progress(stream)
        progress.show({"vllm": "starting (1 s)"})
        logging.getLogger("x").info("a warning")
        progress.show({"vllm": "starting (2 s)", "engine": "loading the base model"})
        progress.close()
        logging.getLogger("x").info("ready")
    clear = "\r\x1b[2K"
    parts = stream.getvalue().split(clear)
    assert parts == [
        "",
        "vllm: starting (1 s)",
        "a warning\nvllm: starting (1 s)",
        "vllm: starting (2 s)  engine:",
        "ready\n",
    ]
