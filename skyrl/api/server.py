"""The API process: opens the services, serves HTTP, forwards samples, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Generator

import uvicorn
import uvloop

from skyrl.api.app import create_app
from skyrl.api.background import begin, run
from skyrl.api.build import ApiProcess, Secrets, build
from skyrl.api.connections import BoundedHttp
from skyrl.api.services import Services
from skyrl.db.faults import DatabaseError, reason
from skyrl.launcher.runtime import Runtime, run_process, set_up_process
from skyrl.processes.listening import BACKLOG

logger = logging.getLogger(__name__)

DRAIN_S = 10.0
"""How long samples in flight may go on after a signal to stop."""
YOUNG_OBJECTS = 50_000
"""New objects between two garbage collections. A sample makes hardly any cycles; with Python's default of 700 the
collections take a tenth of its time."""


@contextlib.asynccontextmanager
async def open_services(runtime: Runtime) -> AsyncIterator[Services]:
    """The services, with the background work running. On exit, samples drain and queued writes are committed."""
    process = build(runtime, Secrets.open(runtime))
    await begin(process)
    background = asyncio.create_task(run(process))
    try:
        yield process.services
    finally:
        process.services.sampling.refuse_new()
        await process.services.sampling.drain(DRAIN_S)
        background.cancel()
        await asyncio.wait([background])
        await close(process)


async def close(process: ApiProcess) -> None:
    """Write what is only in memory, and close the database. The background work must have ended before."""
    base, services = process.base, process.services
    await base.notifier.close()
    if services.client is not None:
        await services.client.close()
    for name, write in (
        ("the usage since the last second", base.counter.flush),
        ("when keys were used", base.keys.note_uses),
        ("what was sampled from", services.samplers.write_uses),
        ("that this process has ended", process.ownership.leave),
    ):
        try:
            await write()
        except DatabaseError as error:
            logger.error("%s could not be written: %s", name, reason(error))
    await base.writer.close()
    base.database.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process before the services are closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def _drain(server: uvicorn.Server, services: Services) -> None:
    """Refuse new samples, give samples in flight time while clients can still poll, then end the server."""
    services.sampling.refuse_new()
    await services.sampling.drain(DRAIN_S)
    services.futures.release_waiters()
    server.should_exit = True


def _tune_garbage_collection() -> None:
    """Exclude modules and services, which live until the end, from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


async def serve(runtime: Runtime) -> None:
    async with open_services(runtime) as services:
        server = _Server(
            uvicorn.Config(
                create_app(services),
                http=BoundedHttp,
                log_level="error",  # uvicorn would warn of every request that is not HTTP
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

        for stop_signal in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(stop_signal, drain_once)
        await server.serve([socket.socket(fileno=number) for number in runtime.listening])
        await asyncio.gather(*draining)


def main() -> None:
    runtime = Runtime.from_environment()
    set_up_process(runtime.config)
    run_process("the API", lambda: uvloop.run(serve(runtime)))


if __name__ == "__main__":
    main()
