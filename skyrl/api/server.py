"""The API process: opens the services, serves HTTP, forwards samples, drains on SIGTERM.

Beside the requests run the repeated work, and the notices to and from other processes (`begin` and `run`)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import uvloop

from skyrl.api.access import Tokens
from skyrl.api.app import create_app
from skyrl.api.direct_http import protocol_with
from skyrl.api.served import POLL_S
from skyrl.api.services import Services
from skyrl.api.signed_links import SignedUrls
from skyrl.http.serving import Server
from skyrl.inference.features import inference_features
from skyrl.runtime.metrics.files import publishing
from skyrl.runtime.processes.runtime import Runtime, run_process, set_up_process
from skyrl.sampling.service import BEAT_S
from skyrl.storage.db.faults import DatabaseError, outage, reason
from skyrl.storage.db.repeats import once, repeat
from skyrl.storage.db.usage import add_storage, metered_storage
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


async def begin(services: Services) -> None:
    """Prepare for the first request: read keys, quotas and the engine's state, listen to other processes, and adopt the
    samples that this process's predecessor left. Raises DatabaseError."""
    await services.keys.refresh()
    await services.quotas.open()
    if services.access.managed and not len(services.keys):
        logger.warning("there is no API key: every request is refused until `skyrl keys create` has made one")
    await services.refresh()
    services.notifier.listen(services.notices.from_engine, services.notices.from_peers)
    await _agree_on_order(services)
    await services.ownership.start()


async def run_background(services: Services) -> None:
    """Run all background work until cancelled. A failure is logged and stops no other work."""
    async with asyncio.TaskGroup() as group:
        for name, period_s, action in _repeated_work(services):
            group.create_task(repeat(name, period_s, action))
        own = services.ownership
        group.create_task(repeat("forwarding samples that were left", BEAT_S, own.forward_left, rung=own.adopted))
        group.create_task(once("measuring the event loop", services.metrics.lag.run))
        group.create_task(once("talking to the other API processes", services.notifier.run))


def _repeated_work(services: Services) -> list[tuple[str, float, Callable[[], Awaitable[object]]]]:
    """Name, seconds between two rounds, and action of each piece of repeated work."""
    return [
        ("looking for results", SAFETY_POLL_S, services.futures.poll_outcomes),
        ("reading the engine's state", POLL_S, services.refresh),
        ("looking at sessions", SESSION_CHECK_S, services.session_life.check),
        ("looking after the other API processes", BEAT_S, partial(_look_after_others, services)),
        ("agreeing on the order of samples", BEAT_S, partial(_agree_on_order, services)),
        ("forgetting results", SWEEP_S, services.retention.sweep),
        ("shortening the database's log", LOG_S, services.retention.shorten_log),
        ("counting usage", USAGE_S, services.counter.flush),
        ("reading the keys", KEYS_S, services.keys.refresh),
        ("reading the quotas", QUOTAS_S, services.quotas.refresh),
        ("noting when keys were used", KEY_USES_S, services.keys.note_uses),
        ("noting what was sampled from", SAMPLER_USES_S, services.samplers.write_uses),
        ("noting when agent sessions were used", SAMPLER_USES_S, services.agent_sessions.write_uses),
        ("noting agent sessions with a running turn", AGENT_SESSIONS_S, services.agents.live.note_running),
        ("ending agent sessions", AGENT_SESSIONS_S, services.agents.live.end_over),
        ("forgetting agent sessions", AGENT_SESSIONS_S, services.agents.live.shrink),
        ("keeping adapters that OpenAI requests use", ADAPTER_USES_S, services.adapter_uses.renew),
        ("looking for dropped adapters", DROPPED_S, services.samplers.forget_dropped),
        ("metering storage", STORAGE_S, partial(_meter_storage, services)),
    ]


async def _agree_on_order(services: Services) -> None:
    orders = {model.config.role.state_keys[0]: model.sampling.gate.order for model in services.served}
    used = {name: order for name, order in orders.items() if order is not None}
    if used and not services.database.is_sqlite:
        others = await services.clocks.exchange({name: order.now for name, order in used.items()})
        for name, clock in others.items():
            if name in used:
                used[name].catch_up(clock)


async def _look_after_others(services: Services) -> None:
    """Skipped if this process is alone on SQLite: no other process can join, and an idle server should write little."""
    if services.ownership.sees_others or not services.database.is_sqlite:
        await services.ownership.round()


async def _meter_storage(services: Services) -> None:
    now = time.time()
    hours = await services.database.read_async(lambda connection: metered_storage(connection, now))
    while (metered := await asyncio.to_thread(next, hours, None)) is not None:
        await services.writer.transact(partial(add_storage, metered=metered))


DRAIN_S = 10.0
"""How long samples in flight may go on after a signal to stop."""


@contextlib.asynccontextmanager
async def open_services(runtime: Runtime) -> AsyncIterator[Services]:
    """The services, with the background work running. On exit, samples drain and queued writes are committed. Raises
    what `begin` raises, and closes everything before."""
    features = [inference_features(one.config) for one in runtime.each]
    config = runtime.config
    urls = SignedUrls.open(config.state_dir, config.public_url)
    services = Services(runtime, Tokens.open(config.state_dir), urls, features)
    try:
        await begin(services)
        metrics, directory = services.metrics, services.published_metrics
        async with publishing(metrics.registry, f"api-{runtime.slot}", directory, more=metrics.labelled, answers=True):
            background = asyncio.create_task(run_background(services))
            try:
                yield services
            finally:
                await drain(services)
                background.cancel()
                await asyncio.wait([background])
                await write_last(services)
    finally:
        await close(services)


async def drain(services: Services) -> None:
    """Refuse new samples and OpenAI requests, and give those in flight DRAIN_S."""
    services.sampling.refuse_new()
    await asyncio.gather(
        services.sampling.drain(DRAIN_S), services.openai_in_flight.drain(DRAIN_S), services.agents.drain(DRAIN_S)
    )


async def write_last(services: Services) -> None:
    """Write what is only in memory. The background work must have ended before."""
    for name, write in (
        ("the usage since the last second", services.counter.flush),
        ("when keys were used", services.keys.note_uses),
        ("what was sampled from", services.samplers.write_uses),
        ("when agent sessions were used", services.agent_sessions.write_uses),
        ("that this process has ended", services.ownership.leave),
    ):
        try:
            await write()
        except DatabaseError as error:
            logger.error("%s could not be written: %s", name, reason(error))


async def close(services: Services) -> None:
    """Close what is open, also where `begin` has failed. Samples that still run are left for the next start."""
    services.sampling.refuse_new()
    await services.sampling.drain(0)
    await services.notifier.close()
    for model in services.served:
        if model.sampling.client is not None:
            await model.sampling.client.close()
    await services.picture_checks.close()
    for writer in {services.recorder, services.writer}:
        await writer.close()
    services.database.close()
    if services.spans is not None:
        await asyncio.to_thread(services.spans.close)


async def serve(runtime: Runtime) -> None:
    gc.disable()  # the start makes many objects and no garbage; `collect_by_the_clock` goes on
    async with open_services(runtime) as services:
        app = create_app(services)
        app.prepare()

        async def end() -> None:
            """Refuse new samples, and give those in flight time while clients can still poll."""
            await drain(services)
            services.futures.release_waiters()

        listening = [socket.socket(fileno=number) for number in runtime.listening]
        await Server(app, http=protocol_with(app)).serve_until_signal(listening, end)


def main() -> None:
    runtime = Runtime.from_environment()
    set_up_process(runtime.config.log_level, runtime.config.log_format, f"api-{runtime.slot}")
    run_process("the API", lambda: uvloop.run(serve(runtime)), outage)


if __name__ == "__main__":
    main()
