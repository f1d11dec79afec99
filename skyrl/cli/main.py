"""The `skyrl` command: serve, rollout, router, sidecar, keys, quotas, status, usage, db, demo, doctor,
capacity, quantize, adapter, model, version.

`skyrl serve` also takes SkyRL's flags: a flag with an equivalent here is translated, another is refused with a reason.
`skyrl.base.config.skyrl_keys` lists these flags; `SkyrlFlags` reads the command line before typer does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from skyrl import __version__
from skyrl.base.config.skyrl_keys import FLAGS, checkpoint_store
from skyrl.cli import db, models, tenants
from skyrl.cli.capacity.main import capacity
from skyrl.cli.models import quantize
from skyrl.cli.rollout import RolloutCommand, rollout
from skyrl.cli.router import RouterCommand, router, sidecar
from skyrl.cli.status import status
from skyrl.cli.tenants import usage


class SkyrlFlags(TyperCommand):
    """A command that also accepts SkyRL's flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, own_flags(args))


def own_flags(args: list[str]) -> list[str]:
    """The command line with this server's flags in place of SkyRL's.

    Raises typer.BadParameter for a flag of SkyRL's without an equivalent.
    """
    own: list[str] = []
    rest = iter(args)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        entry = FLAGS.get(flag)
        if flag == "--checkpoints-base":
            base = value if equals else next(rest, None)
            own += ["--checkpoint-store"] if base is None else ["--checkpoint-store", checkpoint_store(base)]
        elif entry is None:
            own.append(argument)
        elif entry.becomes:
            own.append(f"{entry.becomes}{equals}{value}")
        elif not entry.takes:
            raise typer.BadParameter(entry.why, param_hint=flag)
    return own


app = typer.Typer(
    name="skyrl",
    help="A self-hosted Tinker API server: many tenants train LoRA adapters, and sampling never waits for training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(tenants.keys_app, name="keys")
app.add_typer(tenants.quotas_app, name="quotas")
app.add_typer(db.app, name="db")
app.add_typer(models.adapter_app, name="adapter")
app.add_typer(models.model_app, name="model")
app.command(cls=RouterCommand)(router)
app.command(cls=RolloutCommand)(rollout)
app.command()(sidecar)
app.command()(status)
app.command()(usage)
app.command()(quantize)
app.command()(capacity)


@app.command(cls=SkyrlFlags)
def serve(
    base_model: Annotated[
        str | None,
        typer.Option(help="Directory or hub name of the base model. Default: tiny, the built-in model."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name that clients use for the base model; may be given several times."),
    ] = None,
    base_models: Annotated[
        str | None, typer.Option(help="JSON: several base models in place of one, an entry with its keys for each.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="fsdp (default), or none: a sampling-only gateway.")] = None,
    backend_config: Annotated[
        str | None, typer.Option(help="JSON, e.g. '{\"trainer.placement.colocate_all\": false}'.")
    ] = None,
    database_url: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL. Default: SQLite in the state directory.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on. Default: 8000.")] = None,
    api_processes: Annotated[
        int | None, typer.Option(help="API processes on that port; more than 1 needs PostgreSQL. Default: 1.")
    ] = None,
    api_keys: Annotated[
        str | None,
        typer.Option(help="open (default): any key is accepted. managed: only keys of `skyrl keys create`."),
    ] = None,
    allow_remote: Annotated[
        bool | None,
        typer.Option("--allow-remote", help="Listen beyond this machine even if any key is accepted."),
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Run vLLM and trainer on a Ray cluster: local, auto or HOST:PORT. Default: none.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Database, checkpoints, logs. Default: ~/.local/share/skyrl.")
    ] = None,
    checkpoint_store: Annotated[
        str | None,
        typer.Option(
            help="Store of the checkpoints: file:///dir, s3://, gs:// or az://. Default: in the state directory."
        ),
    ] = None,
    external_inference_url: Annotated[
        str | None, typer.Option(help="Sample from this vLLM-compatible server instead of starting one.")
    ] = None,
    external_inference_api_key: Annotated[
        str | None, typer.Option(help="API key of that server; better set SKYRL_EXTERNAL_INFERENCE_API_KEY.")
    ] = None,
    forwarding_inference_max_connections: Annotated[
        str | None,
        typer.Option(metavar="INTEGER", help="Samples at the inference server at a time. Default: chosen."),
    ] = None,
    forwarding_deadline_s: Annotated[
        float | None, typer.Option(help="Seconds that one sample may take from its first try. Default: 600.")
    ] = None,
    session_timeout_s: Annotated[
        float | None,
        typer.Option(help="Close a session without a heartbeat after this many seconds. Default: 300."),
    ] = None,
    snapshot_interval_s: Annotated[
        float | None, typer.Option(help="Seconds between snapshots of a model in training. Default: 30.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="CPU threads each for trainer and vLLM. Default: the machine's cores, up to 16; 1 with Ray or a GPU."
        ),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error. Default: info.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text (default) or json: one object a line.")] = None,
    access_log: Annotated[
        bool | None, typer.Option("--access-log", help="Log each request, except long polls.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file; flags and SKYRL_* variables override it.")] = None,
) -> None:
    """Run the server: API, training engine and vLLM."""
    from skyrl.base.config.loading import load_config
    from skyrl.base.config.server import ConfigError

    flags: dict[str, Any] = {
        "base_model": base_model,
        "served_model_names": tuple(served_model_name) if served_model_name else None,
        "base_models": base_models,
        "backend": backend,
        "backend_config": backend_config,
        "database_url": database_url,
        "host": host,
        "port": port,
        "api_processes": api_processes,
        "api_keys": api_keys,
        "allow_remote": allow_remote,
        "ray_address": ray_address,
        "state_dir": state_dir,
        "checkpoint_store": checkpoint_store,
        "external_inference_url": external_inference_url,
        "external_inference_api_key": external_inference_api_key,
        "forwarding_inference_max_connections": forwarding_inference_max_connections,
        "forwarding_deadline_s": forwarding_deadline_s,
        "session_timeout_s": session_timeout_s,
        "snapshot_interval_s": snapshot_interval_s,
        "threads": threads,
        "log_level": log_level,
        "log_format": log_format,
        "access_log": access_log,
    }
    from skyrl.cli.launcher.main import serve as launch
    from skyrl.cli.launcher.main import with_threads
    from skyrl.cli.launcher.parts import ServerEnded
    from skyrl.runtime.processes.startup import StartupError
    from skyrl.storage.db.migrate import DatabaseAway, SchemaError

    try:
        launch(with_threads(load_config(flags, config)))
    except (ServerEnded, DatabaseAway) as error:
        typer.echo(f"skyrl serve: {error}", err=True)
        raise typer.Exit(1) from error
    except (ConfigError, SchemaError) as error:
        typer.echo(f"skyrl serve: {error}", err=True)
        raise typer.Exit(2) from error
    except StartupError as error:
        typer.echo(f"skyrl serve: {error}\n\nthe end of {error.log}:\n{error.log_end}", err=True)
        raise typer.Exit(2) from error


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the plot and the figures go.")] = Path("out/demo"),
    steps: Annotated[int, typer.Option(min=2, help="Training steps of each run; rewards are judged from 26 on.")] = 26,
    compare: Annotated[bool, typer.Option(help="Also measure colocate_all: true, all in the engine loop.")] = True,
) -> None:
    """Start a server, let two tenants train and sample at the same time, and measure the gain."""
    from skyrl.cli.demo.rl import Settings
    from skyrl.cli.demo.run import run_demo

    raise typer.Exit(run_demo(out, Settings(steps=steps), compare=compare))


@app.command()
def doctor(
    port: Annotated[int | None, typer.Option(help="The port that the server will listen on.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the server will keep its state.")] = None,
    config: Annotated[Path | None, typer.Option(help="The server's TOML file.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Directory or hub name of the base model that the server will have.")
    ] = None,
) -> None:
    """Report what is missing on this machine to run a server, and how to fix it."""
    from skyrl.cli.doctor import report

    raise typer.Exit(report(port, state_dir, config, base_model))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
