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
from safetensors.torch import load_file
from torch import Tensor, nn

from skyrl.base.config.server import ConfigError
from skyrl.trainer.attention import recurrent
from skyrl.trainer.device import base_dtype
from skyrl.trainer.experts.routing import CORRECTION, Routing, mixture_of, routers_of
from skyrl.trainer.files.config import read_config
from skyrl.trainer.files.model_files import FileTensor, ModelFiles, bytes_of, file_tensors, stored_parameters
from skyrl.trainer.files.tensor_files import Shapes, StoredWeights, TensorFiles, weight_files
from skyrl.trainer.full.parameters import CHUNK, FullParameters, GradientSink
from skyrl.trainer.lora.files import OPTIMIZER_PARTS, STATE_JSON
from skyrl.trainer.lora.linear import ActiveSegments
from skyrl.trainer.model.base_model import BaseModel, check_config
from skyrl.trainer.model.loading import detach_vision, load_model
from skyrl.trainer.model.logprobs import OutputLayer
from skyrl.trainer.model.packed_model import PackedModel
from skyrl.trainer.model.recomputation import Setting
from skyrl.trainer.protocol import InvalidRequest
from skyrl.trainer.vision import make_tower


class PlainModel(PackedModel):
    """A causal language model over packed rows, with its own linear layers: no adapter changes them.

    Raises ValueError for a mixture of experts of an unknown kind (`routers_of`), and for decoder layers in another
    place than `layers`."""

    def __init__(self, model: Any) -> None:
        nn.Module.__init__(self)
        if not hasattr(model.get_decoder(), "layers"):
            raise ValueError("its decoder has no list of `layers`; its architecture is not supported")
        self.active = ActiveSegments()
        self.linears = {}
        self.experts = {}
        routers = routers_of(model)
        self.routing = Routing(routers)
        self.mixture = mixture_of(routers)
        self.model = model
        self.reach = recurrent.install(self.decoder_layers)

    @property
    def lm_head(self) -> OutputLayer:
        head = self.model.get_output_embeddings()
        return OutputLayer(lambda rows, segment: head(rows), head, self.transform)


def plain(path: str, model: Any) -> PlainModel:
    """Raises ConfigError for a mixture of experts of an unknown kind, and for a decoder without `layers`."""
    try:
        return PlainModel(model)
    except ValueError as error:
        raise ConfigError(f"base_model: {path} ({type(model).__name__}): {error}") from error


def check_all_trained(path: str, model: Any) -> None:
    """Raise ConfigError for a model that has other weights than parameters and its routers' corrections, which stay as
    they are."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    others = [name for name in model.state_dict() if name not in parameters and not name.endswith(f".{CORRECTION}")]
    if others:
        raise ConfigError(
            f"base_model: {path} has weights that are no parameters, such as {others[0]}: full fine-tuning does "
            "not train them"
        )


def _in_files(path: str, model: Any) -> dict[str, list[FileTensor]]:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    with StoredWeights(path, weight_files(path), read_config(path).format, torch.float32) as stored:
        try:
            found = stored_parameters(model, shapes, dict.fromkeys(stored.keys(), stored))
        except ValueError as error:
            raise ConfigError(f"base_model: {path}: {error}") from error
        return file_tensors(path, model, found)


class FullModel:
    """A causal language model, all of whose parameters are trained: float32 on a CPU; on CUDA bfloat16, with float32
    weights beside it. `base` computes and describes it. A vision tower is not trained: saved files have the base
    model's.

    Raises ConfigError: the path has no causal language model, or the model has position embeddings that depend on the
    batch, buffers that belong to the weights, or other logits on packed rows than in transformers.
    """

    def __init__(
        self, path: str, device: torch.device, *, gradient_checkpointing: Setting, pictures: bool = True
    ) -> None:
        """`pictures`: whether a model that sees keeps its vision tower."""
        self.dtype = base_dtype(device)
        model = load_model(path, self.dtype, safetensors_only=True)
        tower = make_tower(path, detach_vision(model), device, pictures=pictures)
        check_config(path, model.config)
        check_all_trained(path, model)
        self.files = ModelFiles(path, type(model).__name__, _in_files(path, model))
        self._model = model.to(device).eval()
        packed = plain(path, self._model)
        self.base = BaseModel(path, device, packed, model.config, tower)
        self.base.check_stock()
        expected = self.base.stock_logits()
        packed.use_own_kernels()
        self.base.verify(expected)
        packed.recompute(gradient_checkpointing)
        self.gradients = GradientSink(self._model.named_parameters())

    def read_base(self) -> dict[str, Tensor]:
        """The weights of the base model, by the names of the module's parameters, float32.

        Raises ConfigError when files are missing or damaged."""
        loaded = load_model(self.base.path, torch.float32, model_class=type(self._model), safetensors_only=True)
        detach_vision(loaded)
        return {name: parameter.detach() for name, parameter in loaded.named_parameters()}

    def parameters(self, device: torch.device) -> FullParameters:
        """The weights with which the module computes now, in the module's memory and dtype: for forward passes."""
        return FullParameters({name: each.detach() for name, each in self._model.named_parameters()}, device)

    def bind(self, parameters: FullParameters) -> None:
        """Compute with these weights from now on. In float32 the module shares their memory."""
        for name, parameter in self._model.named_parameters():
            if self.dtype == torch.float32:
                parameter.data = parameters.weights[name]
            else:
                parameter.data.copy_(parameters.weights[name])

    def weights_changed(self, parameters: FullParameters) -> None:
        """The bound weights have new numbers."""
        if self.dtype != torch.float32:
            self.bind(parameters)


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
