"""What the status page shows of the server itself to a key with the scope admin: parts, queues, adapters, disk.

Counts only: nothing in it belongs to one tenant. Everything but the quotas' counts comes from the database, so that any
API process gives the same answer.
"""

from __future__ import annotations

import shutil
from collections import Counter
from typing import Any

import msgspec

from skyrl.api.access import Caller
from skyrl.api.overview import Overview
from skyrl.api.services import Services
from skyrl.db import api_processes
from skyrl.db.adapter_versions import count_servable
from skyrl.db.runs import pending_by_kind
from skyrl.types.activity import EngineActivity, WaitsFor


async def box(services: Services, caller: Caller) -> dict[str, Any]:
    """Times are in seconds since the epoch, `_s` are seconds. Holds no ages, so that an unchanged box stays equal."""

    def read(connection: Any) -> tuple[dict[str, int], list[tuple[str, float, float]], int]:
        return pending_by_kind(connection), api_processes.heartbeats(connection), count_servable(connection)

    pending, processes, servable = await services.database.read_async(read)
    state, activity = services.watch.state, services.watch.activity
    used = shutil.disk_usage(services.config.state_dir)
    return {
        "server": await Overview(services, caller).server(),
        "trainer": _trainer(services, activity),
        "inference": {
            "published": state.inference_proxy_url is not None,
            "generation": state.generation,
            "away_since": activity.inference_away_since,
        },
        "api_processes": [
            # A process that is alone on its database may write no heartbeats.
            {"id": name, "started_at": started_at, "heartbeat_at": heartbeat_at if len(processes) > 1 else None}
            for name, started_at, heartbeat_at in processes
        ],
        "pending": pending,
        "models": _models(activity),
        "adapters": {"servable": servable, "places": services.standings.places},
        "quotas": services.quotas.counts(),
        "disk": {"free_bytes": used.free, "total_bytes": used.total},
        "database_bytes": await services.database.read_async(services.database.size_bytes),
    }


def _trainer(services: Services, activity: EngineActivity) -> dict[str, Any] | None:
    """None on a gateway on whose database nobody trains."""
    heartbeat_at = services.watch.state.heartbeat_at or None
    if heartbeat_at is None and not services.config.modes.trains:
        return None
    recovery = activity.recovery
    return {
        "trouble": services.watch.training_trouble(),
        "heartbeat_at": heartbeat_at,
        "recovery": None if recovery is None else msgspec.structs.asdict(recovery),
        "run_s": activity.run_s,
    }


def _models(activity: EngineActivity) -> dict[str, Any]:
    """The models with commands: how many wait for what, and since when the longest has waited."""
    waiting = [model for model in activity.models.values() if model.waits_for is not WaitsFor.NOTHING]
    return {
        "running": len(activity.models) - len(waiting),
        "waiting": dict(Counter(str(model.waits_for) for model in waiting)),
        "longest_wait_since": min((model.since for model in waiting), default=None),
        "commands_waiting": sum(model.waiting for model in activity.models.values()),
    }
