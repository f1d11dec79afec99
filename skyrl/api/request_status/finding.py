"""Finds where a request or a run of a tenant stands: for the answer to a long poll that has no result yet, and for the
status page. Where a sample stands is known from this process and from the inference server.

`stuck` says whether anything of a tenant is stuck: what stands still on the server, and requests that wait for nothing
that will come. What only takes long is said apart: it is computed, or its turn comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from skyrl.api.request_status.commands import RunStatus, of_command, of_run
from skyrl.api.request_status.status import RequestStatus, active, counted, duration, paused, paused_by_quota
from skyrl.api.served import EngineWatch
from skyrl.base.types.activity import EngineActivity, ModelActivity, WaitsFor
from skyrl.base.types.requests import Kind
from skyrl.sampling.quotas import Quotas
from skyrl.sampling.retries import SampleProgress, SampleWait
from skyrl.sampling.service import SampleService
from skyrl.storage.db import models as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.runs import Pending, Run

ADAPTER_WAIT_S = 2.0
"""An adapter that has waited less than this has not waited for a place."""


def of_forwarded(progress: SampleProgress, adapters: int, places: int | None, away: str = "") -> RequestStatus:
    """A sample that this process forwards. `adapters` are sampled from now, and the inference servers run `places`
    adapters at a time; None if that is unknown. `away`: why no inference server runs, if that is known."""
    waited = duration(progress.for_s)
    match progress.waits_for:
        case SampleWait.AWAY:
            why = f" ({away})" if away else ""
            return paused(f"the inference server has been away for {waited}{why}; the sample is sent when it is back")
        case SampleWait.BUSY:
            return paused(f"the inference server takes no more samples at the moment, for {waited}")
        case SampleWait.TURN:
            return paused(
                f"the inference server has as many samples as are sent to it at a time; this one waits its turn, for "
                f"{waited}"
            )
        case SampleWait.LOADING:
            return paused(f"its adapter is being loaded into the inference server, for {waited}")
        case SampleWait.SUSPECTS:
            return paused(
                "the inference server has died more than once with this sample in flight; the samples that were in "
                f"flight are sent again one after another, and this one has waited for {waited}"
            )
        case None:
            pass
    if progress.has_adapter and places is not None and adapters > places and progress.for_s > ADAPTER_WAIT_S:
        return paused(
            f"samples from {counted(adapters, 'adapter')} are in flight, and the inference server runs {places} at a "
            f"time; this sample has waited or run for {waited}"
        )
    return active(f"the inference server has had the sample for {waited}")


def of_elsewhere(activity: EngineActivity, now: float) -> RequestStatus:
    """A sample that another process of the server forwards."""
    if activity.inference_away_since is not None:
        away = duration(now - activity.inference_away_since)
        return paused(f"the inference server has been away for {away}; the sample is sent when it is back")
    return active("another process of the server forwards the sample")


def of_colocated(activity: EngineActivity) -> RequestStatus:
    """A sample that the engine runs between turns of training."""
    trains = any(model.waits_for is WaitsFor.NOTHING for model in activity.models.values())
    if trains:
        waiting = counted(activity.samples_waiting, "sample")
        return paused(f"trainer and sampler share a device: {waiting} wait until a turn of training ends")
    return active("the engine samples")


class StatusFinder:
    """`engine_of` returns the watch of the engine that trains the base model of this name."""

    def __init__(
        self,
        database: Database,
        sampling: SampleService,
        quotas: Quotas,
        *,
        engine_of: Callable[[str], EngineWatch],
        session_timeout_s: float,
    ) -> None:
        self._database = database
        self._sampling = sampling
        self._quotas = quotas
        self._engine_of = engine_of
        self._session_timeout_s = session_timeout_s

    async def of_request(self, request_id: str, kind: Kind, tenant: str) -> RequestStatus:
        """Where a pending request of the tenant stands."""
        model = self._sampling.base_models.with_sample(request_id)
        if self._quotas.in_use:
            pause = await self._quotas.pause_of(request_id, tenant, started=model is not None)
            if pause is not None:
                return paused_by_quota(pause)
        if model is not None and (progress := model.forwarded.progress(request_id)) is not None:
            return of_forwarded(progress, model.forwarded.adapters_in_flight(), model.places, model.why_away())
        base_model = await self._database.read_async(lambda c: rows.base_model_of(c, request_id))
        engine = self._engine_of(base_model or "")
        if kind is Kind.EXTERNAL:
            return of_elsewhere(engine.activity, time.time())
        if (trouble := _of_trouble(engine)) is not None:
            return trouble
        if kind is Kind.SAMPLE:
            return of_colocated(engine.activity)
        command = await self._database.read_async(lambda c: rows.pending_command(c, request_id))
        return active("it has just ended") if command is None else of_command(command, engine.activity, time.time())

    def of_run(self, run: Run) -> RunStatus:
        """Where a run stands."""
        engine = self._engine_of(run.base_model)
        return of_run(run, engine.activity, _of_trouble(engine), time.time(), self._session_timeout_s)


def _of_trouble(engine: EngineWatch) -> RequestStatus | None:
    """What all training commands wait for while the engine cannot train."""
    if (trouble := engine.training_trouble()) is None:
        return None
    if (recovery := engine.activity.recovery) is not None:
        return paused(
            f"the trainer has restarted, and has repeated {recovery.repeated} of {recovery.commands} commands"
        )
    return paused(f"the trainer cannot run commands now: {trouble}")


STANDS_S = 300.0
"""A request that runs, or waits for the same thing, for longer than this is called slow. One that the engine does not
know for so long is called stuck."""
GAP_S = 30.0
"""Commands that wait for one that the client has not sent are stuck after this time."""
_SAMPLES = (Kind.EXTERNAL, Kind.SAMPLE)
_AT_ONCE = (WaitsFor.STORE, WaitsFor.MEMORY, WaitsFor.FILES, WaitsFor.SETTINGS)
_STANDS = {**dict.fromkeys(_AT_ONCE, 0.0), WaitsFor.GAP: GAP_S}
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
    return model if now - model.since > _STANDS.get(model.waits_for, STANDS_S) else None


def _not_begun(
    runs: Sequence[tuple[Run, RunStatus]], pending: Sequence[Pending], activity: EngineActivity, now: float
) -> list[Stuck]:
    """Old commands of models of which the engine says nothing."""
    living = {run.id for run, status in runs if run.is_living and status.state != "finished or gone"}
    return [
        Stuck(f"{one.kind.lower()} has not begun", one.since, one.model_id)
        for one in pending
        if one.model_id in living and one.model_id not in activity.models and now - one.since > STANDS_S
    ]


def _samples(pending: Sequence[Pending], now: float) -> list[Stuck]:
    samples = [one for one in pending if one.kind in _SAMPLES]
    if not samples or now - (since := min(one.since for one in samples)) <= STANDS_S:
        return []
    number = sum(one.number for one in samples)
    whose = "the oldest of " if number > 1 else ""
    return [Stuck(f"{whose}{counted(number, 'sample')} in flight has no result yet", since, is_slow=True)]
