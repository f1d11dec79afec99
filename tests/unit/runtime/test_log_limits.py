"""Log lines that clients cause: each cause is logged, and none can fill the log."""

from __future__ import annotations

import logging

import pytest

from skyrl.runtime.processes import logs
from skyrl.runtime.processes.logs import INTERVAL_S, MAX_CAUSES, MAX_LINES, LimitedLog, plain


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
