"""The shortest schedule of two loops. No process is started."""

from __future__ import annotations

import pytest

from benchmarks.best_schedule import Phase, greedy, shortest


def loop(steps: int, sample_s: float, train_s: float, cores: float = 1.0) -> list[Phase]:
    return [Phase(sample_s, cores, False), Phase(train_s, cores, True)] * steps


def test_two_loops_that_need_no_core_of_each_other_take_as_long_as_one_and_a_phase() -> None:
    """They sample and train in turns. One of them waits once for the trainer, at the begin."""
    assert shortest(loop(5, 0.5, 0.5), loop(5, 0.5, 0.5), 2) == pytest.approx(5.5)


def test_the_trainer_is_the_bound_where_training_takes_longer() -> None:
    assert shortest(loop(5, 0.2, 0.8), loop(5, 0.2, 0.8), 2) == pytest.approx(0.2 + 10 * 0.8)


def test_loops_that_want_more_cores_than_there_are_run_slower() -> None:
    both = shortest(loop(1, 1.0, 0.0, cores=1.5), loop(1, 1.0, 0.0, cores=1.5), 2)
    assert both == pytest.approx(1.5)
    assert shortest(loop(1, 1.0, 0.0, cores=3.0), loop(1, 1.0, 0.0, cores=3.0), 2) == pytest.approx(2.0), "in turns"


def test_loops_that_sample_share_one_thread_of_vllm() -> None:
    sampling = [Phase(1.0, 0.8, False, vllm=0.75)]
    assert shortest(sampling, sampling, 2) == pytest.approx(1.5), "the cores would do for both"


def test_the_greedy_schedule_lets_a_short_phase_wait_for_a_long_one_and_the_shortest_need_not() -> None:
    long = [Phase(0.1, 1.0, False), Phase(1.0, 1.0, True)]
    short = [Phase(0.2, 1.0, False), Phase(0.1, 1.0, True), Phase(1.0, 1.0, False)]
    assert greedy(long, short, 2) == pytest.approx(2.2)
    assert shortest(long, short, 2) == pytest.approx(1.3), "the long phase begins, or goes on, 0.1 s later"
    assert greedy(loop(5, 0.5, 0.5), loop(5, 0.5, 0.5), 2) == pytest.approx(5.5), "nothing is lost where they alternate"
