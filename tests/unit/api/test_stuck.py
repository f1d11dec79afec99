"""Whether anything of a tenant is stuck, and in which words."""

from __future__ import annotations

import pytest

from skyrl.api.request_status.commands import RunStatus
from skyrl.api.request_status.finding import GAP_S, STANDS_S, Stuck, stuck
from skyrl.base.types.activity import EngineActivity, ModelActivity, WaitsFor
from skyrl.base.types.requests import Kind
from skyrl.storage.db.runs import Pending, Run

NOW = 1e9
RUN = Run("m", "s", "fox", "tiny", 4, "ready", 3, NOW - 900, NOW - 900, "active", NOW - 5, None, 0)
WAITS = RunStatus("waiting", "what it waits for")


def found(
    *reasons: str,
    waits_for: WaitsFor | None = None,
    since: float = NOW,
    pending: tuple[Pending, ...] = (),
    status: RunStatus = WAITS,
    away_since: float | None = None,
) -> list[Stuck]:
    models = {} if waits_for is None else {"m": ModelActivity("t", waits_for, since, "FORWARD_BACKWARD", 3, 1)}
    activity = EngineActivity(models, inference_away_since=away_since)
    return stuck(reasons, [(RUN, status)], pending, activity, NOW)


@pytest.mark.parametrize(
    ("waits_for", "allowed_s"),
    [
        (WaitsFor.NOTHING, STANDS_S),
        (WaitsFor.TURN, STANDS_S),
        (WaitsFor.QUOTA, STANDS_S),
        (WaitsFor.RECOVERY, STANDS_S),
        (WaitsFor.GAP, GAP_S),
        (WaitsFor.STORE, 0.0),
        (WaitsFor.MEMORY, 0.0),
        (WaitsFor.FILES, 0.0),
        (WaitsFor.SETTINGS, 0.0),
    ],
)
def test_a_command_that_waits_or_runs_for_too_long_is_slow_or_stuck(waits_for: WaitsFor, allowed_s: float) -> None:
    assert found(waits_for=waits_for, since=NOW - allowed_s) == []
    too_long = NOW - allowed_s - 1
    since = None if waits_for is WaitsFor.NOTHING else too_long  # of a command that runs the sentence says it
    assert found(waits_for=waits_for, since=too_long) == [Stuck("what it waits for", since, "m", allowed_s == STANDS_S)]


def test_a_trainer_that_stands_still_is_said_once_and_not_for_each_run() -> None:
    old = Pending(Kind.OPTIM_STEP, "m", 1, NOW - 2 * STANDS_S)
    said = found("training: the engine is starting", waits_for=WaitsFor.GAP, since=NOW - 999, pending=(old,))
    assert said == [Stuck("nothing can be trained now: the engine is starting")]


def test_samples_are_slow_when_the_oldest_is_too_old() -> None:
    young, old = Pending(Kind.SAMPLE, None, 2, NOW - 1), Pending(Kind.EXTERNAL, None, 1, NOW - STANDS_S - 1)
    assert found(pending=(young,)) == []
    assert found(pending=(old,)) == [Stuck("1 sample in flight has no result yet", old.since, is_slow=True)]
    [oldest] = found(pending=(young, old))
    assert oldest == Stuck("the oldest of 3 samples in flight has no result yet", old.since, is_slow=True)
    away = found("sampling: no inference server has been published", pending=(old,), away_since=NOW - 70)
    assert away == [Stuck("nothing can be sampled now: no inference server has been published", NOW - 70)]


def test_an_old_command_that_the_engine_does_not_know_is_stuck() -> None:
    old = Pending(Kind.CREATE_MODEL, "m", 1, NOW - STANDS_S - 1)
    assert found(pending=(old,)) == [Stuck("create_model has not begun", old.since, "m")]
    assert found(pending=(old,), waits_for=WaitsFor.NOTHING) == [], "it runs"


def test_neither_a_run_whose_client_is_gone_nor_one_that_has_ended_is_stuck() -> None:
    gone = RunStatus("finished or gone", "the client was last heard of 60 s ago, and waits for nothing")
    assert found(status=gone, waits_for=WaitsFor.GAP, since=NOW - 999) == []
    assert found(status=gone, pending=(Pending(Kind.OPTIM_STEP, "m", 1, NOW - 2 * STANDS_S),)) == []
    ended = Run("m", "s", "fox", "tiny", 4, "closed", 3, NOW - 900, NOW - 900, "active", NOW - 5, None, 0)
    activity = EngineActivity({"m": ModelActivity("t", WaitsFor.STORE, NOW - 999, "LOAD", 3, 1)})
    assert stuck((), [(ended, RunStatus("ended", "over"))], (), activity, NOW) == []
