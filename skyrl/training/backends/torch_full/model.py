"""The module that is trained: loads it, binds its parameters to buffers, and computes on packed rows.

Knows transformers. Knows nothing of passes, losses or the optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from skyrl.base.config.server import ConfigError
from skyrl.training.backends.torch_full.gradients import GradientSink
from skyrl.training.backends.torch_full.parameters import FullParameters
from skyrl.training.backends.torch_lora import recurrence
from skyrl.training.backends.torch_lora.device import base_dtype
from skyrl.training.backends.torch_lora.experts import mixture_of
from skyrl.training.backends.torch_lora.loading import load_model
from skyrl.training.backends.torch_lora.lora import ActiveSegments
from skyrl.training.backends.torch_lora.model import BaseModel, check_config
from skyrl.training.backends.torch_lora.output_layer import OutputLayer
from skyrl.training.backends.torch_lora.packed_model import PackedModel
from skyrl.training.backends.torch_lora.recomputation import Setting
from skyrl.training.backends.torch_lora.routing import CORRECTION, Routing, routers_of
from skyrl.training.backends.torch_lora.text_part import SEEING


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
    """Raises ConfigError for a mixture of experts of an unknown kind, for a decoder without `layers`, and for a model
    that sees."""
    if model.config.model_type in SEEING:
        raise ConfigError(
            f"base_model: {path} ({model.config.model_type}) also sees pictures: full fine-tuning trains models of "
            "text alone; adapters train its text part"
        )
    try:
        return PlainModel(model)
    except ValueError as error:
        raise ConfigError(f"base_model: {path} ({type(model).__name__}): {error}") from error


def check_all_trained(path: str, model: Any) -> None:
    """Raise ConfigError for a model whose files hold more than its parameters, and its routers' corrections: these get
    no gradient, and training keeps them as they are."""
    others = [name for name in kept_weights(model) if name.rpartition(".")[2] != CORRECTION]
    if others:
        raise ConfigError(
            f"base_model: {path} has weights that are no parameters, such as {others[0]}: full fine-tuning neither "
            "trains nor saves them"
        )


def kept_weights(model: Any) -> dict[str, Tensor]:
    """What files of the model hold beside its parameters, by name."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in sorted(model.state_dict().items()) if name not in parameters}


class FullModel:
    """A causal language model, all of whose parameters are trained: float32 on a CPU; on CUDA bfloat16, with float32
    weights beside it. `base` computes and describes it.

    Raises ConfigError: the path has no causal language model, or the model has position embeddings that depend on the
    batch, buffers that belong to the weights, or other logits on packed rows than in transformers.
    """

    def __init__(self, path: str, device: torch.device, *, gradient_checkpointing: Setting) -> None:
        self.dtype = base_dtype(device)
        model = load_model(path, self.dtype, safetensors_only=True)
        check_config(path, model.config)
        check_all_trained(path, model)
        # The base model's own file is saved. Saving what transformers makes of it fails for values that it warns of.
        model.generation_config = GenerationConfig()
        self._model = model.to(device).eval()
        packed = plain(path, self._model)
        self.base = BaseModel(path, device, packed, model.config)
        self.base.check_stock()
        with torch.no_grad():
            expected = packed.stock_logits(self.base.probe_rows())
        packed.use_own_kernels()
        self.base.verify(expected)
        packed.recompute(gradient_checkpointing)
        self.gradients = GradientSink(self._model.named_parameters())

    def read_base(self) -> dict[str, Tensor]:
        """The weights of the base model, by the names of the module's parameters, float32.

        Raises ConfigError when files are missing or damaged."""
        loaded = load_model(self.base.path, torch.float32, model_class=type(self._model), safetensors_only=True)
        return {name: parameter.detach() for name, parameter in loaded.named_parameters()}

    def read(self, directory: str | Path) -> dict[str, Tensor]:
        """The weights of a checkpoint of this architecture, by the names of the module's parameters, float32.

        Reads safetensors alone, and the configuration is the base model's. Raises OSError, ValueError or
        SafetensorError when files are missing or damaged."""
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            config=copy.deepcopy(self._model.config),
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            use_safetensors=True,
        )
        stored, info = loaded
        if wrong := sorted(map(str, [*info["missing_keys"], *info["error_msgs"]])):
            raise ValueError(f"{directory} does not hold the weights of this model: {', '.join(wrong[:4])}")
        return {name: parameter.detach() for name, parameter in stored.named_parameters()}

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

    def save(self, weights: Mapping[str, Tensor], directory: Path, dtype: torch.dtype, shard_bytes: int) -> None:
        """Write the weights and config.json as from_pretrained of Hugging Face and vLLM read them: rounded to the
        nearest `dtype`, in files of at most `shard_bytes` or one tensor."""
        state = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in weights.items()}
        state |= {name: tensor.cpu().clone() for name, tensor in kept_weights(self._model).items()}
        self._model.save_pretrained(directory, state_dict=state, max_shard_size=shard_bytes)
