"""What an API process does beside answering requests: the work that repeats, and words with other processes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from skyrl.api.build import ApiProcess
from skyrl.api.readiness import POLL_S
from skyrl.db.periodic import once, repeat
from skyrl.db.usage import meter_storage
from skyrl.futures.store import SAFETY_POLL_S
from skyrl.sampling.ownership import BEAT_S

logger = logging.getLogger(__name__)

SESSION_CHECK_S = 5.0
SWEEP_S = 10.0
LOG_S = 0.5
USAGE_S = 1.0
STORAGE_S = 60.0
KEYS_S = 2.0
"""A key that another process made or revoked is known here as such after this long."""
KEY_USES_S = 60.0
SAMPLER_USES_S = 60.0
DROPPED_S = 5.0
"""How often adapters are looked for that have been dropped: several times in `adapter_versions.NOTICE_S`."""
QUOTAS_S = 2.0
"""A quota that another process changed holds here after this long."""


async def begin(process: ApiProcess) -> None:
    """Read what the process must know before its first request, listen to other processes, and forward the samples that
    its predecessor left. Raises DatabaseError."""
    services, keys = process.services, process.base.keys
    await keys.refresh()
    await services.quotas.open()
    if services.access.managed and not len(keys):
        logger.warning("there is no API key: every request is refused until `skyrl keys create` has made one")
    await services.watch.refresh()
    process.base.notifier.listen(process.news.from_engine, process.news.from_peers)
    await _agree_on_order(process)
    await process.ownership.start()


async def run(process: ApiProcess) -> None:
    """All background work, until cancelled. A piece of it that fails is logged and stops no other."""
    async with asyncio.TaskGroup() as group:
        for name, period_s, action in _rounds(process):
            group.create_task(repeat(name, period_s, action))
        group.create_task(once("talking to the other API processes", process.base.notifier.run))


def _rounds(process: ApiProcess) -> list[tuple[str, float, Callable[[], Awaitable[object]]]]:
    """Name, seconds between two rounds, and action of all work that repeats."""
    services, base, retention = process.services, process.base, process.retention
    return [
        ("looking for results", SAFETY_POLL_S, services.futures.poll_outcomes),
        ("reading the engine's state", POLL_S, services.watch.refresh),
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
        ("looking for dropped adapters", DROPPED_S, services.samplers.forget_dropped),
        ("metering storage", STORAGE_S, partial(_meter_storage, process)),
    ]


async def _agree_on_order(process: ApiProcess) -> None:
    order = process.services.sampling.order
    if order is not None and not process.base.database.is_sqlite:
        order.catch_up(await process.clocks.exchange(order.now))


async def _look_after_others(process: ApiProcess) -> None:
    """On SQLite no other process joins later, and an idle server is to write little."""
    if process.ownership.sees_others or not process.base.database.is_sqlite:
        await process.ownership.round()


async def _meter_storage(process: ApiProcess) -> None:
    now = time.time()
    await process.base.writer.transact(lambda connection: meter_storage(connection, now))
