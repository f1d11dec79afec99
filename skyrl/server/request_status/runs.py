"""Where a run stands: its next command, or what its client does, as a word and a sentence for the status page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skyrl.base.types.activity import EngineActivity, WaitsFor
from skyrl.server.request_status.commands import of_model
from skyrl.server.request_status.status import RequestStatus, counted, duration
from skyrl.storage.db.runs import Run

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
