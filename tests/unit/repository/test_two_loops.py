"""The shortest schedule of two loops, and the states of tenants from spans. No process is started."""

from __future__ import annotations

import pytest

from benchmarks.best_schedule import Phase, greedy, shortest
from benchmarks.collector import Span
from benchmarks.timeline import Interval, intervals, shares, together


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


def span(process: str, name: str, trace: str, began: float, ended: float, **attributes: str) -> Span:
    named = {f"skyrl.{key}": value for key, value in attributes.items()}
    return Span(process, name, trace.encode(), began, ended, named)


def test_a_tenant_has_one_state_at_each_moment() -> None:
    one = [
        span("api-0", "asample", "1", 0.0, 0.1, tenant="a", kind="EXTERNAL"),
        span("api-0", "forward", "1", 0.0, 2.0),
        span("api-0", "record", "2", 2.5, 2.6, tenant="a", kind="FORWARD_BACKWARD"),
        span("engine", "queue", "2", 2.5, 3.0),
        span("engine", "run", "2", 3.0, 4.0),
        span("engine", "queue", "3", 3.5, 4.5),
        span("api-0", "record", "3", 3.5, 3.6, tenant="a", kind="OPTIM_STEP"),
        span("api-0", "forward", "4", 0.0, 9.0),  # a tenant that is not known
    ]
    (states,) = intervals(one)
    assert states == [
        Interval(0.0, 2.0, "samples"),
        Interval(2.0, 2.5, "away"),
        Interval(2.5, 3.0, "queues"),
        Interval(3.0, 4.0, "trains"),
        Interval(4.0, 4.5, "queues"),
    ]
    assert shares(states)["samples"] == pytest.approx(2.0 / 4.5)


def test_the_states_of_two_tenants_are_paired_while_both_run() -> None:
    one = [Interval(0.0, 2.0, "samples"), Interval(2.0, 3.0, "trains")]
    other = [Interval(1.0, 2.5, "trains"), Interval(2.5, 4.0, "queues")]
    expected = {("trains", "samples"): 1.0, ("trains", "trains"): 0.5, ("trains", "queues"): 0.5}
    assert together(one, other) == pytest.approx(expected)
