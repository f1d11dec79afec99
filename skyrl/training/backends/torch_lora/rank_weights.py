"""What a rank holds of the base model's parameters: its rows, its experts or its part of kept quantized weights, read
from the files.

Knows the names of parameters in transformers' models and in files. Knows nothing of when FSDP2 gathers what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyrl.base.config.server import ConfigError
from skyrl.training.backends.torch_lora.conversions import Rows, stored_parameters
from skyrl.training.backends.torch_lora.expert_shares import ExpertShare
from skyrl.training.backends.torch_lora.kept_weights import keep, kept_in, stored_leaves
from skyrl.training.backends.torch_lora.packed_model import PackedModel
from skyrl.training.backends.torch_lora.quantized_slices import StoredTensor, held_rows
from skyrl.training.backends.torch_lora.shards import rows_of
from skyrl.training.backends.torch_lora.stored_weights import StoredWeights


def stored_rows(packed: PackedModel, opened: StoredWeights) -> dict[str, Rows]:
    """What the files hold of each parameter and buffer, by `_stored_tensors`' names."""
    shapes = {name: _whole_shape(packed, name, tensor) for _, name, tensor in _stored_tensors(packed)}
    return stored_parameters(packed.model, shapes, dict.fromkeys(opened.keys(), opened))


def keep_quantized(path: str, packed: PackedModel, parameters: Mapping[str, Rows]) -> None:
    """Keep the weights of linear layers and experts, and others, that the files hold quantized. A tied one is computed
    while loading: several modules use it. So is one whose experts are not all quantized in the same way."""
    named = list(_stored_tensors(packed))
    uses = Counter(id(tensor) for _, _, tensor in named)
    for place, name, tensor in named:
        form = parameters[name].form if name in parameters else None
        if form is None or uses[id(tensor)] > 1:
            continue
        _check_shape(path, name, parameters[name].get_shape(), list(tensor.shape))
        module, _, leaf = place.rpartition(".")
        keep(packed.model.get_submodule(module), leaf, name, form)


def fill_parameters(path: str, packed: PackedModel, parameters: Mapping[str, Rows], share: ExpertShare) -> None:
    """Copy this rank's rows, or its experts, of all parameters and buffers from the files. parameters: `stored_rows`.

    A tied parameter has several names. If the files hold it under more than one, the values must agree.
    """
    filled: set[int] = set()
    missing: dict[int, str] = {}
    for _, name, tensor in _stored_tensors(packed):
        local = local_of(tensor)
        if (found := parameters.get(name)) is None:
            missing.setdefault(id(tensor), name)
            continue
        shape = _whole_shape(packed, name, tensor)
        _check_shape(path, name, list(found.get_shape()), shape)
        held = _held(tensor, shape, share)
        rows = found[held.start : held.stop] if held else torch.empty(0, *shape[1:])
        rows = rows.to(local.dtype)
        if id(tensor) not in filled:
            with torch.no_grad():
                local.copy_(rows)
            filled.add(id(tensor))
        elif not torch.equal(local.cpu(), rows):
            raise ConfigError(f"base_model: {path} ties its embeddings, but its files hold another tensor as {name}")
    if absent := [name for key, name in missing.items() if key not in filled]:
        raise ConfigError(f"base_model: the safetensors files of {path} lack {', '.join(absent[:3])}")
    _fill_kept(packed, parameters, share)


def _fill_kept(packed: PackedModel, parameters: Mapping[str, Rows], share: ExpertShare) -> None:
    def copy(parameter: Tensor, stored: StoredTensor) -> None:
        with torch.no_grad():
            local_of(parameter).copy_(held_rows(stored, _held(parameter, stored.get_shape(), share)))

    for weight in kept_in(packed.model):
        form = parameters[weight.name].form
        assert form is not None
        weight.fill(form, copy)


def _stored_tensors(packed: PackedModel) -> Iterator[tuple[str, str, Tensor]]:
    """Parameters and persistent buffers: the names that they have in `packed.model` and in files, and the tensors. Tied
    ones come under each of their names; the stored tensors of kept weights do not come."""
    named: list[tuple[str, Tensor]] = [*packed.model.named_parameters(remove_duplicate=False)]
    for prefix, module in packed.model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                named.append((f"{prefix}.{leaf}" if prefix else leaf, buffer))
    stored = stored_leaves(packed.model)
    for name, tensor in named:
        if name in stored:
            continue
        module, _, leaf = name.rpartition(".")
        wrapped = module.removesuffix(".base")
        is_wrapped = wrapped in packed.linears or wrapped in packed.experts
        yield name, (f"{wrapped}.{leaf}" if is_wrapped else name), tensor


def held_numel(packed: PackedModel) -> int:
    """How many parameters this rank holds."""
    stored = stored_leaves(packed.model)
    plain = (local_of(each).numel() for name, each in packed.model.named_parameters() if name not in stored)
    return sum(plain) + sum(weight.numel(local_of) for weight in kept_in(packed.model))


def _whole_shape(packed: PackedModel, name: str, tensor: Tensor) -> list[int]:
    """Of all ranks' rows, or experts."""
    experts = packed.experts.get(name.rpartition(".")[0])
    return list(tensor.shape) if experts is None else [experts.count, *tensor.shape[1:]]


def _check_shape(path: str, name: str, stored: list[int], expected: list[int]) -> None:
    if stored != expected:
        raise ConfigError(f"base_model: {path} holds {name} with shape {stored}, its config says {expected}")


def _held(tensor: Tensor, shape: Sequence[int], share: ExpertShare) -> range:
    """This rank's rows of a tensor that has this shape in the files, or its experts."""
    if isinstance(tensor, DTensor):
        return rows_of(shape[0], share.rank, share.ranks)
    return share.of(shape[0]) if len(tensor) < shape[0] else range(shape[0])


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor that is divided; else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
