"""The module that is trained, and its files: its weights as Hugging Face's from_pretrained and vLLM read them, and the
optimizer's state next to them.

Binds the module's parameters to buffers, and computes on packed rows. Writes only safetensors and JSON, which hold no
code. The caller makes the directory and moves it to its place. Knows transformers. Knows nothing of passes or losses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl.base.config.server import ConfigError
from skyrl.trainer.adamw import CHUNK
from skyrl.trainer.experts.routing import CORRECTIONS
from skyrl.trainer.files.tensor_files import Shapes
from skyrl.trainer.full.parameters import FullParameters
from skyrl.trainer.kernels.dense import install, trained_linear
from skyrl.trainer.lora.files import STATE_JSON
from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.model.logprobs import OutputLayer
from skyrl.trainer.model.packed_model import PackedModel
from skyrl.trainer.protocol import InvalidRequest
from skyrl.trainer.reused import Reused


class PlainModel(PackedModel):
    """A causal language model over packed rows, with its own linear layers: no adapter changes them.

    Raises ValueError for a mixture of experts of an unknown kind (`routers_of`), and for decoder layers in another
    place than `layers`."""

    def _wrap(self, model: Any, *, mlp_of_mixtures: bool) -> None:
        if not hasattr(model.get_decoder(), "layers"):
            raise ValueError("its decoder has no list of `layers`; its architecture is not supported")
        install(model)

    @property
    def lm_head(self) -> OutputLayer:
        """The gradients of all uses, of several segments and chunks of their rows, are added in float32."""
        head = self.model.get_output_embeddings()
        weight, bias = Reused(head.weight), None if head.bias is None else Reused(head.bias)

        def linear(rows: Tensor, segment: LoraSegment) -> Tensor:
            return trained_linear(rows, weight.use(), None if bias is None else bias.use())

        return self._output_layer(linear, head)


_STAYING = (*(f".{name}" for name in CORRECTIONS), ".layer_scalar")
"""Buffers that stay as they are, because transformers trains none: corrections of routers' scores, and the factors of
Gemma 4's layers."""


def check_all_trained(path: str, model: Any) -> None:
    """Raise ConfigError for a model that has other weights than parameters and the buffers of `_STAYING`."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    others = [name for name in model.state_dict() if name not in parameters and not name.endswith(_STAYING)]
    if others:
        raise ConfigError(
            f"base_model: {path} has weights that are no parameters, such as {others[0]}: full fine-tuning does "
            "not train them"
        )


FORMAT = 1
KIND = "full"
SHARD_BYTES = 4 * 2**30


def are_finite(parameters: FullParameters) -> bool:
    """Whether no weight is NaN or infinite. A sum shows it with one pass and no memory; one that overflows is looked at
    again."""
    return all(
        bool(torch.isfinite(chunk.sum())) or all(bool(torch.isfinite(one)) for one in chunk.aminmax())
        for chunk, _ in parameters.chunks(CHUNK)
    )


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
