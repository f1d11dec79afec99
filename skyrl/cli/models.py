"""`skyrl model`, `skyrl adapter` and `skyrl quantize`: write directories of models and adapters.

`model` makes models from other formats. `adapter` takes an adapter to programs without skyrl. `quantize`
writes a model in 4 or 8 bits, as a release that trainer and vLLM both load. The work is a process of its own: commands
import no trainer.
"""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from skyrl.cli.db import refusal
from skyrl.cli.downloads import adapter_directory

LOCAL = "http://127.0.0.1:8000"
model_app = typer.Typer(help="Make directories of models.", no_args_is_help=True)


class Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


@model_app.callback()
def model() -> None:
    """Make directories of models."""


@model_app.command("from-gguf")
def from_gguf(
    file: Annotated[Path, typer.Argument(help="A GGUF of a Llama, Qwen2, Qwen3 or Gemma 3 (text).", dir_okay=False)],
    out: Annotated[Path, typer.Argument(help="Directory for the model: new or empty.", file_okay=False)],
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of the weights. Default: the file's; bfloat16 for a quantized one.", show_default=False),
    ] = None,
) -> None:
    """Write a GGUF file as a directory that `skyrl serve --base-model` takes: weights, tokenizer, chat template."""
    _run("from_gguf", str(file), str(out), dtype or "")


adapter_app = typer.Typer(
    help="Merge an adapter or checkpoint into its base model, or leave its lm_head out.", no_args_is_help=True
)

Adapter = Annotated[
    str,
    typer.Argument(
        help="Directory with adapter_config.json and adapter_model.safetensors, or a checkpoint's tinker:// path: then "
        "the server sends the files, and the key comes from TINKER_API_KEY."
    ),
]
Url = Annotated[
    str, typer.Option(envvar="TINKER_BASE_URL", help="The base URL of the server that has a tinker:// path.")
]
Out = Annotated[Path, typer.Argument(help="Directory for the result: new or empty.")]


@adapter_app.command()
def merge(
    model: Annotated[str, typer.Argument(help="Directory or hub name of the adapter's base model; tiny is built in.")],
    adapter: Adapter,
    out: Out,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of the weights. Default: the base model's, in which small updates are rounded away."),
    ] = None,
    url: Url = LOCAL,
) -> None:
    """Write the base model with the adapter's updates, as a model that transformers and vLLM load alone.

    An output layer that the base model ties to its embeddings becomes a tensor of its own."""
    path = _path_of("adapter merge", model)
    with adapter_directory("adapter merge", adapter, url) as directory:
        _run("merge_adapter", "merge", path, str(directory), str(out), *([] if dtype is None else [dtype.value]))


@adapter_app.command()
def without_lm_head(adapter: Adapter, out: Out, url: Url = LOCAL) -> None:
    """Write the adapter without its update of lm_head, and say what is left out.

    For programs that take no adapter on lm_head, such as vLLM without skyrl's plugin with Qwen2.5."""
    with adapter_directory("adapter without-lm-head", adapter, url) as directory:
        _run("merge_adapter", "without-lm-head", str(directory), str(out))


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
    _run("quantize", _path_of("quantize", model), str(out), bits.value, group_size.value)


def _path_of(command: str, model: str) -> str:
    """The directory or hub name of the model that `command` reads. A wrong one ends the command with a line."""
    from skyrl.base.config.keys import TINY
    from skyrl.base.config.server import ConfigError
    from skyrl.base.tiny import model_path
    from skyrl.cli.launcher.model_location import check_model

    path = str(model_path()) if model == TINY else model
    try:
        check_model(path)
    except ConfigError as error:
        raise refusal(command, str(error)) from error
    return path


def _run(tool: str, *arguments: str) -> None:
    """Run a module of `skyrl.trainer.tools` as a process; its exit status is the command's."""
    command = [sys.executable, "-m", f"skyrl.trainer.tools.{tool}", *arguments]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
