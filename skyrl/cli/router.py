"""`skyrl router`: the command line of the router."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from skyrl.cli import router_options as option
from skyrl.cli.many_values import ManyValues
from skyrl.runtime.processes.logs import LogFormat


class RouterCommand(ManyValues):
    flags = option.SEVERAL


def parse_object(text: str | None, flag: str) -> dict[str, object]:
    """A JSON object. Raises typer.BadParameter, which names the flag."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint=flag) from error
    if not isinstance(value, dict):
        raise typer.BadParameter("not a JSON object", param_hint=flag)
    return value


def router(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 30_000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    worker: Annotated[
        list[str] | None,
        typer.Option("--worker", "--worker-urls", help="URL of a worker; several may be given, and more may register."),
    ] = None,
    policy: option.Policy = None,
    middleware: option.Middleware = None,
    middleware_options: option.MiddlewareOptions = None,
    tokenizer: option.Tokenizer = None,
    max_connections: option.MaxConnections = None,
    max_waiting: option.MaxWaiting = None,
    max_body_bytes: option.MaxBodyBytes = None,
    health_check_interval_s: option.IntervalS = None,
    health_check_failure_threshold: option.FailureThreshold = None,
    hang_s: option.HangS = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Where the registered workers are kept, so that they survive a restart.")
    ] = None,
    base_model_name: Annotated[
        list[str] | None, typer.Option(help="A name in `model` that is no adapter; may be given several times.")
    ] = None,
    api_key: option.ApiKey = None,
    admin_api_key: option.AdminApiKey = None,
    admin_lock_s: option.AdminLockS = None,
    admin_update_s: option.AdminUpdateS = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[LogFormat, typer.Option(help="text, or json: one object a line.")] = "text",
) -> None:
    """Run a router in front of inference servers."""
    from skyrl.base.config.server import ConfigError
    from skyrl.router.main import RouterOptions, run_router
    from skyrl.router.middleware import PluginError
    from skyrl.router.proxy import Limits
    from skyrl.runtime.metrics.files import FILE_VARIABLE
    from skyrl.runtime.processes.runtime import set_up_process

    given: dict[str, Any] = {
        "policy": policy,
        "health_check_interval_s": health_check_interval_s,
        "health_check_failure_threshold": health_check_failure_threshold,
        "hang_s": hang_s,
        "admin_lock_s": admin_lock_s,
        "admin_update_s": admin_update_s,
    }
    limits = {"running": max_connections, "waiting": max_waiting, "body_bytes": max_body_bytes}
    metrics_file = os.environ.get(FILE_VARIABLE)
    set_up_process(log_level, log_format, "router")
    try:
        run_router(
            RouterOptions(
                host=host,
                port=port,
                workers=tuple(worker or ()),
                middleware=tuple(middleware or ()),
                middleware_options=parse_object(middleware_options, "--middleware-options"),
                tokenizer=tokenizer,
                limits=Limits(**{name: value for name, value in limits.items() if value is not None}),
                state_dir=state_dir,
                base_models=tuple(base_model_name or ()),
                key=api_key,
                admin_key=admin_api_key or None,
                metrics_directory=Path(metrics_file).parent if metrics_file else None,
                **{name: value for name, value in given.items() if value is not None},
            )
        )
    except (ConfigError, PluginError, ValueError) as error:
        typer.echo(f"skyrl router: {error}", err=True)
        raise typer.Exit(2) from error
