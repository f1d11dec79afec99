"""How every HTTP server of skyrl listens: uvicorn with bounded connections, without a log of requests, to a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import uvicorn

from skyrl.http.server import BoundedHttp
from skyrl.runtime.processes.garbage import collect_by_the_clock
from skyrl.runtime.processes.ports import BACKLOG


class Server(uvicorn.Server):
    """Serves one ASGI application until `should_exit` is set, without uvicorn's signal handlers, which would end the
    process before the caller has closed what it opened. `drain_s`: how long requests may go on after that.
    Without `date_header`, an answer has only the headers that the application gives. `http` is the class of the
    connections."""

    def __init__(self, app: Any, *, date_header: bool = True, drain_s: float = 3, http: Any = BoundedHttp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=http,
                log_level="error",  # uvicorn would warn of every request that is not HTTP
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=round(drain_s),
                server_header=False,
                date_header=date_header,
                lifespan="off",
                ws="none",
            )
        )

    async def serve_until_signal(
        self, sockets: list[socket.socket], drain: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Serve until SIGTERM or SIGINT. At the first one `drain` runs, while clients are still answered."""
        ending: list[asyncio.Task[None]] = []

        async def end() -> None:
            try:
                if drain is not None:
                    await drain()
            finally:
                self.should_exit = True

        def on_signal() -> None:
            if not ending:
                ending.append(asyncio.create_task(end()))

        for name in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(name, on_signal)
        collect_by_the_clock()
        await self.serve(sockets)
        await asyncio.gather(*ending)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
