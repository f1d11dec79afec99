"""`skyrl model`: models as directories.

The work is a process of its own: commands import no trainer.
"""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make directories of models.", no_args_is_help=True)


class Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


@app.callback()
def model() -> None:
    """Make directories of models."""


@app.command("from-gguf")
def from_gguf(
    file: Annotated[Path, typer.Argument(help="A GGUF of a Llama, Qwen2, Qwen3 or Gemma 3 (text).", dir_okay=False)],
    out: Annotated[Path, typer.Argument(help="Directory for the model: new or empty.", file_okay=False)],
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of the weights. Default: the file's; bfloat16 for a quantized one.", show_default=False),
    ] = None,
) -> None:
    """Write a GGUF file as a directory that `skyrl serve --base-model` takes: weights, tokenizer, chat template."""
    command = [sys.executable, "-m", "skyrl.trainer.tools.from_gguf", str(file), str(out), dtype or ""]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
