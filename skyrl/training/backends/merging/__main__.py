"""The process of `skyrl adapter`: `merge MODEL ADAPTER OUT [DTYPE]` or `without-lm-head ADAPTER OUT`. Ends with 2 and
one sentence when it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from skyrl.base.config.server import ConfigError
from skyrl.training.backends.merging.merged import merge
from skyrl.training.backends.merging.without_head import leave_head_out


def main(command: str, *arguments: str) -> None:
    logging.disable_progress_bar()  # of a load of the model without its weights
    try:
        sys.stdout.write(_merge(*arguments) if command == "merge" else _leave_head_out(*arguments))
    except (ConfigError, OSError, SafetensorError) as error:
        sys.stderr.write(f"skyrl adapter {command}: {str(error).removeprefix('base_model: ')}\n")
        raise SystemExit(2) from error


def _merge(model: str, adapter: str, out: str, dtype: str | None = None) -> str:
    merged = merge(model, Path(adapter), Path(out), None if dtype is None else getattr(torch, dtype))
    said = f"{out}: {model} with the updates of {merged.layers} layers\n"
    if merged.untied:
        said += (
            f"{model} ties {merged.untied} to the embeddings. They stay as they were; {merged.untied}, which the "
            "adapter changes, is a tensor of its own now. So tie_word_embeddings is false in config.json, and the "
            f"files are {merged.more_bytes / 1e6:,.1f} MB larger.\n"
        )
    return said


def _leave_head_out(adapter: str, out: str) -> str:
    left = leave_head_out(Path(adapter), Path(out))
    return (
        f"{out}: the adapter on {left.layers} layers, as it was. Left out: its update of lm_head, of rank {left.rank} "
        f"and norm {left.norm:.3g}. The model answers otherwise than in training. To lose nothing, merge the whole "
        "adapter (skyrl adapter merge), or train with train_unembed=False.\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
