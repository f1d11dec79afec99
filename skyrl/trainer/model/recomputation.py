"""Gradient checkpointing: whether a micro-batch keeps what its decoder layers compute, or recomputes it in backward.

Both give the same bits on a CPU, so the choice may depend on the memory that is free at the moment. Knows transformers'
decoder layers, and the memory of the device. Knows nothing of adapters or passes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl.base.config.pass_memory import FIRST_GUESS, FREE_ANYHOW, LARGE_ROWS, SHARE
from skyrl.base.config.server import ConfigError
from skyrl.runtime.processes.host_resources import free_host_bytes
from skyrl.trainer.experts.routing import counts_of, router_of
from skyrl.trainer.quantized.kept import weights_of

Setting = bool | Literal["auto"]
MEASURED_ROWS = 64
"""A micro-batch of at least so many rows tells how much a row needs."""
MEASURED_AGAIN = 4
"""So does each micro-batch that has so many times the rows of the largest one that was measured."""
MORE_COPIES = 0.5
"""And each that copies so many more rows of keys and values for each of its rows than any measured one. With the
prompts of groups shared, a row keeps up to 1.4 times as much as without."""
LEARNED_AT_ONCE = 4
"""One lack of memory raises the estimate at most so many times: it may have come from elsewhere, and would slow down
all later micro-batches."""


class Recomputation:
    """Decides for each micro-batch. `setting`: True and False decide for all of them.

    `ranks` share the host's memory. `anywhere`: whether any rank would recompute; all ranks call it together, because
    all must do the same. Raises ConfigError if the setting is True and transformers cannot recompute these layers."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        setting: Setting,
        *,
        ranks: int = 1,
        anywhere: Callable[[bool], bool] = bool,
    ) -> None:
        self._layers = layers
        self._setting = setting
        self._ranks = ranks
        self._anywhere = anywhere
        self._device = next(layers[0].parameters()).device
        self._per_row = FIRST_GUESS * _product_bytes(layers)
        self._measured_rows, self._measured_copies = 0, 0.0
        self._forced = self._recomputes = self._measures = False
        self._able = all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)
        if setting is True and not self._able:
            kind = type(layers[0]).__name__
            raise ConfigError(f"trainer.gradient_checkpointing: transformers cannot recompute {kind}: leave it out")
        for layer in layers:
            switched: Any = layer
            switched.gradient_checkpointing = True  # transformers looks at this, and at `training`
            switched._gradient_checkpointing_func = functools.partial(_computed_twice, layer)

    @property
    def recomputes(self) -> bool:
        """Whether the backward of the micro-batch whose forward runs now computes the layers again."""
        return self._recomputes and torch.is_grad_enabled()

    @property
    def runs_once(self) -> bool:
        """Whether the layers of the micro-batch whose forward runs now are neither computed again nor measured."""
        return not torch.is_grad_enabled() or not (self._recomputes or self._measures)

    @property
    def bytes_of_row(self) -> float:
        """What a row keeps for its backward: as measured, and guessed before that. With setting True: the inputs of all
        layers, and what one layer computes again."""
        if self._setting is not True:
            return self._per_row
        return _input_bytes(self._layers) + self._per_row / len(self._layers)

    @contextmanager
    def of_micro_batch(self, rows: int, copies: int = 0, leaves: Sequence[Tensor] = ()) -> Iterator[None]:
        """The forward of a micro-batch runs inside. `copies`: of rows of keys and values, behind shared prefixes.
        `leaves`: what it trains beside parameters; their memory lives anyhow, so it does not count."""
        if not torch.is_grad_enabled():
            yield
            return
        self._recomputes = self._forced or self.pays(rows)
        self._measures = not self._recomputes and self._tells(rows, copies)
        if self._device.type == "cpu":
            give_back_freed(at_once=self._recomputes and rows > LARGE_ROWS)
        if self._recomputes:
            with self._recomputed():
                yield
        elif self._measures:
            with _kept_bytes(leaves) as kept:
                yield
            of_row = sum(kept.values()) / rows
            self._per_row = max(self._per_row, of_row) if self._measured_rows else of_row
            self._measured_rows = max(self._measured_rows, rows)
            self._measured_copies = max(self._measured_copies, copies / rows)
        else:
            yield

    def _tells(self, rows: int, copies: int) -> bool:
        """Whether a micro-batch may need more for a row than was measured."""
        if rows < MEASURED_ROWS:
            return False
        more_copies = copies / rows >= self._measured_copies + MORE_COPIES
        return not self._measured_rows or rows >= MEASURED_AGAIN * self._measured_rows or more_copies

    def ran_out(self, rows: int) -> bool:
        """To be told when memory has run out in a micro-batch of `rows` rows. Returns whether another attempt may help,
        with its layers recomputed (`forced`). Then the estimate rises to where later ones of its size recompute them
        from the start with as much free memory as now, but at most to `LEARNED_AT_ONCE` times what it was."""
        if self._setting != "auto" or not self._able or self._recomputes or self._forced:
            return False
        enough = 1.01 * max(FREE_ANYHOW, SHARE * self.free()) / rows
        self._per_row = max(self._per_row, min(enough, LEARNED_AT_ONCE * self._per_row))
        return True

    @contextmanager
    def forced(self) -> Iterator[None]:
        """Layers of micro-batches inside are recomputed."""
        self._forced = True
        try:
            yield
        finally:
            self._forced = False

    def pays(self, rows: int) -> bool:
        """Whether the decoder layers of a micro-batch of `rows` rows are computed again in its backward."""
        if isinstance(self._setting, bool):
            return self._setting
        if not self._able:
            return False
        needed = rows * self._per_row
        return self._anywhere(needed > FREE_ANYHOW and needed > SHARE * self.free())

    def free(self) -> float:
        """Bytes of the device, or this rank's share of the host's, that new work can have now."""
        if self._device.type == "cuda":
            unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return torch.cuda.mem_get_info(self._device)[0] + unused
        return free_host_bytes() / self._ranks

    @contextmanager
    def _recomputed(self) -> Iterator[None]:
        """Only the layers are in training mode, not the modules inside them; and they only until they compute."""
        for layer in self._layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer.training = False


def _computed_twice(layer: nn.Module, compute: Callable[..., Any], *inputs: Any) -> Any:
    """What a layer in training mode computes out of it, now and again in backward. So no dropout is applied, also where
    the layer itself asks for its mode, as OPT's do, and nothing is random."""
    layer.training = False
    try:
        return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)
    finally:
        layer.training = True


def _input_bytes(layers: Sequence[nn.Module]) -> int:
    """Bytes of a row of the inputs of all layers, which have the width of their first linear layer's input."""
    first = [next(module for module in layer.modules() if isinstance(module, nn.Linear)) for layer in layers]
    return sum(each.in_features * each.weight.element_size() for each in first)


def _product_bytes(layers: Sequence[nn.Module]) -> int:
    """Bytes of a row's inputs and outputs of all linear layers, and of the products of the experts that it uses."""
    modules = [module for layer in layers for module in layer.modules()]
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    dense = sum((each.in_features + each.out_features) * each.weight.element_size() for each in linears)
    mixtures: list[tuple[Any, Any]] = [
        (module, router) for module in modules if (router := router_of(module)) is not None
    ]
    return dense + sum(
        counts_of(router)[1] * sum(weights.shape[1:]) * weights.element_size()
        for module, router in mixtures
        for weights in weights_of(module.experts)
        if weights.ndim == 3  # [experts, outputs, inputs], or transposed; biases have no products
    )


@contextmanager
def _kept_bytes(leaves: Sequence[Tensor]) -> Iterator[dict[int, int]]:
    """What autograd keeps for the backward of the code inside: bytes by address. Neither parameters nor what shares
    memory with `leaves` counts."""
    found: dict[int, int] = {}
    trained = {leaf.untyped_storage().data_ptr() for leaf in leaves}

    def keep(tensor: Tensor) -> Tensor:
        whole: Any = tensor if tensor._base is None else tensor._base
        storage = tensor.untyped_storage()
        if not isinstance(whole, nn.Parameter) and storage.data_ptr() not in trained:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an operation that kept its own output would never be freed without a backward

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""Of glibc's mallopt."""
_AT_ONCE, _LATER = 2**20, 32 * 2**20
"""Bytes: larger blocks go back to the kernel when they are freed. Smaller ones may leave gaps that nothing fits in."""


def give_back_freed(*, at_once: bool) -> None:
    """Whether blocks from 1 MiB on go back to the kernel as soon as they are freed, or from 32 MiB on. A layer
    of Qwen3.5's kind with 4,224 rows then needed 0.65 instead of 1.1 GB, and 10 to 20 % more time (measured once, by
    hand). Without glibc nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            mallopt(option, _AT_ONCE if at_once else _LATER)
