"""Whether anything of a tenant is stuck: what stands still on the server, and requests that wait for nothing that will
come. What only takes long is said apart: it is computed, or its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from skyrl.base.types.activity import EngineActivity, ModelActivity, WaitsFor
from skyrl.base.types.requests import Kind
from skyrl.server.request_status.runs import RunStatus
from skyrl.server.request_status.status import counted
from skyrl.storage.db.runs import Pending, Run

LONG_S = 300.0
"""A request that runs, or waits for the same thing, for longer than this is called slow. One that the engine does not
know for so long is called stuck."""
GAP_S = 30.0
"""Commands that wait for one that the client has not sent are stuck after this time."""
_SAMPLES = (Kind.EXTERNAL, Kind.SAMPLE)
_STANDS = {WaitsFor.STORE: 0.0, WaitsFor.MEMORY: 0.0, WaitsFor.GAP: GAP_S}
"""What a command may wait for only so long, in seconds: it comes only if somebody does something about it."""
_STANDS_STILL = {"training": "nothing can be trained now", "sampling": "nothing can be sampled now"}


@dataclass(frozen=True, slots=True)
class Stuck:
    """`sentence` is as that of a status. `run` is the id of the run that it is about; None if it is about more.
    `since` is in seconds since the epoch; None if that is unknown, or said in the sentence. `is_slow`: it takes long,
    and nothing says that it stands still."""

    sentence: str
    since: float | None = None
    run: str | None = None
    is_slow: bool = False


def stuck(
    reasons: Sequence[str],
    runs: Sequence[tuple[Run, RunStatus]],
    pending: Sequence[Pending],
    activity: EngineActivity,
    now: float,
) -> list[Stuck]:
    """What is stuck or slow. `reasons` are those of `/readyz`; where a part of the server stands still, its requests
    are not named one by one. `now` is in seconds since the epoch."""
    parts = {reason.partition(":")[0] for reason in reasons}
    found = [_part(reason, activity) for reason in reasons]
    for run, status in runs:
        if not run.is_living or status.state == "finished or gone" or "training" in parts:
            continue
        if (model := _stuck_model(run.id, activity, now)) is not None:
            waits = model.waits_for is not WaitsFor.NOTHING  # a sentence about a command that runs says when it began
            is_slow = model.waits_for not in _STANDS
            found.append(Stuck(status.sentence, model.since if waits else None, run.id, is_slow))
    if "training" not in parts:
        found += _not_begun(runs, pending, activity, now)
    if "sampling" not in parts:
        found += _samples(pending, now)
    return found


@dataclass(frozen=True, slots=True)
class BaseModelState:
    """One base model of a server: `reasons` as `/readyz` has them, and what its engine does."""

    name: str
    reasons: Sequence[str]
    activity: EngineActivity


def stuck_of_all(
    models: Sequence[BaseModelState],
    number_of: Callable[[str], int],
    runs: Sequence[tuple[Run, RunStatus]],
    pending: Sequence[Pending],
    now: float,
) -> list[Stuck]:
    """What is stuck or slow on a server with several base models: what stands still is named for each of them.
    `number_of` is the place in `models` of a base model's name in a row."""
    of_runs = {run.id: number_of(run.base_model) for run, _ in runs}
    of_pending = [
        of_runs.get(one.model_id or "") if one.base_model is None else number_of(one.base_model) for one in pending
    ]
    found: list[Stuck] = []
    for number, model in enumerate(models):
        its_runs = [each for each in runs if of_runs[each[0].id] == number]
        its_pending = [one for one, of in zip(pending, of_pending, strict=True) if of == number]
        for one in stuck(model.reasons, its_runs, its_pending, model.activity, now):
            found.append(one if one.run is not None else replace(one, sentence=f"{model.name}: {one.sentence}"))
    return found


def _part(reason: str, activity: EngineActivity) -> Stuck:
    part, _, why = reason.partition(": ")
    if part not in _STANDS_STILL:
        return Stuck(reason)
    return Stuck(f"{_STANDS_STILL[part]}: {why}", activity.inference_away_since if part == "sampling" else None)


def _stuck_model(model_id: str, activity: EngineActivity, now: float) -> ModelActivity | None:
    """The model's activity if its next command waits or runs for too long."""
    if (model := activity.models.get(model_id)) is None:
        return None
    return model if now - model.since > _STANDS.get(model.waits_for, LONG_S) else None


def _not_begun(
    runs: Sequence[tuple[Run, RunStatus]], pending: Sequence[Pending], activity: EngineActivity, now: float
) -> list[Stuck]:
    """Old commands of models of which the engine says nothing."""
    living = {run.id for run, status in runs if run.is_living and status.state != "finished or gone"}
    return [
        Stuck(f"{one.kind.lower()} has not begun", one.since, one.model_id)
        for one in pending
        if one.model_id in living and one.model_id not in activity.models and now - one.since > LONG_S
    ]


def _samples(pending: Sequence[Pending], now: float) -> list[Stuck]:
    samples = [one for one in pending if one.kind in _SAMPLES]
    if not samples or now - (since := min(one.since for one in samples)) <= LONG_S:
        return []
    number = sum(one.number for one in samples)
    whose = "the oldest of " if number > 1 else ""
    return [Stuck(f"{whose}{counted(number, 'sample')} in flight has no result yet", since, is_slow=True)]
