"""The router's process: makes its parts, serves until SIGTERM, and drains.

`RouterOptions` is what the command line gives; every other module of the router gets what it needs from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from skyrl.processes.listening import listen
from skyrl.router.app import RouterApp, ToWorkers
from skyrl.router.broadcast import Broadcasts
from skyrl.router.connections import Connections
from skyrl.router.context import RouterContext
from skyrl.router.control import ControlClient
from skyrl.router.hung import HungWorkers
from skyrl.router.plugins import Chain
from skyrl.router.policies import DEFAULT_POLICY, make_policy
from skyrl.router.pool import WorkerPool
from skyrl.router.probes import HealthProber
from skyrl.router.proxy import Limits, Proxy
from skyrl.router.registration import RegistrationRoutes
from skyrl.router.state_file import StateFile
from skyrl.web.server import Server, tune_garbage_collection

logger = logging.getLogger(__name__)

DRAIN_S = 10.0
"""How long requests in flight may go on after a signal to stop."""


@dataclass(frozen=True)
class RouterOptions:
    """`tokenizer` is a directory with tokenizer.json. `key` is what clients must send; it is also sent to workers when
    the router asks them by itself. `hang_s`: how long a worker may fail its probes before its requests are broken off.
    `names_workers`: answers name their workers, for clients that ask a worker without the router.
    """

    host: str = "127.0.0.1"
    port: int = 30_000
    workers: tuple[str, ...] = ()
    policy: str = DEFAULT_POLICY
    middleware: tuple[str, ...] = ()
    middleware_options: dict[str, object] = field(default_factory=dict)
    tokenizer: Path | None = None
    limits: Limits = Limits()
    health_check_interval_s: float = 5.0
    health_check_failure_threshold: int = 3
    hang_s: float = 60.0
    state_dir: Path | None = None
    base_models: tuple[str, ...] = ()
    key: str | None = None
    names_workers: bool = False


@contextlib.asynccontextmanager
async def open_router(options: RouterOptions) -> AsyncIterator[RouterApp]:
    """The application, with its background work running. Raises PluginError, ValueError (an option)."""
    counts: Counter[str] = Counter()
    pool = WorkerPool(make_policy(options.policy))
    connections = Connections()
    proxy = Proxy(pool, connections, options.limits, counts, options.base_models, names_workers=options.names_workers)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(connections.close)
        control = await stack.enter_async_context(ControlClient())
        broadcasts = Broadcasts(pool, control.fetch)
        context = RouterContext(
            tokenizer_dir=options.tokenizer,
            max_body_bytes=options.limits.body_bytes,
            options=options.middleware_options,
        )
        chain = Chain(options.middleware, ToWorkers(broadcasts, proxy), context)
        if options.state_dir is not None:
            await stack.enter_async_context(StateFile(options.state_dir / "workers.json", pool))
        for url in options.workers:
            pool.add(url)
        prober = HealthProber(
            pool, options.health_check_interval_s, options.health_check_failure_threshold, control.fetch
        )
        await stack.enter_async_context(prober)
        await stack.enter_async_context(HungWorkers(pool, proxy, options.hang_s))
        yield RouterApp(pool, RegistrationRoutes(pool), chain, proxy, counts, key=options.key)


async def _serve(options: RouterOptions) -> None:
    sockets = listen(options.host, options.port)
    async with open_router(options) as app:
        server = Server(app, date_header=False, drain_s=DRAIN_S)
        tune_garbage_collection()

        def stop() -> None:
            server.should_exit = True

        for name in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(name, stop)
        logger.info("router on %s:%d, policy %s", options.host, options.port, options.policy)
        await server.serve(sockets)
    logger.info("stopped")


def run_router(options: RouterOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError (the port), PluginError and ValueError (an option)."""
    sys.path.insert(0, os.getcwd())  # middleware may lie where the command is started, as with `python -m`
    uvloop.run(_serve(options))
