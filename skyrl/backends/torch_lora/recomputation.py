"""Gradient checkpointing: whether a micro-batch keeps what its decoder layers compute, or recomputes it in backward.

Both give the same bits on a CPU, so the choice may depend on the memory that is free at the moment. Knows transformers'
decoder layers, and the memory of device and host. Knows nothing of adapters or passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl.config.server import ConfigError

Setting = bool | Literal["auto"]
SHARE = 0.5
"""What is kept for the backward may take this share of the free memory. The rest is for logits, gradients, and what the
backward itself computes."""
FREE_ANYHOW = 64 * 2**20
"""Activations of at most these bytes are kept without a look at the memory, which takes 50 µs."""
MEASURED_ROWS = 64
"""A micro-batch of at least so many rows tells how much a row needs."""
MEASURED_AGAIN = 4
"""So does each micro-batch that has so many times the rows of the last one that was measured."""
FIRST_GUESS = 2.0
"""Until then: numbers that a layer keeps for a row, per input and output of its products. Qwen3, Qwen2 and Llama keep
1.1 to 1.5, Qwen3-MoE 0.8 to 1.7."""


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
        self._measured_rows = 0
        self._able = all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)
        if setting is True and not self._able:
            kind = type(layers[0]).__name__
            raise ConfigError(f"trainer.gradient_checkpointing: transformers cannot recompute {kind}: leave it out")
        # Nothing is random, because no dropout is in training mode.
        function = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        for layer in layers:
            switched: Any = layer
            switched.gradient_checkpointing = True  # transformers looks at this, and at `training`
            switched._gradient_checkpointing_func = function

    @contextmanager
    def of_micro_batch(self, rows: int, leaves: Sequence[Tensor] = ()) -> Iterator[None]:
        """The forward of a micro-batch runs inside. `leaves`: what it trains beside parameters; their memory lives
        anyhow, so it does not count."""
        if not torch.is_grad_enabled():
            yield
        elif self.pays(rows):
            with self._recomputed():
                yield
        elif self._setting == "auto" and rows >= max(MEASURED_ROWS, MEASURED_AGAIN * self._measured_rows):
            with _kept_bytes(leaves) as kept:
                yield
            self._per_row, self._measured_rows = sum(kept.values()) / rows, rows
        else:
            yield

    def pays(self, rows: int) -> bool:
        """Whether the decoder layers of a micro-batch of `rows` rows are computed again in its backward."""
        if isinstance(self._setting, bool):
            return self._setting
        if not self._able:
            return False
        needed = rows * self._per_row
        return self._anywhere(needed > FREE_ANYHOW and needed > SHARE * self._free())

    def _free(self) -> float:
        if self._device.type == "cuda":
            unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return torch.cuda.mem_get_info(self._device)[0] + unused
        return free_host_bytes() / self._ranks

    @contextmanager
    def _recomputed(self) -> Iterator[None]:
        """Only the layers are in training mode, not the modules inside them. So no dropout is."""
        for layer in self._layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer.training = False


def _product_bytes(layers: Sequence[nn.Module]) -> int:
    """Bytes of a row's inputs and outputs of all linear layers, and of the products of the experts that it uses."""
    modules = [module for layer in layers for module in layer.modules()]
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    dense = sum((each.in_features + each.out_features) * each.weight.element_size() for each in linears)
    mixtures: list[Any] = [module for module in modules if isinstance(getattr(module, "experts", None), nn.Module)]
    return dense + sum(
        module.gate.top_k * sum(weights.shape[1:]) * weights.element_size()
        for module in mixtures
        for weights in module.experts.parameters()  # [experts, outputs, inputs]
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
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def free_host_bytes(root: Path = Path("/")) -> float:
    """What the kernel says is available to new work, and at most what this process's cgroup (version 2) leaves."""
    free = _number((root / "proc/meminfo").read_text(), "MemAvailable:") * 1024.0
    group = root / "sys/fs/cgroup"
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            files = _number((group / "memory.stat").read_text(), "inactive_file ")
            free = min(free, int(limit) - int(used) + files)
    except OSError:  # no cgroup of version 2 is visible here
        pass
    return max(0.0, free)


def _number(text: str, start: str) -> int:
    return next(int(line.removeprefix(start).split()[0]) for line in text.splitlines() if line.startswith(start))
