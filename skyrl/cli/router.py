"""`skyrl router` and `skyrl sidecar`: their command lines, and the options that they share with `skyrl rollout`.

Options also have the names that other routers give them. `ManyValues` reads options that take several values after one
flag, as argparse's `nargs="+"` does: `--worker URL URL --port 1`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand

from skyrl.http.admin_key import ADMIN_KEY_VARIABLE, ROUTER_KEY_VARIABLE
from skyrl.runtime.processes.logs import LogFormat, LogLevel


class ManyValues(TyperCommand):
    """`flags` may be followed by several values; `--flag a b` becomes `--flag a --flag b`."""

    flags: ClassVar[frozenset[str]] = frozenset()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeated(args, self.flags))


def repeated(args: list[str], flags: frozenset[str]) -> list[str]:
    """The command line with such a flag before each of its values."""
    result: list[str] = []
    flag, values = None, 0
    for argument in args:
        if argument.startswith("-"):
            flag, values = argument if argument in flags else None, 0
            result.append(argument)
        else:
            if flag is not None and values:
                result.append(flag)
            result.append(argument)
            values += 1
    return result


POLICY_HELP = "least_in_flight, round_robin, consistent_hashing (default) or adapter_affinity."

Policy = Annotated[str | None, typer.Option("--policy", "--router-policy", "--sglang-router-policy", help=POLICY_HELP)]
Middleware = Annotated[
    list[str] | None,
    typer.Option(
        "--middleware",
        "--slime-router-middleware-paths",
        help="package.module.Class, file.py:Class, or radix; several are run in this order.",
    ),
]
MiddlewareOptions = Annotated[
    str | None, typer.Option(help="JSON for the middleware, e.g. '{\"radix_max_bytes\": 1000000000}'.")
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", "--hf-checkpoint", help="Directory with the model's tokenizer.json; the radix cache needs it."
    ),
]
MaxConnections = Annotated[
    int | None,
    typer.Option(
        "--max-connections",
        "--slime-router-max-connections",
        min=1,
        help="Requests at workers at once; more wait. Default: 4096.",
    ),
]
MaxWaiting = Annotated[
    int | None, typer.Option(min=0, help="Requests that may wait; more are answered with 503. Default: 16384.")
]
MaxBodyBytes = Annotated[int | None, typer.Option(min=1, help="The largest body of a request. Default: 67108864.")]
IntervalS = Annotated[
    float | None,
    typer.Option(
        "--health-check-interval-s",
        "--rollout-health-check-interval",
        "--health-check-interval-secs",
        min=0.05,
        help="Seconds between two health probes of a worker. Default: 5; for skyrl rollout 0.5.",
    ),
]
FailureThreshold = Annotated[
    int | None,
    typer.Option(
        "--health-check-failure-threshold",
        "--slime-router-health-check-failure-threshold",
        min=1,
        help="Failed probes in a row until a worker gets no requests. Default: 3; for skyrl rollout 2.",
    ),
]
HangS = Annotated[
    float | None,
    typer.Option(min=1, help="Seconds of failed probes after which a worker's requests are broken off. Default: 60."),
]

ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=ROUTER_KEY_VARIABLE,
        help=f"Key that every request must carry as Bearer; better set {ROUTER_KEY_VARIABLE}.",
    ),
]

AdminApiKey = Annotated[
    str | None,
    typer.Option(
        "--admin-api-key",
        envvar=ADMIN_KEY_VARIABLE,
        help=f"Key for pauses and new weights; better set {ADMIN_KEY_VARIABLE}. Without one: this machine alone.",
    ),
]
AdminLockS = Annotated[
    float | None, typer.Option(min=0, help="Seconds that a change of weights waits for another one. Default: 300.")
]
AdminUpdateS = Annotated[
    float | None, typer.Option(min=1, help="Seconds that a worker may take to change its weights. Default: 600.")
]

SEVERAL = frozenset(("--worker", "--worker-urls", "--middleware", "--slime-router-middleware-paths"))
"""Options that take several values after one flag."""


class RouterCommand(ManyValues):
    flags = SEVERAL


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
    policy: Policy = None,
    middleware: Middleware = None,
    middleware_options: MiddlewareOptions = None,
    tokenizer: Tokenizer = None,
    max_connections: MaxConnections = None,
    max_waiting: MaxWaiting = None,
    max_body_bytes: MaxBodyBytes = None,
    health_check_interval_s: IntervalS = None,
    health_check_failure_threshold: FailureThreshold = None,
    hang_s: HangS = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Where the registered workers are kept, so that they survive a restart.")
    ] = None,
    base_model_name: Annotated[
        list[str] | None, typer.Option(help="A name in `model` that is no adapter; may be given several times.")
    ] = None,
    api_key: ApiKey = None,
    admin_api_key: AdminApiKey = None,
    admin_lock_s: AdminLockS = None,
    admin_update_s: AdminUpdateS = None,
    log_level: Annotated[LogLevel, typer.Option(help="debug, info, warning or error.")] = "info",
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


def vllm_address(url: str) -> str:
    """The URL as the router writes those of its workers. Raises typer.BadParameter if it is none."""
    from skyrl.router.worker import normalise_url

    try:
        return normalise_url(url, "--vllm-url")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def sidecar(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")],
    vllm_url: Annotated[str, typer.Option(help="URL of the vLLM server.")],
    vllm_api_key: Annotated[str | None, typer.Option(envvar="SKYRL_VLLM_API_KEY", help="The key of that vLLM.")] = None,
    admin_api_key: AdminApiKey = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="Samples (prompts times n) at a time; more get 503.")
    ] = 8192,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a request's body; more get 413.")] = 64 * 2**20,
    drain_s: Annotated[
        float, typer.Option(min=0, help="How long samples may go on after SIGTERM before they are aborted.")
    ] = 10.0,
    update_timeout_s: Annotated[
        float, typer.Option(min=1, help="How long one update of the weights may take, or one bucket of it.")
    ] = 600.0,
    group_timeout_s: Annotated[
        float, typer.Option(min=1, help="How long a trainer may stay away: when a group forms, and in each broadcast.")
    ] = 120.0,
    log_level: Annotated[LogLevel, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[LogFormat, typer.Option(help="text, or json: one object a line.")] = "text",
) -> None:
    """Run SGLang's /generate and control routes in front of a vLLM server."""
    from skyrl.base.config.server import ConfigError
    from skyrl.inference.sidecar.main import run_sidecar
    from skyrl.inference.sidecar.settings import KNOWN_VARIABLE, SidecarSettings
    from skyrl.runtime.metrics.files import FILE_VARIABLE
    from skyrl.runtime.processes.runtime import set_up_process

    named, known = os.environ.get(FILE_VARIABLE), os.environ.get(KNOWN_VARIABLE)
    metrics_file = Path(named) if named else None
    settings = SidecarSettings(
        vllm_url=vllm_address(vllm_url),
        vllm_api_key=vllm_api_key or None,
        admin_key=admin_api_key or None,
        number=int(metrics_file.stem.rpartition("-")[2]) if metrics_file else 0,
        metrics_directory=metrics_file.parent if metrics_file else None,
        known_file=Path(known) if known else None,
        host=host,
        port=port,
        max_in_flight=max_in_flight,
        max_body_bytes=max_body_bytes,
        drain_s=drain_s,
        update_s=update_timeout_s,
        group_s=group_timeout_s,
    )
    set_up_process(log_level, log_format, "sidecar")
    try:
        run_sidecar(settings)
    except ConfigError as error:
        typer.echo(f"skyrl sidecar: {error}", err=True)
        raise typer.Exit(2) from error
