"""The parameters of the model in training, or one rank's shard of them: float32 weights, gradient and moments.

A backward leaves the gradients of a module's parameters in float32 buffers, tensor by tensor. Knows shapes and storage.
Knows nothing of the model's layers, or of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from skyrl.trainer.lora.adapter import Buffers
from skyrl.trainer.lora.files import OPTIMIZER_PARTS


class GradientSink:
    """Adds the gradients of parameters to buffers, as soon as each gradient is there, and keeps no other gradient. So
    the gradient of a micro-batch never exists as a whole."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], local: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> None:
        """`local`: the part of a gradient that is added, which is this rank's shard where there are ranks."""
        self._views: Mapping[str, Tensor] = {}
        self._local = local
        self._parameters = dict(parameters)
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(self._adding(name))

    @contextmanager
    def into(self, views: Mapping[str, Tensor]) -> Iterator[None]:
        """A backward inside adds to these float32 tensors, by the parameters' names."""
        self._views = views
        try:
            yield
        finally:
            self._views = {}
            for parameter in self._parameters.values():
                parameter.grad = None

    def _adding(self, name: str) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._views[name].add_(self._local(parameter.grad))
                parameter.grad = None

        return add


class FullParameters(Buffers):
    """The weights of one model, with their gradient, moments and step count. The names are those of the module's
    parameters; a tied tensor has one name. Gradient and moments are flat float32 buffers, in the weights' order."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """Keeps the tensors of `weights`, and changes them in place: contiguous, float32, on `device`."""
        super().__init__(device)
        self.weights = dict(weights)
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in weights.items()}

    def chunks(self, size: int) -> Iterator[tuple[Tensor, slice]]:
        offset = 0
        for tensor in self.weights.values():
            flat = tensor.view(-1)
            for start in range(0, len(flat), size):
                chunk = flat[start : start + size]
                yield chunk, slice(offset + start, offset + start + len(chunk))
            offset += len(flat)

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
