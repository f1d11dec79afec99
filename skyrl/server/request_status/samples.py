"""Where a sample stands, from what this process knows of it and of the inference server."""

from __future__ import annotations

from skyrl.base.types.activity import EngineActivity, WaitsFor
from skyrl.sampling.retries import SampleProgress, SampleWait
from skyrl.server.request_status.status import RequestStatus, active, counted, duration, paused

LONG_S = 2.0
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
        case SampleWait.LOADING:
            return paused(f"its adapter is being loaded into the inference server, for {waited}")
        case SampleWait.SUSPECTS:
            return paused(
                "the inference server has died more than once with this sample in flight; the samples that were in "
                f"flight are sent again one after another, and this one has waited for {waited}"
            )
        case None:
            pass
    if progress.has_adapter and places is not None and adapters > places and progress.for_s > LONG_S:
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
