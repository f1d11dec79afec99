"""The API process: builds the services, serves HTTP, forwards samples, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Generator
from functools import partial

import uvicorn
import uvloop

from skyrl.api.access import Access
from skyrl.api.app import create_app
from skyrl.api.connections import BoundedHttp
from skyrl.api.news import News
from skyrl.api.readiness import POLL_S, EngineWatch
from skyrl.api.services import Services
from skyrl.api.signing import SignedUrls
from skyrl.api.tokens import Tokens
from skyrl.db.api_processes import ApiProcesses
from skyrl.db.audit import Audit
from skyrl.db.checkpoints import Checkpoints
from skyrl.db.copies import Copies
from skyrl.db.database import Database
from skyrl.db.engine_state import EngineState, read_state
from skyrl.db.faults import DatabaseError, reason
from skyrl.db.keys import Keys
from skyrl.db.models import Models
from skyrl.db.periodic import repeat
from skyrl.db.retention import Retention
from skyrl.db.sample_clocks import SampleClocks
from skyrl.db.samplers import Samplers
from skyrl.db.session_search import SessionSearch
from skyrl.db.sessions import Sessions
from skyrl.db.urls import postgres_conninfo
from skyrl.db.usage import Usage, UsageCounter, meter_storage
from skyrl.db.writer import GroupCommitWriter
from skyrl.futures.store import SAFETY_POLL_S, FutureStore
from skyrl.futures.trace import Traces
from skyrl.inference.adapter_host import AdapterHost, SharedDirectory
from skyrl.inference.features import inference_features
from skyrl.inference.vllm_command import cuda_devices
from skyrl.launcher.runtime import Runtime, run_process, set_up_process
from skyrl.notify.notifier import Notifier
from skyrl.processes.listening import BACKLOG
from skyrl.quotas.limits import Bounds, QuotaLimits
from skyrl.quotas.tenants import Quotas
from skyrl.sampling.admission import Admission
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.endpoint import EngineEndpoint, FixedEndpoint
from skyrl.sampling.fair_order import FairOrder
from skyrl.sampling.guards import FeatureGuard
from skyrl.sampling.http import HttpTransport
from skyrl.sampling.ownership import BEAT_S, SampleOwnership
from skyrl.sampling.service import SampleService
from skyrl.storage.registry import open_store

logger = logging.getLogger(__name__)

DRAIN_S = 10.0
SESSION_CHECK_S = 5.0
SWEEP_S = 10.0
LOG_S = 0.5
USAGE_S = 1.0
YOUNG_OBJECTS = 50_000
"""Allocations between two looks for garbage cycles: a sample makes next to none, and 700, Python's own number, is a
tenth of its cost."""
STORAGE_S = 60.0
KEYS_S = 2.0
"""A key that was made or revoked by another process is known as such after this long."""
KEY_USES_S = 60.0
SAMPLER_USES_S = 60.0
DROPPED_S = 5.0
"""How often adapters are looked for that have been dropped: several times in `adapter_versions.NOTICE_S`."""
QUOTAS_S = 2.0
"""A quota that was changed by another process holds here after this long."""


def _client(runtime: Runtime, database: Database, adapters: AdapterHost) -> ForwardingClient | None:
    config = runtime.config
    if not config.modes.forwards:
        return None

    async def read() -> EngineState:
        return await database.read_async(read_state)

    external = config.external_inference_url
    return ForwardingClient(
        HttpTransport(config.forwarding_inference_max_connections),
        EngineEndpoint(read) if external is None else FixedEndpoint(external),
        adapters,
        api_key=runtime.inference_api_key,
        deadline_s=config.forwarding_deadline_s,
        zero_fill_logprobs=config.forwarding_zero_fill_logprobs,
    )


async def _meter_storage(writer: GroupCommitWriter) -> None:
    now = time.time()
    await writer.transact(lambda connection: meter_storage(connection, now))


@contextlib.asynccontextmanager
async def open_services(runtime: Runtime) -> AsyncIterator[Services]:
    """Everything the API process works with; on exit samples drain and what is queued is committed."""
    config = runtime.config
    database = Database(config.database)
    writer = GroupCommitWriter(database)
    notifier = Notifier(
        runtime.process_id,
        own_doorbell=runtime.api_doorbell,
        engine_doorbell=runtime.engine_doorbell,
        postgres_conninfo=None if database.is_sqlite else postgres_conninfo(database.url),
    )
    futures = FutureStore(database, writer, runtime.process_id, notifier.peers)

    async def read() -> EngineState:
        return await database.read_async(read_state)

    watch = EngineWatch(read, config.modes)
    store, checkpoints = open_store(config), Checkpoints(database, writer)
    adapters = SharedDirectory(partial(watch.adapters_in, config.state_dir), store, checkpoints.store_key_of)
    client = _client(runtime, database, adapters)
    samplers = Samplers(database, writer)
    sessions = Sessions(database, writer, notifier.peers)
    counter = UsageCounter(writer)
    keys, tokens = Keys(database, writer), Tokens.open(config.state_dir)
    quotas = Quotas(database, QuotaLimits.of(config), Bounds.of(config), futures.is_pending)
    order = FairOrder() if config.modes.manages_inference or config.external_inference_priority else None
    sampling = SampleService(
        futures,
        samplers,
        sessions,
        client=client,
        engine=notifier.engine,
        limits=watch.limits,
        admission=Admission(config.max_pending_samples, config.max_pending_sample_bytes),
        order=order,
        base_name=config.served_names[0],
        guard=FeatureGuard(inference_features(config, cuda=bool(cuda_devices()))),
        usage=counter,
        quotas=quotas,
    )
    services = Services(
        config=config,
        process_id=runtime.process_id,
        sessions=sessions,
        models=Models(database, writer),
        samplers=samplers,
        checkpoints=checkpoints,
        checkpoint_store=store,
        adapters=adapters,
        copies=Copies(database, writer),
        futures=futures,
        sampling=sampling,
        client=client,
        engine=notifier.engine,
        watch=watch,
        tokens=tokens,
        access=Access(keys, tokens, managed=config.api_keys == "managed"),
        urls=SignedUrls.open(config.state_dir, config.public_url),
        search=SessionSearch(database),
        audit=Audit(database, writer),
        usage=Usage(database),
        traces=Traces(database),
        quotas=quotas,
    )
    processes = ApiProcesses(database, writer, runtime.process_id)
    ownership = SampleOwnership(processes, notifier.peers, futures, sampling, forwards=client is not None)
    await keys.refresh()
    await quotas.open()
    if config.api_keys == "managed" and not len(keys):
        logger.warning("there is no API key: every request is refused until `skyrl keys create` has made one")
    await watch.refresh()
    news = News(futures, sampling, watch, services.session_changed)
    notifier.listen(news.from_engine, news.from_peers)
    clocks = SampleClocks(writer, runtime.process_id)

    async def agree_on_order() -> None:
        if order is not None and not database.is_sqlite:
            order.catch_up(await clocks.exchange(order.now))

    async def look_after_others() -> None:
        if ownership.sees_others or not database.is_sqlite:  # to SQLite none comes, and an idle server writes little
            await ownership.round()

    await agree_on_order()
    await ownership.start()
    retention = Retention(database, writer, config.result_retention_s)
    background = [
        asyncio.create_task(notifier.run()),
        asyncio.create_task(repeat("looking for results", SAFETY_POLL_S, futures.poll_outcomes)),
        asyncio.create_task(repeat("reading the engine's state", POLL_S, watch.refresh)),
        asyncio.create_task(repeat("looking at sessions", SESSION_CHECK_S, services.look_at_sessions)),
        asyncio.create_task(repeat("looking after the other API processes", BEAT_S, look_after_others)),
        asyncio.create_task(repeat("agreeing on the order of samples", BEAT_S, agree_on_order)),
        asyncio.create_task(repeat("forgetting results", SWEEP_S, retention.sweep)),
        asyncio.create_task(repeat("shortening the database's log", LOG_S, retention.shorten_log)),
        asyncio.create_task(repeat("counting usage", USAGE_S, counter.flush)),
        asyncio.create_task(repeat("reading the keys", KEYS_S, keys.refresh)),
        asyncio.create_task(repeat("reading the quotas", QUOTAS_S, quotas.refresh)),
        asyncio.create_task(repeat("noting when keys were used", KEY_USES_S, keys.note_uses)),
        asyncio.create_task(repeat("noting what was sampled from", SAMPLER_USES_S, samplers.write_uses)),
        asyncio.create_task(repeat("looking for dropped adapters", DROPPED_S, samplers.forget_dropped)),
        asyncio.create_task(repeat("metering storage", STORAGE_S, partial(_meter_storage, writer))),
    ]
    try:
        yield services
    finally:
        sampling.refuse_new()
        await sampling.drain(DRAIN_S)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await notifier.close()
        if client is not None:
            await client.close()
        for name, last in (
            ("the usage since the last second", counter.flush),
            ("when keys were used", keys.note_uses),
            ("what was sampled from", samplers.write_uses),
            ("that this process has ended", ownership.leave),
        ):
            try:
                await last()
            except DatabaseError as error:
                logger.error("%s could not be written: %s", name, reason(error))
        await writer.close()
        database.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which ends the process before the services are closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def _drain(server: uvicorn.Server, services: Services) -> None:
    """No new samples, time for those in flight while their clients can still poll, then the end."""
    services.sampling.refuse_new()
    await services.sampling.drain(DRAIN_S)
    services.futures.release_waiters()
    server.should_exit = True


def _tune_garbage_collection() -> None:
    """Modules and services are there until the end: they are not looked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


async def serve(runtime: Runtime) -> None:
    async with open_services(runtime) as services:
        server = _Server(
            uvicorn.Config(
                create_app(services),
                http=BoundedHttp,
                log_level="error",  # it warns of every request that is no HTTP
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=3,
                server_header=False,
                lifespan="off",
                ws="none",
            )
        )
        _tune_garbage_collection()
        draining: list[asyncio.Task[None]] = []

        def drain_once() -> None:
            if not draining:
                draining.append(asyncio.create_task(_drain(server, services)))

        for ending in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(ending, drain_once)
        await server.serve([socket.socket(fileno=number) for number in runtime.listening])
        await asyncio.gather(*draining)


def main() -> None:
    runtime = Runtime.from_environment()
    set_up_process(runtime.config)
    run_process("the API", lambda: uvloop.run(serve(runtime)))


if __name__ == "__main__":
    main()
