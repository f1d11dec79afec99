"""`skyrl rollout`: the command line of an inference plane for RL frameworks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from skyrl.cli import router as option
from skyrl.cli.router import ManyValues, parse_object
from skyrl.http.admin_key import ADMIN_KEY_VARIABLE, ROUTER_KEY_VARIABLE
from skyrl.runtime.processes.logs import LogFormat, LogLevel

NUM_ENGINES = "generator.inference_engine.num_engines"


class RolloutCommand(ManyValues):
    flags = option.SEVERAL | {"--engine-url"}


def rollout(
    base_model: Annotated[
        str | None,
        typer.Option("--base-model", "--model-path", help="Directory or hub name of the model. Default: tiny."),
    ] = None,
    num_engines: Annotated[int, typer.Option(min=0, help="How many vLLMs, each with a sidecar.")] = 1,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The router's port.")] = 30_000,
    host: Annotated[str, typer.Option(help="The router's address.")] = "127.0.0.1",
    state_dir: Annotated[
        Path | None, typer.Option(help="Logs and the list of workers. Default: ~/.local/share/skyrl/rollout.")
    ] = None,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(help="A server that runs elsewhere and speaks /generate, such as SGLang; several may be given."),
    ] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Name of the base model for /v1 routes.")] = None,
    backend_config: Annotated[str | None, typer.Option(help="JSON with options of vLLM, as for `skyrl serve`.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of each vLLM. Default: 1.")] = None,
    weight_updates: Annotated[
        bool,
        typer.Option(help="A trainer can replace all weights. Without it, large models on CPUs are twice as fast."),
    ] = True,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Run the vLLMs and sidecars on a Ray cluster: local, auto or HOST:PORT. Default: here."),
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
    api_key: option.ApiKey = None,
    admin_api_key: option.AdminApiKey = None,
    admin_lock_s: option.AdminLockS = None,
    admin_update_s: option.AdminUpdateS = None,
    log_level: Annotated[LogLevel, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[LogFormat, typer.Option(help="text, or json: one object a line.")] = "text",
) -> None:
    """Start vLLMs, a sidecar each, and a router in front of them, for RL frameworks."""
    from skyrl.base.config.keys import ray_cluster
    from skyrl.base.config.loading import PREFIX, load_config
    from skyrl.base.config.server import ConfigError
    from skyrl.cli.launcher.parts import ServerEnded
    from skyrl.cli.launcher.rollout_plane import PlaneOptions, run_plane
    from skyrl.runtime.processes.runtime import set_up_process
    from skyrl.runtime.processes.startup import StartupError

    if (name := f"{PREFIX}RAY_ADDRESS") in map(str.upper, os.environ):
        raise typer.BadParameter(f"the variable {name} is of skyrl serve: give the option", param_hint="--ray-address")
    if ray_address is not None:
        if not num_engines:
            raise typer.BadParameter("there are no engines to place", param_hint="--ray-address")
        try:
            ray_cluster(ray_address)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--ray-address") from error
    if not num_engines and not engine_url:
        raise typer.BadParameter("0 engines need at least one --engine-url", param_hint="--num-engines")
    from_options: dict[str, Any] = {
        "base_model": base_model,
        "served_model_names": tuple(served_model_name) if served_model_name else None,
        "backend_config": parse_object(backend_config, "--backend-config") | {NUM_ENGINES: max(1, num_engines)},
        "state_dir": state_dir or Path.home() / ".local/share/skyrl/rollout",
        "threads": threads,
        "port": port,
        "max_body_bytes": max(2**20, max_body_bytes or 64 * 2**20),  # of the sidecars; the router may take less
        "log_level": log_level,
        "log_format": log_format,
    }
    set_up_process(log_level, log_format)
    try:
        config = load_config(from_options)
        passed_on: dict[str, Any] = {
            "--policy": policy,
            "--middleware-options": middleware_options,
            "--tokenizer": tokenizer or local_directory(config.base_model_path),
            "--max-connections": max_connections,
            "--max-waiting": max_waiting,
            "--max-body-bytes": max_body_bytes,
            "--health-check-interval-s": 0.5 if health_check_interval_s is None else health_check_interval_s,
            "--health-check-failure-threshold": health_check_failure_threshold or 2,
            "--hang-s": hang_s,
            "--admin-lock-s": admin_lock_s,
            "--admin-update-s": admin_update_s,
            "--log-level": log_level,
            "--log-format": log_format,
        }
        arguments = [text for flag, value in passed_on.items() if value is not None for text in (flag, str(value))]
        arguments += [text for path in middleware or () for text in ("--middleware", path)]
        arguments += [text for name in config.served_names for text in ("--base-model-name", name)]
        if api_key is not None:
            os.environ[ROUTER_KEY_VARIABLE] = api_key  # not on the command line, which every user may read
        if admin_api_key is not None:
            os.environ[ADMIN_KEY_VARIABLE] = admin_api_key
        options = PlaneOptions(
            config, host, port, num_engines, tuple(arguments), tuple(engine_url or ()), ray_address, weight_updates
        )
        run_plane(options)
    except ServerEnded as error:
        typer.echo(f"skyrl rollout: {error}", err=True)
        raise typer.Exit(1) from error
    except ConfigError as error:
        typer.echo(f"skyrl rollout: {error}", err=True)
        raise typer.Exit(2) from error
    except StartupError as error:
        typer.echo(f"skyrl rollout: {error}\n\nthe end of {error.log}:\n{error.log_end}", err=True)
        raise typer.Exit(2) from error


def local_directory(path: str) -> Path | None:
    """The directory of a model that is on this machine."""
    directory = Path(path)
    return directory if directory.is_dir() else None
