"""Where a training command stands, from what the engine does and which commands of the model come before it; and where
a run stands: its next command, or what its client does, as a word and a sentence for the status page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from skyrl.api.request_status.status import RequestStatus, active, counted, duration, paused, paused_by_quota
from skyrl.base.types.activity import EngineActivity, ModelActivity, WaitsFor
from skyrl.base.types.requests import Kind
from skyrl.storage.db.models import PendingCommand
from skyrl.storage.db.runs import Run

_AT_WORK = (WaitsFor.NOTHING, WaitsFor.TURN)
"""Models in these states take part in the turns."""


def of_command(command: PendingCommand, activity: EngineActivity, now: float) -> RequestStatus:
    """`activity` is that of an engine that runs. `now` is in seconds since the epoch."""
    model = activity.models.get(command.model_id)
    if model is None:  # it has arrived since the engine last told what it does
        return active(f"{_called(command.kind, command.seq_id)} is about to begin")
    if model.waits_for is WaitsFor.NOTHING:
        return active(_running(command, model, now))
    before = len(command.before)
    waits = of_model(command.model_id, activity, now, command.before)
    if before and model.waits_for is not WaitsFor.GAP:
        return RequestStatus(waits.state, f"{counted(before, 'earlier command')} of this model first: {waits.sentence}")
    return waits


def of_model(model_id: str, activity: EngineActivity, now: float, before: Sequence[Kind] = ()) -> RequestStatus:
    """Where a model's next command stands. `before` are commands of the model that come before the command for whose
    start the estimate is. The engine told its activity a few seconds ago, so of a command that runs this says when it
    began, and not that it still runs."""
    model = activity.models[model_id]
    match model.waits_for:
        case WaitsFor.NOTHING:
            return active(f"{_called(model.kind, model.seq_id)} began {duration(now - model.since)} ago")
        case WaitsFor.TURN:
            return paused(_turn(model_id, model, activity, before))
        case WaitsFor.GAP:
            return paused(
                f"command {model.seq_id} of this model has not arrived, and {counted(model.waiting, 'later command')} "
                f"{'waits' if model.waiting == 1 else 'wait'} for it: the client has not sent it, or still sends it"
            )
        case WaitsFor.QUOTA:
            starts_s = 0.0 if model.starts_at is None else model.starts_at - now
            next_command = _called(model.kind, model.seq_id)
            return paused_by_quota(
                f"the tokens of this minute are used up; {next_command} starts in about {duration(starts_s)}"
            )
        case WaitsFor.RECOVERY:
            return paused(f"the trainer has restarted, and restores this model{_progress(activity)}")
        case WaitsFor.STORE:
            return paused("the trainer has restarted, and cannot reach the checkpoint store to restore this model")
        case WaitsFor.MEMORY:
            return paused("the trainer has restarted, and waits for memory to restore this model")
        case WaitsFor.FILES:
            return paused("the trainer has restarted, and cannot read or write the files that restore this model")
        case WaitsFor.SETTINGS:
            return paused("the trainer has restarted with settings that do not allow this model; its log has more")


def _progress(activity: EngineActivity) -> str:
    if (recovery := activity.recovery) is None or not recovery.commands:
        return ""
    return f": of all models' commands, {recovery.repeated} of {recovery.commands} are repeated"


def _running(command: PendingCommand, model: ModelActivity, now: float) -> str:
    since = duration(now - model.since)
    if command.seq_id is not None and model.seq_id is not None and command.seq_id <= model.seq_id:
        return f"{_called(command.kind, command.seq_id)} began {since} ago"
    before = counted(len(command.before), "earlier command")
    return f"{before} of this model first: {_called(model.kind, model.seq_id)} began {since} ago"


def _turn(model_id: str, model: ModelActivity, activity: EngineActivity, before: Sequence[Kind]) -> str:
    others = {m_id: m for m_id, m in activity.models.items() if m_id != model_id and m.waits_for in _AT_WORK}
    foreign = [m for m in others.values() if m.tenant != model.tenant]
    own = [m for m in others.values() if m.tenant == model.tenant]
    ahead: list[str] = []
    if foreign:
        tenants = counted(len({m.tenant for m in foreign}), "other tenant")
        ahead.append(f"{tenants} with {counted(_commands(foreign), 'command')}")
    if own:
        ahead.append(f"{counted(len(own), 'other model')} of yours with {counted(_commands(own), 'command')}")
    if not ahead:
        return f"{_called(model.kind, model.seq_id)} is next"
    wait_s = _wait_s(model, foreign, own, activity, before)
    estimate = "" if wait_s is None else f"; about {duration(wait_s)}"
    return f"{_called(model.kind, model.seq_id)} takes turns with {' and '.join(ahead)}{estimate}"


def _wait_s(
    model: ModelActivity,
    foreign: Sequence[ModelActivity],
    own: Sequence[ModelActivity],
    activity: EngineActivity,
    before: Sequence[Kind],
) -> float | None:
    """The estimated seconds until the command starts; None if a part of it is unknown.

    Tenants share by turns, and a tenant's models share its part: while this model's earlier commands run, each other
    party runs about as much work, but at least one command, and no more than it has.
    """
    own_s = 0.0
    for kind in before:
        if (mean := activity.run_s.get(kind)) is None:
            return None
        own_s += mean
    parties: defaultdict[str, list[ModelActivity]] = defaultdict(list)
    for other in foreign:
        parties[other.tenant].append(other)
    total = own_s
    for party in (*parties.values(), *([other] for other in own)):
        works = [other.work_s for other in party]
        known = [work for work in works if work is not None]
        if len(known) < len(works):
            return None
        work = sum(known)
        total += min(work, max(own_s, work / max(1, _commands(party))))
    return total


def _commands(models: Sequence[ModelActivity]) -> int:
    """The commands of these models that wait or run."""
    return sum(model.waiting + (model.waits_for is WaitsFor.NOTHING) for model in models)


def _called(kind: str, seq_id: int | None) -> str:
    """The command's name for people: `forward_backward (command 7)`."""
    name = kind.lower()
    return name if seq_id is None else f"{name} (command {seq_id})"


IDLE_S = 5.0
"""A client that asked for something within this time is not called idle."""
SILENT_S = 30.0
"""A client sends a heartbeat every ten seconds or so. One that sent none for this long is called silent."""

RunState = Literal["working", "waiting", "over quota", "idle", "finished or gone", "ended", "failed"]
"""working: a command or a sample of the run is being worked on. waiting, over quota: a command of the run waits for the
server, or for tokens of the tenant's quota. idle: nothing is asked of the server. finished or gone: the same, and the
client is silent. A script that ends without closing its session looks like a client that was killed."""
_STATES: dict[str, RunState] = {
    "active": "working",
    "paused_capacity": "waiting",
    "paused_rate_limit": "over quota",
}
"""The run's state by that of its next command."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The sentence begins with a small letter, ends without a full stop, and names no other tenant."""

    state: RunState
    sentence: str


def of_run(
    run: Run, activity: EngineActivity, trouble: RequestStatus | None, now: float, session_timeout_s: float
) -> RunStatus:
    """`trouble` is what all commands wait for while the engine cannot train. `now` is in seconds since the epoch."""
    if run.status == "failed":
        return RunStatus("failed", "the model could not be made or restored")
    if not run.is_living:
        return RunStatus("ended", f"the client sent its last command {duration(now - run.last_request_at)} ago")
    silent_s = now - run.heartbeat_at
    if silent_s > SILENT_S and not _is_asked_for(run, activity):
        left = duration(max(0.0, session_timeout_s - silent_s))
        sentence = f"the client was last heard of {duration(silent_s)} ago, and waits for nothing"
        return RunStatus("finished or gone", f"{sentence}; its session ends in {left}")
    if trouble is not None:
        return RunStatus(_STATES[trouble.state], trouble.sentence)
    if run.id in activity.models:
        status = of_model(run.id, activity, now)
        return RunStatus(_STATES[status.state], status.sentence)
    if run.samples_in_flight:
        return RunStatus("working", f"{counted(run.samples_in_flight, 'sample')} in flight")
    idle_s = now - run.last_request_at
    if idle_s < IDLE_S:
        return RunStatus("working", f"the client sent a command {duration(idle_s)} ago")
    return RunStatus("idle", f"the client sent its last command {duration(idle_s)} ago")


def _is_asked_for(run: Run, activity: EngineActivity) -> bool:
    """Whether anything of the run can still be computed. Commands that wait for one that a silent client has not sent
    cannot."""
    model = activity.models.get(run.id)
    return run.samples_in_flight > 0 or (model is not None and model.waits_for is not WaitsFor.GAP)
