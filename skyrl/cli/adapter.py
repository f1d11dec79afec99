"""`skyrl adapter`: takes a downloaded adapter to programs without skyrl.

The work is a process of its own: commands import no trainer.
"""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Merge a downloaded adapter into its base model, or leave its lm_head out.", no_args_is_help=True
)

Adapter = Annotated[Path, typer.Argument(help="Directory with adapter_config.json and adapter_model.safetensors.")]
Out = Annotated[Path, typer.Argument(help="Directory for the result: new or empty.")]


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@app.command()
def merge(
    model: Annotated[str, typer.Argument(help="Directory or hub name of the adapter's base model; tiny is built in.")],
    adapter: Adapter,
    out: Out,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of the weights. Default: the base model's, in which small updates are rounded away."),
    ] = None,
) -> None:
    """Write the base model with the adapter's updates, as a model that transformers and vLLM load alone.

    An output layer that the base model ties to its embeddings becomes a tensor of its own."""
    from skyrl.base.config.keys import TINY
    from skyrl.base.config.server import ConfigError
    from skyrl.base.tiny import model_path
    from skyrl.cli.launcher.model_location import check_model

    path = str(model_path()) if model == TINY else model
    try:
        check_model(path)
    except ConfigError as error:
        typer.echo(f"skyrl adapter merge: {error}", err=True)
        raise typer.Exit(2) from error
    _run("merge", path, str(adapter), str(out), *([] if dtype is None else [dtype.value]))


@app.command()
def without_lm_head(adapter: Adapter, out: Out) -> None:
    """Write the adapter without its update of lm_head, and say what is left out.

    For programs that take no adapter on lm_head, such as vLLM without skyrl's plugin with Qwen2.5."""
    _run("without-lm-head", str(adapter), str(out))


def _run(*arguments: str) -> None:
    command = [sys.executable, "-m", "skyrl.trainer.tools.merge_adapter", *arguments]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
