"""The pauses between tries: their length, their jitter, and when they start anew."""

from __future__ import annotations

import pytest

from skyrl.runtime.processes.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.1, 0.5)
    assert [backoff.pause() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_the_longest_pause_of_a_call_bounds_the_next_pause() -> None:
    backoff = Backoff(1.0, 2.0)
    assert [backoff.pause(5.0) for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    assert [backoff.pause() for _ in range(2)] == [5.0, 2.0]


def test_jitter_shortens_or_lengthens_a_pause_by_its_fraction_at_most() -> None:
    pauses = [Backoff(1.0, 1.0, jitter=0.25).pause() for _ in range(1_000)]
    assert 0.75 <= min(pauses) < 0.85
    assert 1.15 < max(pauses) <= 1.25


def test_jitter_of_one_pause_does_not_change_the_next() -> None:
    backoff = Backoff(1.0, 4.0, jitter=0.25)
    backoff.pause()
    backoff.pause()
    assert 3.0 <= backoff.pause() <= 5.0


@pytest.mark.parametrize(("ran_s", "next_s"), [(59.9, 2.0), (60.0, 1.0)])
def test_pauses_start_anew_after_a_try_that_ran_long_enough(ran_s: float, next_s: float) -> None:
    backoff = Backoff(1.0, 30.0, stable_s=60.0)
    backoff.pause()
    backoff.ran(ran_s)
    assert backoff.pause() == next_s


def test_waited_says_whether_a_pause_was_given() -> None:
    backoff = Backoff(1.0, 30.0, stable_s=60.0)
    assert not backoff.waited
    backoff.pause()
    assert backoff.waited
    backoff.ran(60.0)
    assert not backoff.waited
