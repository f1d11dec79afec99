"""The model inside a vLLM worker: which tensors it has, and how new ones get into it. Knows nothing of transports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from skyrl.inference.vllm_plugin.weights.checkpoint import entries
from skyrl.inference.vllm_plugin.weights.forms import Form, forms_of, number_of, plain, plain_expert, ready
from skyrl.inference.vllm_plugin.weights.jobs import Stages, WeightsError
from skyrl.inference.vllm_plugin.weights.staging import Needed, is_finite, named
from skyrl.weights.tensors import digests

LORA_INFIX = "base_layer."
PREFIX = "lora_base_layer_prefix"
"""An attribute of vLLM's experts: what it expects in a checkpoint's names once they are wrapped for adapters."""
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
MOST_SHOWN = 1 << 20
"""Numbers in one answer; the engine stops while they are collected."""


class Broken(Exception):
    """The model has neither its old nor its new weights. Nobody may sample from it."""


class ServedModel:
    """`model` is vLLM's. `checkpoint` is the directory from which vLLM loaded it first."""

    def __init__(self, model: Any, checkpoint: str, hf_config: Any, quantization: object, tensor_parallel: int) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._hf_config = hf_config
        self._quantization = quantization
        self._tensor_parallel = tensor_parallel
        self._needed: Needed | None = None
        self._forms: list[Form] = []

    def needed(self) -> Needed:
        """Raises WeightsError (501) for a model whose weights cannot be replaced."""
        if self._needed is None:
            self._check_layout()
            try:
                found = entries(self._directory())
            except WeightsError as error:
                raise WeightsError(f"the model's own checkpoint cannot be read: {error}", 501) from error
            tied = bool(getattr(self._hf_config.get_text_config(), "tie_word_embeddings", False))
            optional = frozenset({HEAD} if tied else ())
            kept = {name: entry for name, entry in found.items() if name not in optional}
            self._needed = Needed(
                {name: entry.shape for name, entry in kept.items()},
                {name: entry.dtype.is_floating_point for name, entry in kept.items()},
                optional,
                min(
                    (torch.finfo(one.dtype).max for _, one in self._parameters() if one.is_floating_point()), default=0
                ),
            )
        return self._needed

    def _check_layout(self) -> None:
        if self._quantization is not None:
            raise WeightsError("the model is quantized; its weights cannot be replaced while it serves", 501)
        if packed := [name for name, tensor in self._parameters() if not tensor.numel()]:
            raise WeightsError(
                f"vLLM keeps {named(packed)} in a packed form that cannot be replaced: start vLLM with "
                "--worker-extension-cls skyrl.inference.vllm_plugin.weights.worker.WeightUpdates",
                501,
            )
        self._forms = forms_of(self._model)

    def _directory(self) -> Path:
        if Path(self._checkpoint).is_dir():
            return Path(self._checkpoint)
        from huggingface_hub import snapshot_download

        patterns = ["*.safetensors", "*.safetensors.index.json"]
        try:
            return Path(snapshot_download(self._checkpoint, allow_patterns=patterns, local_files_only=True))
        except (OSError, ValueError) as error:  # the hub's errors of a missing file and of a wrong name
            raise WeightsError(f"the files of {self._checkpoint} are not on this machine: {error}", 501) from error

    def apply(self, tensors: Mapping[str, torch.Tensor], *, full: bool) -> dict[str, float]:
        """Put checked tensors into the model. The engine must not run meanwhile. `full`: they are all that the model
        needs; then every element of the model is proved to be new. Returns the seconds of each stage. Raises Broken."""
        parameters = dict(self._parameters())
        took = Stages()
        try:
            with torch.no_grad():
                if full:
                    took.of("clear", _clear, parameters.values())
                took.of("load", self._load, tensors, keep=not full)
                old = took.of("prove", _not_finite, parameters)
        except Exception as error:  # of vLLM's many loaders: the model is broken, whatever it was
            raise Broken(f"{str(error) or type(error).__name__}") from error
        if old:
            raise Broken(f"the new tensors did not reach {named(old)}")
        return took.seconds

    def _load(self, tensors: Mapping[str, torch.Tensor], *, keep: bool) -> None:
        """With `keep`, the elements that `tensors` lacks stay. Layers that vLLM keeps in another form are loaded one
        after the other, so that only one of them takes memory in both forms."""
        if not self._forms:
            with without_adapters(self._model):
                self._model.load_weights(iter(tensors.items()))
            return
        by_number: dict[int | None, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            by_number.setdefault(number_of(name), {})[name] = tensor
        with without_adapters(self._model), ready(self._forms):
            for number, of_layer in by_number.items():
                with plain([form for form in self._forms if form.number == number], keep=keep):
                    self._model.load_weights(iter(of_layer.items()))

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the model has taken one of these tensors as its own, instead of copying it."""
        return any(self._taken(tensors))

    def copy_taken(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what the model has taken of these tensors: their memory may be the trainer's."""
        with torch.no_grad():
            for own in self._taken(tensors):
                own.data = own.data.clone()

    def _taken(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()}
        for _, own in chain(self._parameters(), self._buffers()):
            if own.numel() and own.untyped_storage().data_ptr() in given:
                yield own

    def reset(self) -> None:
        """Overwrite every parameter with random numbers."""
        with torch.no_grad():
            for _, parameter in self._parameters():
                if parameter.is_floating_point():
                    parameter.uniform_(-1, 1)

    def digests(self) -> dict[str, str]:
        """Of every parameter and buffer, by vLLM's names without the part that LoRA adds. vLLM joins some tensors of a
        checkpoint, so the names are not the checkpoint's. Raises WeightsError for packed layers."""
        if packed := [name for name, tensor in self._parameters() if not tensor.numel()]:
            raise WeightsError(f"vLLM keeps {named(packed)} in a packed form that cannot be read", 501)
        return digests([*self._parameters(), *self._buffers()])

    def has_embedding(self, tensor: torch.Tensor) -> bool:
        """Whether the model's input embedding has these values. vLLM's has more rows."""
        for name, parameter in self._parameters():
            if name.endswith(EMBEDDING) and parameter.shape[1:] == tensor.shape[1:]:
                rows = parameter.detach()[: tensor.shape[0]].cpu()
                return bool(torch.equal(rows, tensor.to(rows.dtype)))
        return False

    def read(self, name: str, most: int) -> list[Any]:
        """The first `most` rows of a tensor by its checkpoint name, as float32. Raises WeightsError."""
        if self._tensor_parallel > 1:
            raise WeightsError("a tensor is divided over several ranks, and cannot be read here", 501)
        needed = self.needed()
        if name in needed.optional:
            name = next((one for one in needed.shapes if one.endswith(EMBEDDING)), name)
        if name not in needed.shapes:
            raise WeightsError(f"name: the model has no {name}")
        rows = self._rows(name, needed.shapes)
        if not rows.ndim:
            rows = rows.reshape(1)
        if (size := min(most, len(rows)) * math.prod(rows.shape[1:])) > MOST_SHOWN:
            raise WeightsError(f"truncate_size: {size} numbers are more than the {MOST_SHOWN} that an answer may have")
        shown = rows[: max(0, most)].detach().to("cpu", torch.float32)
        return shown.tolist()

    def _rows(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> torch.Tensor:
        for form in self._forms:
            if form.number == number_of(name) and (found := form.read(name)) is not None:
                return found
        parameters = dict(self._parameters())
        if name in parameters:
            return parameters[name][: shapes[name][0]] if shapes[name] else parameters[name]
        for joined, parts in (getattr(self._model, "packed_modules_mapping", None) or {}).items():
            for part in parts:
                whole = name.replace(f".{part}.", f".{joined}.")
                if whole != name and whole in parameters:
                    before = parts[: parts.index(part)]
                    start = sum(shapes[name.replace(f".{part}.", f".{one}.")][0] for one in before)
                    return parameters[whole][start : start + shapes[name][0]]
        if (found := plain_expert(self._model, name)) is not None:
            return found
        raise WeightsError(f"name: {name} has another name inside vLLM", 501)

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name.replace(LORA_INFIX, ""), tensor) for name, tensor in self._model.named_parameters())

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name.replace(LORA_INFIX, ""), tensor) for name, tensor in self._model.named_buffers())


def _clear(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.fill_(torch.nan)


def _not_finite(parameters: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, parameter in parameters.items() if not is_finite(parameter)]


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Layers that vLLM has wrapped for adapters are in the model without their wrappers, as when it loaded its first
    weights: loaders look for tensors by names, and some skip a tensor of a wrapped layer and say nothing."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and "base_layer" in child._modules
    ]
    experts: list[Any] = [module for module in model.modules() if getattr(module, PREFIX, "")]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    prefixes = [getattr(module, PREFIX) for module in experts]
    try:
        for module in experts:
            setattr(module, PREFIX, "")
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)
        for module, prefix in zip(experts, prefixes, strict=True):
            setattr(module, PREFIX, prefix)
