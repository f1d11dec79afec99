"""The API process: opens the services, serves HTTP, forwards samples, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator

import uvloop

from skyrl.inference.features import inference_features
from skyrl.runtime.metrics.files import publishing
from skyrl.runtime.processes.runtime import Runtime, run_process, set_up_process
from skyrl.runtime.web.server import Server, tune_garbage_collection
from skyrl.server.api.app import create_app
from skyrl.server.api.background import begin, run
from skyrl.server.api.build import ApiProcess, Secrets, build
from skyrl.server.api.services import Services
from skyrl.server.api.whole_request import protocol_with
from skyrl.storage.db.faults import DatabaseError, outage, reason

logger = logging.getLogger(__name__)

DRAIN_S = 10.0
"""How long samples in flight may go on after a signal to stop."""


@contextlib.asynccontextmanager
async def open_services(runtime: Runtime) -> AsyncIterator[Services]:
    """The services, with the background work running. On exit, samples drain and queued writes are committed. Raises
    what `begin` raises, and closes everything before."""
    features = [inference_features(one.config) for one in runtime.each]
    process = build(runtime, Secrets.open(runtime), features)
    try:
        await begin(process)
        metrics, directory = process.base.metrics, process.services.published_metrics
        async with publishing(metrics.registry, f"api-{runtime.slot}", directory, more=metrics.labelled, answers=True):
            background = asyncio.create_task(run(process))
            try:
                yield process.services
            finally:
                await drain(process.services)
                background.cancel()
                await asyncio.wait([background])
                await write_last(process)
    finally:
        await close(process)


async def drain(services: Services) -> None:
    """Refuse new samples and OpenAI requests, and give those in flight DRAIN_S."""
    services.sampling.refuse_new()
    await asyncio.gather(
        services.sampling.drain(DRAIN_S), services.openai_in_flight.drain(DRAIN_S), services.agents.drain(DRAIN_S)
    )


async def write_last(process: ApiProcess) -> None:
    """Write what is only in memory. The background work must have ended before."""
    base, services = process.base, process.services
    for name, write in (
        ("the usage since the last second", base.counter.flush),
        ("when keys were used", base.keys.note_uses),
        ("what was sampled from", services.samplers.write_uses),
        ("when agent sessions were used", services.agent_sessions.write_uses),
        ("that this process has ended", process.ownership.leave),
    ):
        try:
            await write()
        except DatabaseError as error:
            logger.error("%s could not be written: %s", name, reason(error))


async def close(process: ApiProcess) -> None:
    """Close what is open, also where `begin` has failed. Samples that still run are left for the next start."""
    base, services = process.base, process.services
    services.sampling.refuse_new()
    await services.sampling.drain(0)
    await base.notifier.close()
    for model in services.served:
        if model.lane.client is not None:
            await model.lane.client.close()
    await services.picture_checks.close()
    for writer in {base.recorder, base.writer}:
        await writer.close()
    base.database.close()
    if services.spans is not None:
        await asyncio.to_thread(services.spans.close)


async def _drain(server: Server, services: Services) -> None:
    """Refuse new samples, give samples in flight time while clients can still poll, then end the server."""
    await drain(services)
    services.futures.release_waiters()
    server.should_exit = True


async def serve(runtime: Runtime) -> None:
    async with open_services(runtime) as services:
        app = create_app(services)
        app.prepare()
        server = Server(app, http=protocol_with(app))
        tune_garbage_collection()
        draining: list[asyncio.Task[None]] = []

        def drain_once() -> None:
            if not draining:
                draining.append(asyncio.create_task(_drain(server, services)))

        for stop_signal in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(stop_signal, drain_once)
        await server.serve([socket.socket(fileno=number) for number in runtime.listening])
        await asyncio.gather(*draining)


def main() -> None:
    runtime = Runtime.from_environment()
    set_up_process(runtime.config.log_level, runtime.config.log_format, f"api-{runtime.slot}")
    run_process("the API", lambda: uvloop.run(serve(runtime)), outage)


if __name__ == "__main__":
    main()
