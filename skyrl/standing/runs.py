"""Where a run stands: its next command, or what its client does, as one sentence for the status page."""

from __future__ import annotations

from skyrl.db.runs import Run
from skyrl.standing.commands import of_model
from skyrl.standing.standing import Standing, active, counted, duration, paused
from skyrl.types.activity import EngineActivity

IDLE_S = 5.0
"""A client that asked for something within this time is not called idle."""
SILENT_S = 30.0
"""A client sends a heartbeat every ten seconds or so. One that sent none for this long is called silent."""


def of_run(
    run: Run, activity: EngineActivity, trouble: Standing | None, now: float, session_timeout_s: float
) -> Standing:
    """`trouble` is what all commands wait for while the engine cannot train. `now` is in seconds since the epoch."""
    if run.status == "failed":
        return active("failed: the model could not be made or restored")
    if not run.is_living:
        return active(f"ended {duration(now - run.last_request_at)} ago")
    silent_s = now - run.heartbeat_at
    if silent_s > SILENT_S:
        left = duration(max(0.0, session_timeout_s - silent_s))
        return paused(f"the client was last heard of {duration(silent_s)} ago; its session ends in {left}")
    if trouble is not None:
        return trouble
    if run.id in activity.models:
        return of_model(run.id, activity, now)
    if run.samples_in_flight:
        return active(f"{counted(run.samples_in_flight, 'sample')} in flight")
    idle_s = now - run.last_request_at
    if idle_s < IDLE_S:
        return active("at work")
    return active(f"idle: the client sent its last command {duration(idle_s)} ago")
