"""The base model over several ranks: each rank holds, and reads from the files, its rows of every parameter (FSDP2).

Knows transformers' configurations and safetensors files. Knows nothing of adapters' weights, passes or how ranks find
each other: torch.distributed is already initialized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from skyrl.base.config.server import ConfigError
from skyrl.training.backends.torch_lora.collectives import SumInRankOrder, failed_anywhere
from skyrl.training.backends.torch_lora.conversions import FileTensor, Rows, file_tensors, stored_parameters
from skyrl.training.backends.torch_lora.device import HOST, base_dtype
from skyrl.training.backends.torch_lora.expert_exchange import ExpertExchange
from skyrl.training.backends.torch_lora.expert_shares import ExpertShare
from skyrl.training.backends.torch_lora.fused_norms import fuse_norms, fuses_norms
from skyrl.training.backends.torch_lora.loading import check_weights
from skyrl.training.backends.torch_lora.model import BaseModel, check_config, wrap
from skyrl.training.backends.torch_lora.model_config import LOADING_ERRORS, read_config
from skyrl.training.backends.torch_lora.packed_model import PackedModel
from skyrl.training.backends.torch_lora.recomputation import Setting
from skyrl.training.backends.torch_lora.routing import CORRECTION
from skyrl.training.backends.torch_lora.shards import rows_of
from skyrl.training.backends.torch_lora.stored_weights import INDEX, ONE_FILE, StoredWeights, weight_files
from skyrl.training.backends.torch_lora.text_part import TOWER, detach_vision, model_class
from skyrl.training.backends.torch_lora.vision import VisionTower, make_tower


@dataclass(frozen=True)
class ModelForm:
    """`wrap` makes the packed model of a path and transformers' model; it may raise ConfigError. `trained`: the
    parameters are float32 and require gradients; the model computes in the device's dtype, and gathers in it.
    `whole_experts`: a rank holds some experts whole, and gathers none."""

    wrap: Callable[[str, Any], PackedModel]
    trained: bool
    whole_experts: bool = False

    def dtype(self, device: torch.device) -> torch.dtype:
        """That of the parameters."""
        return torch.float32 if self.trained else base_dtype(device)


def frozen(*, mlp_of_mixtures: bool, whole_experts: bool = False) -> ModelForm:
    """A base model for adapters. `mlp_of_mixtures`: see `PackedModel`."""
    return ModelForm(partial(wrap, mlp_of_mixtures=mlp_of_mixtures), trained=False, whole_experts=whole_experts)


@dataclass(frozen=True)
class ShardedModel:
    """A model of which this rank holds `numel` of all ranks' `total` parameters, in `dtype`.

    in_files: see `file_tensors`; empty unless the parameters are trained. `exchange`: computes the experts if each rank
    holds some of them."""

    base: BaseModel
    mesh: DeviceMesh
    dtype: torch.dtype
    numel: int
    total: int
    in_files: dict[str, list[FileTensor]]
    exchange: ExpertExchange | None

    def read_again(self) -> None:
        """Give this rank's rows the numbers of the base model's files again.

        Raises ConfigError, or one of LOADING_ERRORS; the rows may then hold anything."""
        path = self.base.path
        share = ExpertShare(self.mesh.get_local_rank(), self.mesh.size())
        with StoredWeights(path, _files(path), read_config(path).format, self.dtype) as stored:
            _fill_parameters(path, self.base.packed, stored, share)


def load_sharded_model(
    path: str,
    device: torch.device,
    mesh: DeviceMesh,
    form: ModelForm,
    *,
    gradient_checkpointing: Setting,
    pictures: bool = True,
    agree: Callable[[Exception | None], None],
) -> ShardedModel:
    """Load this rank's rows of the base model. Every rank calls this at the same time. `pictures`: whether a model that
    sees keeps its vision tower: every rank holds all of it, because each computes the pictures of its own pieces.

    No rank ever holds the whole model: the parameters of one decoder layer, or those outside the layers, are the most
    that a rank gathers. Each decoder layer is gathered for itself; embeddings, final norm and output layer together,
    so that tied embeddings stay one parameter.

    `agree` is called twice, with this rank's failure or None: after loading, and after comparing the logits. It raises
    on every rank if a rank failed: the next steps need all ranks.

    Raises ConfigError as `load_base_model` does, and for a model without safetensors files.
    """
    failure: Exception | None = None
    loaded: _Loaded | None = None
    try:
        loaded = _load(path, device, mesh, form, pictures=pictures)
    except ConfigError as error:
        failure = error
    except LOADING_ERRORS as error:
        failure = ConfigError(f"base_model: cannot load {path}: {error}")
        failure.__cause__ = error
    agree(failure)
    assert loaded is not None
    base = loaded.base
    packed = base.packed
    for method in ("stock_logits", "changed_logits", "attention_calls", "packed_logits"):
        register_fsdp_forward_method(packed, method)
    try:
        base.check_stock()
        expected = base.stock_logits()
        packed.use_own_kernels()
        if not form.trained and fuses_norms(device):
            fuse_norms(packed)
        if loaded.exchange is not None:
            loaded.exchange.compute(packed.experts.values())
        base.verify(expected)
    except ConfigError as error:
        failure = error
    agree(failure)
    reshard(packed)
    packed.recompute(gradient_checkpointing, ranks=mesh.size(), anywhere=lambda own: failed_anywhere([own])[0])
    local = sum(local_of(parameter).numel() for parameter in packed.parameters())
    return ShardedModel(base, mesh, form.dtype(device), local, loaded.total, loaded.in_files, loaded.exchange)


def reshard(packed: PackedModel) -> None:
    """Free the gathered parameters outside the decoder layers. FSDP2 keeps them after the forward of a root module, for
    the backward."""
    packed.reshard()  # pyright: ignore[reportCallIssue]  # fully_shard has made the module an FSDPModule


@dataclass(frozen=True)
class _Loaded:
    """The model with this rank's rows, and what `ShardedModel` says of it."""

    base: BaseModel
    total: int
    in_files: dict[str, list[FileTensor]]
    exchange: ExpertExchange | None


def _load(path: str, device: torch.device, mesh: DeviceMesh, form: ModelForm, *, pictures: bool) -> _Loaded:
    described = read_config(path)
    config = described.config
    check_config(path, config)
    files = _files(path)
    computed = base_dtype(device)
    held = form.dtype(device)
    policy = MixedPrecisionPolicy(None if held == computed else computed, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model: Any = model_class(config).from_config(config, dtype=held, attn_implementation="eager")
    visual = detach_vision(model)
    _keep_in_float32(model)
    model.eval().requires_grad_(form.trained)
    packed = form.wrap(path, model)
    total = sum(parameter.numel() for parameter in packed.parameters())
    share = ExpertShare(mesh.get_local_rank(), mesh.size())
    exchange = _divide_experts(path, packed, share, device) if form.whole_experts else None
    whole = {each for experts in packed.experts.values() if exchange for each in experts.parameters()}
    for layer in packed.decoder_layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=whole)
    fully_shard(packed, mesh=mesh, mp_policy=policy)
    if form.trained:
        _sum_gradients(packed, device)
    with StoredWeights(path, files, described.format, held) as stored:
        check_weights(path, config, type(model), stored)
        packed.to_empty(device=device)
        _fill_buffers(path, model)
        parameters = _fill_parameters(path, packed, stored, share)
        in_files = file_tensors(path, model, parameters) if form.trained else {}
        tower = _tower(path, model, visual, stored, device) if pictures and visual is not None else None
    return _Loaded(BaseModel(path, device, packed, config, tower), total, in_files, exchange)


def _divide_experts(path: str, packed: PackedModel, share: ExpertShare, device: torch.device) -> ExpertExchange:
    """Raises ConfigError for a model without experts that could be divided."""
    if not packed.experts:
        which = "is no mixture of experts" if packed.mixture is None else "has experts of a kind that cannot be divided"
        raise ConfigError(f"trainer.placement.expert_parallel: {path} {which}: leave it out")
    exchange = ExpertExchange(share, packed.active, together=device.type != "cpu")
    exchange.divide(packed.experts.values())
    return exchange


def _tower(path: str, model: Any, visual: Any, stored: StoredWeights, device: torch.device) -> VisionTower | None:
    """The whole vision tower `visual` of the model, which has no memory yet, with its weights."""
    visual.to_empty(device=HOST)
    _fill_buffers(path, visual)
    named = {f"{model.base_model_prefix}.{TOWER}.{name}": each for name, each in visual.named_parameters()}
    shapes = {name: parameter.shape for name, parameter in named.items()}
    found = stored_parameters(model, shapes, dict.fromkeys(stored.keys(), stored))
    for name, parameter in named.items():
        parameter.data = found[name][:].to(base_dtype(device))
    return make_tower(path, visual, device, pictures=True)


def _keep_in_float32(model: Any) -> None:
    """The corrections of routers' scores, as in `load_model`, whatever the model's dtype."""
    for module in model.modules():
        if (buffer := module._buffers.get(CORRECTION)) is not None:
            module._buffers[CORRECTION] = buffer.float()


def _sum_gradients(packed: PackedModel, device: torch.device) -> None:
    """Gradients of the ranks are sums, where FSDP2 makes means. On CPUs they are added in the order of the ranks."""
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else the factor needs NCCL
            if device.type == "cpu":
                reduce_scatter: Any = SumInRankOrder()  # the type that FSDP2 names is private
                module.set_custom_reduce_scatter(reduce_scatter)


def _files(path: str) -> list[Path]:
    """The model's safetensors files, in a directory or downloaded from the hub."""
    if files := weight_files(path):
        return files
    raise ConfigError(
        f"base_model: {path} has neither {ONE_FILE} nor {INDEX}. Ranks read only safetensors files: each reads "
        "its rows alone: save the model with transformers' save_pretrained, or train without ranks"
    )


def _fill_buffers(path: str, model: Any) -> None:
    """Compute the buffers that no file holds, for example the frequencies of rotary embeddings, as transformers does.

    Raises ConfigError if transformers leaves one of them as it is: it would hold garbage.
    """
    for module in model.modules():
        names = [name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None]
        if not names:
            continue
        for name in names:
            if module._buffers[name].is_floating_point():
                module._buffers[name].fill_(torch.nan)
        model._init_weights(module)
        for name in names:
            if not module._buffers[name].is_floating_point() or bool(module._buffers[name].isnan().any()):
                raise ConfigError(
                    f"base_model: {path} has a buffer {name} in {type(module).__name__} that only from_pretrained of "
                    "the whole model computes; train with one rank"
                )


def _fill_parameters(path: str, packed: PackedModel, opened: StoredWeights, share: ExpertShare) -> dict[str, Rows]:
    """Copy this rank's rows, or its experts, of all parameters and buffers from the files. Returns what the files hold
    of each.

    A tied parameter has several names. If the files hold it under more than one, the values must agree.
    """
    filled: set[int] = set()
    missing: dict[int, str] = {}
    named = list(_stored_tensors(packed))
    stored = dict.fromkeys(opened.keys(), opened)
    shapes = {name: _whole_shape(packed, name, tensor) for name, tensor in named}
    parameters = stored_parameters(packed.model, shapes, stored)
    for name, tensor in named:
        local = local_of(tensor)
        if (found := parameters.get(name)) is None:
            missing.setdefault(id(tensor), name)
            continue
        _check_shape(path, name, list(found.get_shape()), shapes[name])
        rows = _rows(found, tensor, shapes[name], share).to(local.dtype)
        if id(tensor) not in filled:
            with torch.no_grad():
                local.copy_(rows)
            filled.add(id(tensor))
        elif not torch.equal(local.cpu(), rows):
            raise ConfigError(f"base_model: {path} ties its embeddings, but its files hold another tensor as {name}")
    if absent := [name for key, name in missing.items() if key not in filled]:
        raise ConfigError(f"base_model: the safetensors files of {path} lack {', '.join(absent[:3])}")
    return parameters


def _stored_tensors(packed: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers with the names that they have in files; tied ones under each of their names."""
    named: list[tuple[str, Tensor]] = [*packed.model.named_parameters(remove_duplicate=False)]
    for prefix, module in packed.model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                named.append((f"{prefix}.{leaf}" if prefix else leaf, buffer))
    for name, tensor in named:
        module, _, leaf = name.rpartition(".")
        wrapped = module.removesuffix(".base")
        is_wrapped = wrapped in packed.linears or wrapped in packed.experts
        yield (f"{wrapped}.{leaf}" if is_wrapped else name), tensor


def _whole_shape(packed: PackedModel, name: str, tensor: Tensor) -> list[int]:
    """Of all ranks' rows, or experts."""
    experts = packed.experts.get(name.rpartition(".")[0])
    return list(tensor.shape) if experts is None else [experts.count, *tensor.shape[1:]]


def _check_shape(path: str, name: str, stored: list[int], expected: list[int]) -> None:
    if stored != expected:
        raise ConfigError(f"base_model: {path} holds {name} with shape {stored}, its config says {expected}")


def _rows(stored: Any, tensor: Tensor, shape: list[int], share: ExpertShare) -> Tensor:
    """This rank's rows of a stored tensor of this shape, or its experts."""
    if isinstance(tensor, DTensor):
        rows = rows_of(shape[0], share.rank, share.ranks)
    elif len(tensor) < shape[0]:
        rows = share.of(shape[0])
    else:
        return stored[:]
    if not rows:
        return torch.empty(0, *shape[1:])
    return stored[rows.start : rows.stop]


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor that is divided; else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
