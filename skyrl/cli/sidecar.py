"""`skyrl sidecar`: the command line of the sidecar."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from skyrl.cli import router_options as option
from skyrl.runtime.processes.logs import LogFormat


def vllm_address(url: str) -> str:
    """The URL without a slash at its end. Raises typer.BadParameter if it is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise typer.BadParameter(f"{url!r} is not the URL of a server", param_hint="--vllm-url")
    return url.rstrip("/")


def sidecar(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")],
    vllm_url: Annotated[str, typer.Option(help="URL of the vLLM server.")],
    vllm_api_key: Annotated[str | None, typer.Option(envvar="SKYRL_VLLM_API_KEY", help="The key of that vLLM.")] = None,
    admin_api_key: option.AdminApiKey = None,
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
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[LogFormat, typer.Option(help="text, or json: one object a line.")] = "text",
) -> None:
    """Run SGLang's /generate and control routes in front of a vLLM server."""
    from skyrl.base.config.server import ConfigError
    from skyrl.inference.sidecar.main import run_sidecar
    from skyrl.inference.sidecar.settings import SidecarSettings
    from skyrl.runtime.metrics.files import FILE_VARIABLE
    from skyrl.runtime.processes.runtime import set_up_process

    named = os.environ.get(FILE_VARIABLE)
    metrics_file = Path(named) if named else None
    settings = SidecarSettings(
        vllm_url=vllm_address(vllm_url),
        vllm_api_key=vllm_api_key or None,
        admin_key=admin_api_key or None,
        number=int(metrics_file.stem.rpartition("-")[2]) if metrics_file else 0,
        metrics_directory=metrics_file.parent if metrics_file else None,
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
