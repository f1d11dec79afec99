"""What an API process does beside answering requests: repeated work, and notices to and from other processes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from skyrl.sampling.service import BEAT_S
from skyrl.server.api.build import ApiProcess
from skyrl.server.api.readiness import POLL_S
from skyrl.storage.db.repeats import once, repeat
from skyrl.storage.db.usage import meter_storage
from skyrl.storage.futures.store import SAFETY_POLL_S

logger = logging.getLogger(__name__)

SESSION_CHECK_S = 5.0
SWEEP_S = 10.0
LOG_S = 0.5
USAGE_S = 1.0
STORAGE_S = 60.0
KEYS_S = 2.0
"""How long until this process learns that another process made or revoked a key."""
KEY_USES_S = 60.0
SAMPLER_USES_S = 60.0
ADAPTER_USES_S = 60.0
AGENT_SESSIONS_S = 10.0
DROPPED_S = 5.0
"""How often this process looks for dropped adapters: several times in `adapter_versions.NOTICE_S`."""
QUOTAS_S = 2.0
"""How long until a quota that another process changed holds in this process."""


async def begin(process: ApiProcess) -> None:
    """Prepare for the first request: read keys, quotas and the engine's state, listen to other processes, and forward
    the samples that this process's predecessor left. Raises DatabaseError."""
    services, keys = process.services, process.base.keys
    await keys.refresh()
    await services.quotas.open()
    if services.access.managed and not len(keys):
        logger.warning("there is no API key: every request is refused until `skyrl keys create` has made one")
    await services.refresh()
    process.base.notifier.listen(process.notices.from_engine, process.notices.from_peers)
    await _agree_on_order(process)
    await process.ownership.start()


async def run(process: ApiProcess) -> None:
    """Run all background work until cancelled. A failure is logged and stops no other work."""
    async with asyncio.TaskGroup() as group:
        for name, period_s, action in _repeated_work(process):
            group.create_task(repeat(name, period_s, action))
        group.create_task(once("measuring the event loop", process.base.metrics.lag.run))
        group.create_task(once("talking to the other API processes", process.base.notifier.run))


def _repeated_work(process: ApiProcess) -> list[tuple[str, float, Callable[[], Awaitable[object]]]]:
    """Name, seconds between two rounds, and action of each piece of repeated work."""
    services, base, retention = process.services, process.base, process.retention
    return [
        ("looking for results", SAFETY_POLL_S, services.futures.poll_outcomes),
        ("reading the engine's state", POLL_S, services.refresh),
        ("looking at sessions", SESSION_CHECK_S, services.session_life.check),
        ("looking after the other API processes", BEAT_S, partial(_look_after_others, process)),
        ("agreeing on the order of samples", BEAT_S, partial(_agree_on_order, process)),
        ("forgetting results", SWEEP_S, retention.sweep),
        ("shortening the database's log", LOG_S, retention.shorten_log),
        ("counting usage", USAGE_S, base.counter.flush),
        ("reading the keys", KEYS_S, base.keys.refresh),
        ("reading the quotas", QUOTAS_S, services.quotas.refresh),
        ("noting when keys were used", KEY_USES_S, base.keys.note_uses),
        ("noting what was sampled from", SAMPLER_USES_S, services.samplers.write_uses),
        ("noting when agent sessions were used", SAMPLER_USES_S, services.agent_sessions.write_uses),
        ("noting agent sessions with a running turn", AGENT_SESSIONS_S, services.agents.live.note_running),
        ("ending agent sessions", AGENT_SESSIONS_S, services.agents.live.end_over),
        ("forgetting agent sessions", AGENT_SESSIONS_S, services.agents.live.shrink),
        ("keeping adapters that OpenAI requests use", ADAPTER_USES_S, services.adapter_uses.renew),
        ("looking for dropped adapters", DROPPED_S, services.samplers.forget_dropped),
        ("metering storage", STORAGE_S, partial(_meter_storage, process)),
    ]


async def _agree_on_order(process: ApiProcess) -> None:
    orders = {model.config.role.state_keys[0]: model.lane.order for model in process.services.served}
    used = {name: order for name, order in orders.items() if order is not None}
    if used and not process.base.database.is_sqlite:
        others = await process.clocks.exchange({name: order.now for name, order in used.items()})
        for name, clock in others.items():
            if name in used:
                used[name].catch_up(clock)


async def _look_after_others(process: ApiProcess) -> None:
    """Skipped if this process is alone on SQLite: no other process can join, and an idle server should write little."""
    if process.ownership.sees_others or not process.base.database.is_sqlite:
        await process.ownership.round()


async def _meter_storage(process: ApiProcess) -> None:
    now = time.time()
    await process.base.writer.transact(lambda connection: meter_storage(connection, now))
