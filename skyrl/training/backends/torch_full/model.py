"""The module that is trained: loads it, binds its parameters to buffers, and computes on packed rows.

Knows transformers. Knows nothing of passes, losses or the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from skyrl.base.config.server import ConfigError
from skyrl.training.backends.torch_full.gradients import GradientSink
from skyrl.training.backends.torch_full.model_files import ModelFiles
from skyrl.training.backends.torch_full.parameters import FullParameters
from skyrl.training.backends.torch_lora import recurrence
from skyrl.training.backends.torch_lora.conversions import FileTensor, file_tensors, stored_parameters
from skyrl.training.backends.torch_lora.device import base_dtype
from skyrl.training.backends.torch_lora.experts import mixture_of
from skyrl.training.backends.torch_lora.loading import load_model
from skyrl.training.backends.torch_lora.lora import ActiveSegments
from skyrl.training.backends.torch_lora.model import BaseModel, check_config
from skyrl.training.backends.torch_lora.model_config import read_config
from skyrl.training.backends.torch_lora.output_layer import OutputLayer
from skyrl.training.backends.torch_lora.packed_model import PackedModel
from skyrl.training.backends.torch_lora.recomputation import Setting
from skyrl.training.backends.torch_lora.routing import CORRECTION, Routing, routers_of
from skyrl.training.backends.torch_lora.stored_weights import StoredWeights, weight_files
from skyrl.training.backends.torch_lora.text_part import detach_vision
from skyrl.training.backends.torch_lora.vision import make_tower


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
        self.reach = recurrence.install(self.decoder_layers)

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
