"""The model on disk: its weights as Hugging Face's from_pretrained and vLLM read them, and the optimizer's state next
to them.

Writes only safetensors and JSON, which hold no code. The caller makes the directory and moves it to its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl.training.backends.base import InvalidRequest
from skyrl.training.backends.torch_full.model import FullModel
from skyrl.training.backends.torch_full.model_files import bytes_of
from skyrl.training.backends.torch_full.optimizer import CHUNK
from skyrl.training.backends.torch_full.parameters import FullParameters
from skyrl.training.backends.torch_full.tensor_files import Shapes, TensorFiles
from skyrl.training.backends.torch_lora.state import OPTIMIZER_PARTS, STATE_JSON

FORMAT = 1
KIND = "full"
SHARD_BYTES = 4 * 2**30


def save_model(
    model: FullModel, parameters: FullParameters, directory: Path, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the weights, rounded to the nearest `dtype`, and what belongs to them (`ModelFiles`)."""
    with model.files.written(directory, dtype, shard_bytes) as write:
        for name, tensor in parameters.weights.items():
            write(name, 0, bytes_of(tensor.to(dtype)))


def are_finite(parameters: FullParameters) -> bool:
    """Whether no weight is NaN or infinite. A sum shows it with one pass and no memory; one that overflows is looked at
    again."""
    return all(
        bool(torch.isfinite(chunk.sum())) or all(bool(torch.isfinite(one)) for one in chunk.aminmax())
        for chunk, _ in parameters.chunks(CHUNK)
    )


def save_state(model: FullModel, parameters: FullParameters, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model in float32, and the moments and the pending gradient if there are any: float32 tensors named
    `<part>.<parameter>`, in files of at most `shard_bytes` or one tensor."""
    save_model(model, parameters, directory, torch.float32, shard_bytes)
    parts = [part for part in OPTIMIZER_PARTS if getattr(parameters, part) is not None]
    files = optimizer_files(parameters.shapes, parts, shard_bytes)
    with TensorFiles(directory, files) as written:
        for part in parts:
            for name, view in parameters.views(getattr(parameters, part)).items():
                written.write(f"{part}.{name}", 0, view.cpu().numpy())
    describe_state(directory, parameters.step, parts, list(files))


def optimizer_files(shapes: Shapes, parts: Sequence[str], shard_bytes: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """The files of moments and gradient, with the shapes of their tensors."""
    files: list[dict[str, tuple[int, ...]]] = []
    size = shard_bytes
    for part in parts:
        for name, shape in shapes.items():
            nbytes = 4 * math.prod(shape)
            if size + nbytes > shard_bytes:
                files.append({})
                size = 0
            files[-1][f"{part}.{name}"] = shape
            size += nbytes
    return {f"optimizer-{number:05}.safetensors": tensors for number, tensors in enumerate(files, 1)}


def describe_state(directory: Path, step: int, parts: Sequence[str], files: Sequence[str]) -> None:
    description = {"format": FORMAT, "kind": KIND, "step": step, "parts": parts, "optimizer_files": files}
    (directory / STATE_JSON).write_text(json.dumps(description, indent=1) + "\n")


@dataclass(frozen=True)
class StateDescription:
    """What a checkpoint says of itself. `parts`: moments and gradient; `files`: where they are."""

    step: int
    parts: tuple[str, ...]
    files: tuple[Path, ...]


def read_description(directory: Path) -> StateDescription:
    """Raises InvalidRequest for the checkpoint of an adapter; OSError or ValueError when it is missing or damaged."""
    found: dict[str, Any] = json.loads((directory / STATE_JSON).read_text())
    if found.get("kind") != KIND:
        raise InvalidRequest("path: the checkpoint holds a LoRA adapter, and this model is fine-tuned as a whole")
    if found["format"] != FORMAT:
        raise ValueError(f"{directory / STATE_JSON}: format {found['format']}, this version reads {FORMAT}")
    files = tuple(directory / Path(name).name for name in found["optimizer_files"])
    return StateDescription(int(found["step"]), tuple(found["parts"]), files)


def load_state(model: FullModel, parameters: FullParameters, directory: Path, *, optimizer: bool) -> None:
    """Replace the weights. With `optimizer`, also replace the moments, step count and pending gradient; without it,
    drop them.

    Raises InvalidRequest for the checkpoint of an adapter; OSError, ValueError or SafetensorError when files are
    missing or damaged. Nothing changes on an error.
    """
    description = read_description(directory)
    weights = {name: torch.empty(shape) for name, shape in parameters.shapes.items()}
    with model.files.opened(directory) as read:
        for name, tensor in weights.items():
            read(name, 0, tensor.view(-1).numpy())
    loaded: dict[str, Tensor] = {}
    if optimizer:
        stored: dict[str, Tensor] = {}
        for file in description.files:
            stored |= load_file(file)
        for part in description.parts:
            named = {name.removeprefix(f"{part}."): one for name, one in stored.items() if name.startswith(f"{part}.")}
            loaded[part] = parameters.pack(named)
    step = description.step if optimizer else 0
    parameters.load(weights, loaded, parameters.room_for(loaded), step)
    model.weights_changed(parameters)
