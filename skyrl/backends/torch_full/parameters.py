"""All parameters of the model in training: float32 weights, gradient accumulator and moments, each in one flat buffer
with named views.

Knows shapes and storage. Knows nothing of the model's layers, of batches, or of how a step is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


class FullParameters:
    """The weights of one model, with their gradient, moments and step count. The names are those of the module's
    parameters; a tied tensor has one name."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """Copies `weights`."""
        self.device = device
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self.weights = self.pack(weights)
        self.gradient: Tensor | None = None
        self.exp_avg: Tensor | None = None
        self.exp_avg_sq: Tensor | None = None
        self.step = 0

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named tensors that share memory with `flat`, a buffer as long as `weights`."""
        views: dict[str, Tensor] = {}
        offset = 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            views[name] = flat[offset : offset + size].view(shape)
            offset += size
        return views

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A flat float32 buffer on the model's device from named tensors. Raises ValueError unless names and shapes
        match exactly."""
        if set(tensors) != set(self.shapes):
            raise ValueError(f"tensor names differ from the model's: {sorted(set(tensors) ^ set(self.shapes))[:4]}")
        for name, shape in self.shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, not {shape}")
        flat = torch.empty(sum(map(math.prod, self.shapes.values())), device=self.device)
        for name, view in self.views(flat).items():
            view.copy_(tensors[name])
        return flat

    def accumulate(self, gradient: Tensor) -> None:
        """Add a pass's gradient (flat, float32); takes ownership of the tensor. Allocates nothing."""
        if self.gradient is None:
            self.gradient = gradient
        else:
            self.gradient.add_(gradient)

    def load(
        self,
        weights: Mapping[str, Tensor],
        exp_avg: Tensor | None,
        exp_avg_sq: Tensor | None,
        gradient: Tensor | None,
        step: int,
    ) -> None:
        """Replace all numbers. The weights (names and shapes checked before) keep their memory, which the module
        shares."""
        for name, view in self.views(self.weights).items():
            view.copy_(weights[name])
        self.exp_avg, self.exp_avg_sq, self.gradient, self.step = exp_avg, exp_avg_sq, gradient, step
