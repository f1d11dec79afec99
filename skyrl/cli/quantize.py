"""`skyrl quantize`: a model in 4 or 8 bits, as a release that trainer and vLLM both load.

The work is a process of its own: commands import no trainer.
"""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Bits(StrEnum):
    FOUR = "4"
    EIGHT = "8"


class GroupSize(StrEnum):
    """Those that vLLM has kernels for."""

    SMALL = "32"
    MEDIUM = "64"
    LARGE = "128"


def quantize(
    model: Annotated[
        str, typer.Argument(help="Directory or hub name of a model that is not quantized; tiny is built in.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory for the release: new or empty.")],
    bits: Annotated[
        Bits, typer.Option(help="vLLM needs a GPU to serve 8 bits, and mixtures of experts in any bits.")
    ] = Bits.FOUR,
    group_size: Annotated[
        GroupSize, typer.Option(help="Columns of a row that share a factor. Smaller is nearer to the model.")
    ] = GroupSize.LARGE,
) -> None:
    """Round a model's large matrices to the nearest integers, and write them with the rest of the model."""
    from skyrl.base.config.keys import TINY
    from skyrl.base.config.server import ConfigError
    from skyrl.base.tiny import model_path
    from skyrl.cli.launcher.model_location import check_model

    path = str(model_path()) if model == TINY else model
    try:
        check_model(path)
    except ConfigError as error:
        typer.echo(f"skyrl quantize: {error}", err=True)
        raise typer.Exit(2) from error
    command = [
        sys.executable,
        "-m",
        "skyrl.trainer.tools.quantize",
        path,
        str(out),
        bits.value,
        group_size.value,
    ]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
