"""The command `skyrl capacity`: its options, its exit codes, and how its answer is printed.

Exit code: 0 with an answer; 1 if the server does not start, or too little was measured; 2 for a configuration that
cannot be measured.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from skyrl.cli.db import refusal


def capacity(
    base_model: Annotated[
        str | None, typer.Option(help="Directory or hub name of the base model. Default: tiny, the built-in model.")
    ] = None,
    backend_config: Annotated[str | None, typer.Option(help="JSON, as for `skyrl serve`.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads, as for `skyrl serve`.")] = None,
    config: Annotated[Path | None, typer.Option(help="The server's TOML file; flags and SKYRL_* override it.")] = None,
    minutes: Annotated[float, typer.Option(min=1, max=120, help="How long it takes at most.")] = 5.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Sampled tokens of a sample.")] = 32,
    samples: Annotated[int, typer.Option(min=1, max=256, help="Samples that a tenant has in flight.")] = 16,
    trained_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a training pass.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Measure how many tenants a base model can have on this machine, how fast they are, and what binds first."""
    from skyrl.base.config.loading import load_config
    from skyrl.base.config.server import ConfigError
    from skyrl.cli.capacity.answer import Load
    from skyrl.cli.capacity.client import Failed
    from skyrl.cli.capacity.run import measured
    from skyrl.cli.demo.server import ServerFailed

    flags = {"base_model": base_model, "backend_config": backend_config, "threads": threads}
    load = Load(prompt_tokens, max_tokens, samples, trained_tokens)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        answer = measured(load_config(flags, config), load, minutes, _say)
    except ConfigError as error:
        raise refusal("capacity", str(error)) from error
    except (ServerFailed, Failed, OSError) as error:
        typer.echo(f"skyrl capacity: {error}", err=True)
        raise typer.Exit(1) from error
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        typer.echo(json.dumps(answer.as_json(), indent=2))
    else:
        from rich.console import Console

        from skyrl.cli.capacity.view import view

        Console().print(view(answer))
    if answer.tenants is None:
        raise typer.Exit(1)


def _end(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the command by way of everything that it has started."""
    raise SystemExit(128 + number)


def _say(what: str) -> None:
    typer.echo(f"capacity: {what}", err=True)
