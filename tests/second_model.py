"""Another tiny base model with the tokenizer of the built-in one: the same architecture, other weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from skyrl.base.tiny import model_path

SEED = 7
NOISE = 0.1
"""Of a matrix's standard deviation. The model still does its tasks, and no probability is that of the built-in one."""


def make_second(directory: Path) -> Path:
    """Write the model into a new directory, in less than a second. Returns the directory."""
    shutil.copytree(model_path(), directory)
    draws = torch.Generator().manual_seed(SEED)
    weights = load_file(directory / "model.safetensors")
    changed = {
        name: (weight + NOISE * weight.float().std() * torch.randn(weight.shape, generator=draws)).to(weight.dtype)
        if weight.ndim == 2
        else weight
        for name, weight in weights.items()
    }
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
