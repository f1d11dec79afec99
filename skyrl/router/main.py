"""The router's process: makes its parts, serves until SIGTERM, and drains.

`RouterOptions` is what the command line gives; every other module of the router gets what it needs from here. `main`
runs the router of `skyrl serve`, between the API processes and several vLLMs, with settings from the launcher's runtime
file. That router begins without workers: the engine registers a replica when the replica has loaded the adapters in
use. The list of workers is kept for the next start of the router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from prometheus_client import CollectorRegistry

from skyrl.http.admin_key import AdminKey
from skyrl.http.server import BoundedHttp
from skyrl.http.serving import Server
from skyrl.router.admin import AdminRoutes
from skyrl.router.app import RouterApp, ToWorkers, is_own
from skyrl.router.broadcast import Broadcasts
from skyrl.router.fast_path import FastPathRule, protocol_with
from skyrl.router.health import PROBE_TIMEOUT_S, HealthProber, HungWorkers
from skyrl.router.metrics import RouterMetrics
from skyrl.router.middleware import Chain, RouterContext
from skyrl.router.policies import DEFAULT_POLICY, make_policy
from skyrl.router.pool import WorkerPool
from skyrl.router.proxy import Limits, Proxy
from skyrl.router.registration import RegistrationRoutes
from skyrl.router.state_file import StateFile
from skyrl.router.worker import fetch
from skyrl.runtime.metrics.files import publishing
from skyrl.runtime.metrics.process import LoopLag
from skyrl.runtime.processes.ports import listen
from skyrl.runtime.processes.runtime import Runtime, run_process, set_up_process

logger = logging.getLogger(__name__)

DRAIN_S = 10.0
"""How long requests in flight may go on after a signal to stop."""


@dataclass(frozen=True)
class RouterOptions:
    """`tokenizer` is a directory with tokenizer.json. `key` is what clients must send; it is also sent to workers when
    the router asks them by itself. `admin_key` is what callers of admin routes must send. `hang_s`: how long a worker
    may fail its probes before its requests are broken off. `admin_lock_s`: how long a change of weights waits for
    another one. `admin_update_s`: how long a worker may take for a change. `names_workers`: answers name their workers,
    for clients that ask a worker without the router. `metrics_directory`: where the processes of a server publish their
    metrics, this one under the name `process` and with `metrics_labels`; None: the router has no other processes around
    it.
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
    health_check_timeout_s: float = PROBE_TIMEOUT_S
    hang_s: float = 60.0
    state_dir: Path | None = None
    base_models: tuple[str, ...] = ()
    key: str | None = None
    admin_key: str | None = None
    admin_lock_s: float = 300.0
    admin_update_s: float = 600.0
    names_workers: bool = False
    metrics_directory: Path | None = None
    process: str = "router"
    metrics_labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Router:
    """`app` for any ASGI server, `rule` for `RouterHttp`: None if no request may take the short way."""

    app: RouterApp
    rule: FastPathRule | None


@contextlib.asynccontextmanager
async def open_router(options: RouterOptions) -> AsyncIterator[Router]:
    """The router, with its background work running. Raises PluginError and ValueError (an option)."""
    counts: Counter[str] = Counter()
    pool = WorkerPool(make_policy(options.policy))
    proxy = Proxy(pool, options.limits, counts, options.base_models, names_workers=options.names_workers)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(proxy.client.close)
        context = RouterContext(
            tokenizer_dir=options.tokenizer,
            max_body_bytes=options.limits.body_bytes,
            options=options.middleware_options,
            workers=lambda: pool.workers,
            args=_slime_args(options),
        )
        chain = Chain(options.middleware, ToWorkers(Broadcasts(pool, fetch), proxy), context)
        prober = HealthProber(
            pool,
            options.health_check_interval_s,
            options.health_check_failure_threshold,
            fetch,
            options.health_check_timeout_s,
            headers=[] if options.key is None else [(b"authorization", f"Bearer {options.key}".encode())],
        )
        registry = CollectorRegistry()
        registry.register(RouterMetrics(pool, proxy, counts, chain))
        publication = publishing(
            registry, options.process, options.metrics_directory, labels=options.metrics_labels, answers=True
        )
        published = await stack.enter_async_context(publication)
        background = [prober.run, HungWorkers(pool, proxy, options.hang_s).run, LoopLag(registry).run]
        if options.state_dir is not None:
            state = StateFile(options.state_dir, pool)
            try:
                state.load()
            except OSError as error:
                raise ValueError(f"--state-dir: {error}") from error
            background.append(state.run)
        for url in options.workers:
            try:
                pool.expect(url)
            except ValueError as error:
                raise ValueError(f"--worker: {error}") from error
        await stack.enter_async_context(_running(background))
        app = RouterApp(
            pool,
            RegistrationRoutes(pool),
            AdminRoutes(pool, fetch, lock_s=options.admin_lock_s, update_s=options.admin_update_s),
            chain,
            proxy,
            counts,
            published,
            policy=options.policy,
            max_body_bytes=options.limits.body_bytes,
            admin_key=AdminKey(options.admin_key),
            key=None if options.key is None else AdminKey(options.key),
        )
        # Middleware sees every request, so then all requests take the long way
        yield Router(app, None if options.middleware else FastPathRule(proxy, is_own, app.key))


def _slime_args(options: RouterOptions) -> dict[str, object]:
    """The router's options under slime's names of them."""
    return {
        "sglang_router_ip": options.host,
        "sglang_router_port": options.port,
        "slime_router_middleware_paths": list(options.middleware),
        "slime_router_max_connections": options.limits.running,
        "slime_router_health_check_failure_threshold": options.health_check_failure_threshold,
        "rollout_health_check_interval": options.health_check_interval_s,
    }


@contextlib.asynccontextmanager
async def _running(background: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> AsyncIterator[None]:
    """Runs these beside the body of the `async with`. If one fails, the body is cancelled and its error is raised."""
    body = asyncio.current_task()
    assert body is not None
    tasks = [asyncio.create_task(work()) for work in background]

    def on_end(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            body.cancel()

    for task in tasks:
        task.add_done_callback(on_end)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


def connection_class(router: Router) -> type[asyncio.Protocol]:
    """The class of client connections for uvicorn."""
    return BoundedHttp if router.rule is None else protocol_with(router.rule)


async def _serve(options: RouterOptions) -> None:
    sockets = listen(options.host, options.port)
    async with open_router(options) as router:
        server = Server(router.app, date_header=False, drain_s=DRAIN_S, http=connection_class(router))
        logger.info("router on %s:%d, policy %s", options.host, options.port, options.policy)
        await server.serve_until_signal(sockets)
    logger.info("stopped")


def run_router(options: RouterOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError (the port), PluginError and ValueError (an option)."""
    sys.path.insert(0, os.getcwd())  # middleware may lie where the command is started, as with `python -m`
    uvloop.run(_serve(options))


HEALTH_CHECK_INTERVAL_S, HEALTH_CHECK_TIMEOUT_S, HEALTH_CHECK_FAILURES = 1.0, 2.0, 2
"""A replica that hangs gets no new samples after 5 s. The engine registers it again as soon as it answers."""


def options_of(runtime: Runtime) -> RouterOptions:
    """The options of the router at `runtime.inference_url`.

    The limits are those of the API processes, so that requests wait in vLLM, which runs the most urgent first."""
    assert runtime.inference_url is not None
    config, address = runtime.config, urlsplit(runtime.inference_url)
    assert address.hostname is not None
    assert address.port is not None
    return RouterOptions(
        host=address.hostname,
        port=address.port,
        policy="adapter_affinity",
        limits=Limits(running=config.max_pending_samples * config.api_processes, body_bytes=config.max_body_bytes),
        health_check_interval_s=HEALTH_CHECK_INTERVAL_S,
        health_check_failure_threshold=HEALTH_CHECK_FAILURES,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        hang_s=config.backend_config.inference.health_timeout_s,
        state_dir=runtime.directory / f"router-{config.role.number}" if config.role.name else runtime.directory,
        metrics_directory=runtime.metrics_directory,
        process=config.role.process("router"),
        metrics_labels=config.role.labels,
        base_models=config.served_names,
        key=runtime.inference_api_key,
        admin_key=runtime.inference_api_key,  # the server itself, and nobody else
        names_workers=True,
    )


def main() -> None:
    runtime = Runtime.from_environment()
    config = runtime.config
    set_up_process(config.log_level, config.log_format, config.role.process("router"))
    run_process("the router", lambda: run_router(options_of(runtime)), lambda _: None)


if __name__ == "__main__":
    main()
