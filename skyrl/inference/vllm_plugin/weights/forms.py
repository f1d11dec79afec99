"""Layers that vLLM computes with in another form than it loads them, and how such a layer takes new weights.

vLLM loads a checkpoint into plain tensors. For three kinds of layers it then makes other ones for its kernels:

- experts on a CPU: the same elements in an order of the kernel's, with zeros as padding;
- latent attention (MLA): `kv_b_proj` divided into two tensors, which are used in its place;
- short convolutions on a CPU in bfloat16: the same elements in an order of the kernel's, beside a plain copy.

A tensor in a kernel's order has the shape of the plain one, so a loader that wrote into it would mix up its elements
and say nothing. `ready` therefore takes such tensors out of the model while new ones are loaded.

Knows these layers of vLLM. Knows nothing of checkpoints, and nothing of how a model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch

from skyrl.inference.vllm_plugin.weights.jobs import WeightsError

PLAIN_BACKENDS = ("TRITON", "BATCHED_TRITON")
"""Kernels of experts that use the weights as they are loaded."""
EXPERT_WEIGHTS = ("w13_weight", "w2_weight")
_EXPERT = re.compile(r"\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Form(Protocol):
    """One layer. `number` is the layer's in the model, by `number_of` its name."""

    number: int | None

    def out(self) -> AbstractContextManager[None]:
        """What the kernel uses is out of the model during the body: to load into this layer then is an error."""
        ...

    def plain(self, *, keep: bool) -> AbstractContextManager[None]:
        """Inside `out`: plain tensors are in the model, with their present elements, or NaN without `keep`. After the
        body the kernel's tensors are made of them, in place. They stay as they were if the body raises."""
        ...

    def read(self, name: str) -> torch.Tensor | None:
        """The tensor that a checkpoint has under this name; None for one that the kernel uses as it was loaded."""
        ...


def number_of(name: str) -> int | None:
    """The first number among the parts of a dotted name: that of the layer, in vLLM's names and in checkpoints'."""
    found = _NUMBER.search(name)
    return None if found is None else int(found[0])


def forms_of(model: torch.nn.Module) -> list[Form]:
    """Of all layers of such a kind. Raises WeightsError (501) for layers whose form is not known."""
    if hasattr(model, "process_weights_after_loading"):
        raise WeightsError(f"{type(model).__name__} makes tensors of its own after it has loaded its weights", 501)
    return [form for name, module in model.named_modules() if (form := _form(name, module)) is not None]


@contextmanager
def ready(forms: Iterable[Form]) -> Iterator[None]:
    """All layers are `out` during the body."""
    with ExitStack() as stack:
        for form in forms:
            stack.enter_context(form.out())
        yield


@contextmanager
def plain(forms: Iterable[Form], *, keep: bool) -> Iterator[None]:
    """These layers are `plain` during the body."""
    with ExitStack() as stack:
        for form in forms:
            stack.enter_context(form.plain(keep=keep))
        yield


def _is(thing: object, kind: str) -> bool:
    """By the name of a class of vLLM's."""
    return kind in {each.__name__ for each in type(thing).__mro__}


def _form(name: str, module: Any) -> Form | None:
    if _is(module, "MLAAttention"):
        return AbsorbedProjection(name, module)
    if hasattr(module, "_cpu_unpacked_conv_weight"):
        return PackedConvolution(name, module)
    if _is(module, "RoutedExperts"):
        return _form_of_experts(name, module)
    return None


def _form_of_experts(name: str, module: Any) -> Form | None:
    method = getattr(module, "quant_method", None)
    method = getattr(method, "old_quant_method", method)  # with adapters on experts
    backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
    if backend in PLAIN_BACKENDS:
        return None
    kernel: Any = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    if backend != "CPU" or not _is(kernel, "CPUUnquantizedExperts"):
        raise WeightsError(
            f"vLLM keeps the weights of {name} in a form of its kernel ({backend}), which an update would not reach: "
            "on GPUs start vLLM with --moe-backend triton",
            501,
        )
    if _is(kernel, "AdaptedExperts") or kernel._use_zentorch:
        return None
    return PackedExperts(name, module, kernel)


def keep_projections() -> None:
    """Patch this process, before a model is loaded: latent attention keeps `kv_b_proj` on a CPU with AMX, too, where it
    drops what it has packed."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    original = MLAAttention.process_weights_after_loading

    def patched(self: Any, act_dtype: torch.dtype) -> None:
        weight = self.kv_b_proj.weight
        original(self, act_dtype)
        self.kv_b_proj.weight = weight

    MLAAttention.process_weights_after_loading = patched  # type: ignore[method-assign]


class AbsorbedProjection:
    """Latent attention. The plain tensor, `kv_b_proj`, stays in the model beside what is made of it."""

    def __init__(self, name: str, module: Any) -> None:
        self.number = number_of(name)
        self._module = module

    def out(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def plain(self, *, keep: bool) -> Iterator[None]:
        yield
        self._module.process_weights_after_loading(self._module.kv_b_proj.weight.dtype)

    def read(self, name: str) -> torch.Tensor | None:
        return None


class PackedConvolution:
    """A short convolution, weights [channels, 1, width]."""

    def __init__(self, name: str, module: Any) -> None:
        self.number = number_of(name)
        self._module = module
        self._kept = module.weight.data

    @contextmanager
    def out(self) -> Iterator[None]:
        self._kept = self._module.weight.data
        self._module.weight.data = self._kept.new_empty(0)
        try:
            yield
        finally:
            self._module.weight.data = self._kept

    @contextmanager
    def plain(self, *, keep: bool) -> Iterator[None]:
        import vllm._custom_ops as ops

        copy = self._module._cpu_unpacked_conv_weight
        new = copy.clone() if keep else torch.full_like(copy, torch.nan)
        self._module.weight.data = new.unsqueeze(1)
        try:
            yield
            copy.copy_(new)
            self._kept.copy_(ops.causal_conv1d_weight_pack(new))
        finally:
            self._module.weight.data = self._kept.new_empty(0)

    def read(self, name: str) -> torch.Tensor | None:
        return self._module._cpu_unpacked_conv_weight.unsqueeze(1) if name.endswith(".conv1d.weight") else None


class PackedExperts:
    """Experts on a CPU. `w13_weight` [experts, 2 * size, hidden] and `w2_weight` [experts, hidden, size] in the order
    of `kernel`, whose size may be larger than the model's. Raises WeightsError (501) for an order that cannot be
    undone, and for biases with padding."""

    def __init__(self, name: str, module: Any, kernel: Any) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self.number = number_of(name)
        self._module = module
        self._kernel = kernel
        self._loaded = {each: get_layerwise_info(module).restore_metadata[0][each] for each in EXPERT_WEIGHTS}
        self._kept: dict[str, Any] = {each: getattr(module, each) for each in EXPERT_WEIGHTS}
        padded = any(self._loaded[each].shape != self._kept[each].shape for each in EXPERT_WEIGHTS)
        if padded and hasattr(module, "w13_bias"):
            raise WeightsError(f"vLLM pads the biases of {name}, which an update would not reach", 501)
        for kept in self._kept.values():
            if not _can_be_undone(kernel.isa, kernel.output_alignment, tuple(kept.shape[1:]), kept.dtype):
                raise WeightsError(f"vLLM keeps the weights of {name} in an order that is not known", 501)

    @contextmanager
    def out(self) -> Iterator[None]:
        self._kept = {each: getattr(self._module, each) for each in EXPERT_WEIGHTS}
        self._take_out()
        try:
            yield
        finally:
            for each, kept in self._kept.items():
                setattr(self._module, each, kept)

    @contextmanager
    def plain(self, *, keep: bool) -> Iterator[None]:
        from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        for each, kept in self._kept.items():
            with kept.device:
                new = restore_layer_refs(materialize_meta_tensor(self._loaded[each]), self._module)
            new.data.copy_(self._undone(each, kept.data)) if keep else new.data.fill_(torch.nan)
            setattr(self._module, each, new)
        try:
            yield
            for expert in range(len(self._kept[EXPERT_WEIGHTS[0]])):
                self._pack(slice(expert, expert + 1))
        finally:
            self._take_out()

    def read(self, name: str) -> torch.Tensor | None:
        def matrix(each: str, expert: int) -> torch.Tensor:
            return self._undone(each, getattr(self._module, each).data[expert : expert + 1])[0]

        return _of_expert(self._module, name, matrix)

    def _pack(self, experts: slice) -> None:
        """By the kernel's own method. A few experts at a time, which takes no memory worth mentioning."""
        some: Any = torch.nn.Module()
        for each in EXPERT_WEIGHTS:
            setattr(some, each, torch.nn.Parameter(getattr(self._module, each).data[experts], requires_grad=False))
        self._kernel.process_weights_after_loading(some)
        for each, kept in self._kept.items():
            kept.data[experts].copy_(getattr(some, each).data)

    def _take_out(self) -> None:
        for each, kept in self._kept.items():
            setattr(self._module, each, torch.nn.Parameter(kept.data.new_empty(0), requires_grad=False))

    def _undone(self, each: str, kept: torch.Tensor) -> torch.Tensor:
        """Plain tensors of some experts, without padding."""
        whole = _undo(kept, _order(self._kernel.isa, self._kernel.output_alignment, kept.shape[2], kept.dtype))
        size = self._loaded["w2_weight"].shape[2]
        if each == "w2_weight":
            return whole[:, :, :size]
        padded = whole.shape[1] // 2
        return torch.cat([whole[:, :size], whole[:, padded : padded + size]], dim=1)


def plain_expert(model: torch.nn.Module, name: str) -> torch.Tensor | None:
    """The matrix that a checkpoint has under this name, of an expert that the kernel uses as it was loaded; None if
    there is none."""
    for place, module in model.named_modules():
        if _is(module, "RoutedExperts") and number_of(place) == number_of(name):
            return _of_expert(module, name, lambda each, expert, of=module: getattr(of, each).data[expert])
    return None


def _of_expert(module: Any, name: str, matrix: Callable[[str, int], torch.Tensor]) -> torch.Tensor | None:
    """`matrix` gives w13 or w2 of one expert, by the tensor's name and the expert's number."""
    found = _EXPERT.search(name)
    if found is None or getattr(module, "expert_map", None) is not None:  # the map is for experts on several ranks
        return None
    expert, projection = int(found[1]), found[2]
    if projection in ("down_proj", "w2"):
        return matrix("w2_weight", expert)
    joined = matrix("w13_weight", expert)
    if not module.moe_config.is_act_and_mul:  # without a gate
        return joined
    gate, up = joined.chunk(2)
    return gate if projection in ("gate_proj", "w1") else up


@cache
def _order(isa: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """For each element of a plain block [rows, columns], its place in the kernel's order. The kernel moves elements and
    does not look at them, so it is given their plain places, some bits at a time."""
    import vllm._custom_ops as ops

    bits = 8 * dtype.itemsize
    whole = {16: torch.int16, 32: torch.int32}[bits]
    places = torch.arange(rows * columns).reshape(1, rows, columns)
    found = torch.zeros(rows * columns, dtype=torch.int64)
    for shift in range(0, 32, bits):
        part = (places >> shift).to(whole).view(dtype)
        moved = ops.cpu_prepack_moe_weight(part, isa).view(whole).flatten().to(torch.int64)
        found |= (moved & (2**bits - 1)) << shift
    return found.argsort()


def _undo(kept: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return kept.reshape(-1, len(order)).index_select(1, order).reshape(kept.shape)


@cache
def _can_be_undone(isa: str, rows: int, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether the kernel's order of a matrix is that of its blocks of rows. Tried with random numbers."""
    import vllm._custom_ops as ops

    if dtype.itemsize not in (2, 4) or shape[0] % rows:
        return False
    matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = ops.cpu_prepack_moe_weight(matrix, isa)
    return torch.equal(_undo(packed, _order(isa, rows, shape[1], dtype)), matrix)
