"""The process of the sidecar: listens, serves, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import uvloop

from skyrl.inference.sidecar.app import Sidecar, open_sidecar
from skyrl.inference.sidecar.settings import SidecarSettings
from skyrl.runtime.processes.ports import listen
from skyrl.runtime.web.server import Server, tune_garbage_collection


def run_sidecar(settings: SidecarSettings, around: Callable[[Any], Any] = lambda sidecar: sidecar) -> None:
    """Serve until SIGTERM or SIGINT. `around` makes an ASGI application around the sidecar. Raises ConfigError if the
    address cannot be listened on."""
    uvloop.run(serve(settings, around))


async def serve(settings: SidecarSettings, around: Callable[[Any], Any] = lambda sidecar: sidecar) -> None:
    sockets = listen(settings.host, settings.port)
    async with open_sidecar(settings) as sidecar:
        server = Server(around(sidecar), date_header=False)
        tune_garbage_collection()
        draining: list[asyncio.Task[None]] = []

        def drain_once() -> None:
            if not draining:
                draining.append(asyncio.create_task(_drain(server, sidecar)))

        for stop_signal in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(stop_signal, drain_once)
        await server.serve(sockets)
        await asyncio.gather(*draining)


async def _drain(server: Server, sidecar: Sidecar) -> None:
    await sidecar.drain()
    server.should_exit = True
