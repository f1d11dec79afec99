"""The base model on a rank: all of it on a rank alone; over several, each holds, and reads from the files, its rows of
every parameter (FSDP2), its experts, or its part of kept quantized weights.

Knows transformers' configurations, the names of parameters in models and in files, and safetensors files. Knows nothing
of adapters' weights, passes or how ranks find each other: torch.distributed is already initialized if they are several.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from skyrl.base.config.backend import Kernels
from skyrl.base.config.server import ConfigError
from skyrl.trainer.attention.varlen import usable_on
from skyrl.trainer.collectives import SumInRankOrder, failed_anywhere
from skyrl.trainer.device import HOST, align, base_dtype
from skyrl.trainer.experts.layers import ExpertExchange
from skyrl.trainer.experts.routing import CORRECTIONS
from skyrl.trainer.files.config import LOADING_ERRORS, read_config
from skyrl.trainer.files.model_files import FileTensor, Rows, file_tensors, stored_parameters
from skyrl.trainer.files.tensor_files import INDEX, ONE_FILE, StoredWeights, weight_files
from skyrl.trainer.full.full_model import check_all_trained
from skyrl.trainer.kernels.between import Between
from skyrl.trainer.kernels.fused import between_for
from skyrl.trainer.model.base_model import BaseModel, check_config, fuse_norms, fuses_norms
from skyrl.trainer.model.layer_graphs import check_graphs, graphs_on
from skyrl.trainer.model.loading import TOWER, check_quantized, check_weights, detach_vision, load_model, model_class
from skyrl.trainer.model.packed_model import PackedModel
from skyrl.trainer.model.recomputation import Setting
from skyrl.trainer.quantized.kept import keep, kept_in, stored_leaves
from skyrl.trainer.quantized.weights import StoredTensor, held_rows
from skyrl.trainer.shares import EVERY_EXPERT, ExpertShare, rows_of
from skyrl.trainer.vision import VisionTower, make_tower

logger = logging.getLogger(__name__)


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


def fill_parameters(
    path: str,
    packed: PackedModel,
    parameters: Mapping[str, Rows],
    share: ExpertShare,
    instead: Mapping[int, Tensor] | None = None,
) -> None:
    """Copy this rank's rows, or its experts, of all parameters and buffers from the files. parameters: `stored_rows`.
    `instead`: tensors that get the numbers in the place of parameters, by the parameters' ids.

    A tied parameter has several names. If the files hold it under more than one, the values must agree.
    """
    filled: set[int] = set()
    missing: dict[int, str] = {}
    for _, name, tensor in _stored_tensors(packed):
        local = (instead or {}).get(id(tensor), local_of(tensor))
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


@dataclass(frozen=True)
class ModelForm:
    """`wrap` makes the packed model of transformers' model; it may raise ValueError. `trained`: the
    parameters are float32 and require gradients; the model computes in the device's dtype, and gathers in it.
    `whole_experts`: a rank holds some experts whole, and gathers none. `keep_quantized`: weights that are quantized in
    the files are held and gathered as they are there."""

    wrap: Callable[[Any], PackedModel]
    trained: bool
    whole_experts: bool = False
    keep_quantized: bool = False

    def packed(self, path: str, model: Any) -> PackedModel:
        """Raises ConfigError for a model that does not fit, or with weights that would have to be trained, and are no
        parameters."""
        if self.trained:
            check_all_trained(path, model)
        try:
            return self.wrap(model)
        except ValueError as error:
            raise ConfigError(f"base_model: {path} ({type(model).__name__}): {error}") from error

    def dtype(self, device: torch.device) -> torch.dtype:
        """That of the parameters."""
        return torch.float32 if self.trained else base_dtype(device)


@dataclass(frozen=True)
class ShardedModel:
    """A model of which this rank holds a part of all ranks' `total` parameters, in `dtype`.

    in_files: see `file_tensors`; empty unless the parameters are trained. `exchange`: computes the experts if each rank
    holds some of them."""

    base: BaseModel
    share: ExpertShare
    dtype: torch.dtype
    total: int
    in_files: dict[str, list[FileTensor]]
    exchange: ExpertExchange | None

    @property
    def numel(self) -> int:
        """How many parameters this rank holds."""
        packed, stored = self.base.packed, stored_leaves(self.base.packed.model)
        plain = (local_of(each).numel() for name, each in packed.model.named_parameters() if name not in stored)
        return sum(plain) + sum(weight.numel(local_of) for weight in kept_in(packed.model))

    def read_again(self, instead: Mapping[int, Tensor]) -> None:
        """Give this rank's rows the numbers of the base model's files again. `instead`: as in `fill_parameters`.

        Raises ConfigError, or one of LOADING_ERRORS; the rows may then hold anything."""
        path = self.base.path
        with StoredWeights(path, _files(path), read_config(path).format, self.dtype) as stored:
            fill_parameters(path, self.base.packed, stored_rows(self.base.packed, stored), self.share, instead)


def load_sharded_model(
    path: str,
    device: torch.device,
    mesh: DeviceMesh | None,
    form: ModelForm,
    *,
    gradient_checkpointing: Setting,
    pictures: bool = True,
    varlen: bool = False,
    kernels: Kernels = "torch",
    graphs: bool = False,
    agree: Callable[[Exception | None], None],
) -> ShardedModel:
    """Load this rank's rows of the base model; all of it without `mesh`. Every rank calls this at the same time.
    `pictures`: whether a model that sees keeps its vision tower: every rank holds all of it, because each computes the
    pictures of its own pieces. `varlen`: attention is that of `attention.varlen`, if this version of torch has it.
    `kernels`: what computes between the products of plain layers and, with "triton", target logprobs. `graphs`: plain
    layers run as CUDA graphs.

    No rank ever holds the whole model: the parameters of one decoder layer, or those outside the layers, are the most
    that a rank gathers. Each decoder layer is gathered for itself; embeddings, final norm and output layer together,
    so that tied embeddings stay one parameter.

    `agree` is called twice, with this rank's failure or None: after loading, and after comparing the logits. It raises
    on every rank if a rank failed: the next steps need all ranks.

    A weight that is kept quantized is read, held and gathered in the files' stored tensors (`kept_weights`).

    Raises ConfigError: the path has no causal language model (`load_model`), or the model has layers that cannot be
    trained, position embeddings that depend on the batch, or other logits on packed rows than in transformers; the
    device cannot do `varlen`, `kernels` or `graphs`. With `mesh` also for a model without safetensors files.
    """
    failure: Exception | None = None
    loaded: ShardedModel | None = None
    between: Between | None = None
    try:
        varlen = varlen and usable_on(device)
        between = None if form.trained else between_for(kernels, device)
        if graphs:
            check_graphs(device, alone=mesh is None)
        if mesh is None:
            loaded = _load_whole(path, device, form, pictures=pictures)
        else:
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
    if mesh is not None:
        for method in ("stock_logits", "changed_logits", "attention_calls", "packed_logits"):
            register_fsdp_forward_method(packed, method)
    try:
        base.check_stock()
        expected = base.stock_logits()
        packed.use_own_kernels(varlen=varlen, between=between)
        packed.logprobs_in_kernels = between is not None and kernels == "triton"
        if not form.trained and fuses_norms(device):
            fuse_norms(packed)
        if loaded.exchange is not None:
            loaded.exchange.compute(packed.experts.values())
        base.verify(expected)
    except ConfigError as error:
        failure = error
    agree(failure)
    packed.reshard()
    anywhere = bool if mesh is None else lambda own: failed_anywhere([own])[0]
    packed.recompute(gradient_checkpointing, ranks=loaded.share.ranks, anywhere=anywhere)
    if graphs and not packed.use_graphs(graphs_on(device)):
        logger.warning("trainer.cuda_graphs: this model has other layers than Llama's, or quantized ones: no graphs")
    return loaded


def _load_whole(path: str, device: torch.device, form: ModelForm, *, pictures: bool) -> ShardedModel:
    """As transformers loads models, so that pickled files and buffers that only `from_pretrained` computes are fine.
    Trained parameters, too, have the dtype that the device computes in."""
    check_config(path, read_config(path).config)
    model = load_model(path, base_dtype(device), safetensors_only=form.trained, keep_quantized=form.keep_quantized)
    tower = make_tower(path, detach_vision(model), device, pictures=pictures)
    model.to(device).eval().requires_grad_(form.trained)
    align(model.parameters())
    packed = form.packed(path, model)
    in_files: dict[str, list[FileTensor]] = {}
    if form.trained:
        with StoredWeights(path, _files(path), read_config(path).format, torch.float32) as stored:
            in_files = file_tensors(path, model, stored_rows(packed, stored))
    total = sum(parameter.numel() for parameter in packed.parameters())
    base = BaseModel(path, device, packed, model.config, tower)
    return ShardedModel(base, EVERY_EXPERT, form.dtype(device), total, in_files, None)


def _load(path: str, device: torch.device, mesh: DeviceMesh, form: ModelForm, *, pictures: bool) -> ShardedModel:
    described = read_config(path)
    config = described.config
    check_config(path, config)
    if form.keep_quantized:
        check_quantized(path, described)
    files = _files(path)
    computed = base_dtype(device)
    held = form.dtype(device)
    policy = MixedPrecisionPolicy(None if held == computed else computed, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model: Any = model_class(config).from_config(config, dtype=held, attn_implementation="eager")
    visual = detach_vision(model)
    _keep_in_float32(model)
    model.eval().requires_grad_(form.trained)
    packed = form.packed(path, model)
    total = sum(parameter.numel() for parameter in packed.parameters())
    share = ExpertShare(mesh.get_local_rank(), mesh.size())
    with StoredWeights(path, files, described.format, held) as stored:
        check_weights(path, config, type(model), stored)
        parameters = stored_rows(packed, stored)
        if form.keep_quantized:
            keep_quantized(path, packed, parameters)
        exchange = _divide_experts(path, packed, share, device) if form.whole_experts else None
        whole = {each for experts in packed.experts.values() if exchange for each in experts.parameters()}
        for layer in packed.decoder_layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=whole)
        fully_shard(packed, mesh=mesh, mp_policy=policy)
        if form.trained:
            _sum_gradients(packed, device)
        packed.to_empty(device=device)
        _fill_buffers(path, model)
        fill_parameters(path, packed, parameters, share)
        in_files = file_tensors(path, model, parameters) if form.trained else {}
        tower = _tower(path, model, visual, stored, device) if pictures and visual is not None else None
    return ShardedModel(BaseModel(path, device, packed, config, tower), share, held, total, in_files, exchange)


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
        for name in CORRECTIONS:
            if (buffer := module._buffers.get(name)) is not None:
                module._buffers[name] = buffer.float()


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
