"""The parameters of the model in training, or one rank's shard of them: float32 weights, gradient and moments.

Knows shapes and storage. Knows nothing of the model's layers, of batches, or of how a step is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from skyrl.training.backends.torch_lora.state import OPTIMIZER_PARTS


class FullParameters:
    """The weights of one model, with their gradient, moments and step count. The names are those of the module's
    parameters; a tied tensor has one name. Gradient and moments are flat float32 buffers, in the weights' order."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """Keeps the tensors of `weights`, and changes them in place: contiguous, float32, on `device`."""
        self.device = device
        self.weights = dict(weights)
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self.numel = sum(map(math.prod, self.shapes.values()))
        self.gradient: Tensor | None = None
        self.exp_avg: Tensor | None = None
        self.exp_avg_sq: Tensor | None = None
        self.step = 0

    def zeros(self) -> Tensor:
        """A new flat buffer."""
        return torch.zeros(self.numel, device=self.device)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named tensors that share memory with a flat buffer."""
        views: dict[str, Tensor] = {}
        offset = 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            views[name] = flat[offset : offset + size].view(shape)
            offset += size
        return views

    def chunks(self, size: int) -> Iterator[tuple[Tensor, slice]]:
        """All weights, in flat parts of at most `size` elements, each with its place in a flat buffer."""
        offset = 0
        for tensor in self.weights.values():
            flat = tensor.view(-1)
            for start in range(0, len(flat), size):
                chunk = flat[start : start + size]
                yield chunk, slice(offset + start, offset + start + len(chunk))
            offset += len(flat)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A flat buffer in main memory from named tensors. Raises ValueError unless names and shapes match exactly."""
        if set(tensors) != set(self.shapes):
            raise ValueError(f"tensor names differ from the model's: {sorted(set(tensors) ^ set(self.shapes))[:4]}")
        for name, shape in self.shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, not {shape}")
        flat = torch.empty(self.numel)
        for name, view in self.views(flat).items():
            view.copy_(tensors[name])
        return flat

    def accumulate(self, gradient: Tensor) -> None:
        """Add a pass's gradient (flat, float32); takes ownership of the tensor. Allocates nothing."""
        if self.gradient is None:
            self.gradient = gradient
        else:
            self.gradient.add_(gradient)

    def room_for(self, parts: Iterable[str]) -> dict[str, Tensor]:
        """Flat buffers for these of `OPTIMIZER_PARTS`: the ones that are there, and new ones for the others."""
        there = {part: getattr(self, part) for part in parts}
        return {part: self.zeros() if buffer is None else buffer for part, buffer in there.items()}

    @torch.no_grad()
    def load(
        self, weights: Mapping[str, Tensor], parts: Mapping[str, Tensor], room: Mapping[str, Tensor], step: int
    ) -> None:
        """Replace all numbers; what `parts` lacks is dropped. `room` is that of `room_for(parts)`, so that nothing is
        allocated here. The weights (names and shapes checked before) keep their memory, which the module shares."""
        for name, tensor in self.weights.items():
            tensor.copy_(weights[name])
        for part in OPTIMIZER_PARTS:
            setattr(self, part, room[part].copy_(parts[part]) if part in parts else None)
        self.step = step
