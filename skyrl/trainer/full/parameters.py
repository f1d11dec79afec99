"""The parameters of the model in training, or one rank's shard of them: float32 weights, gradient and moments; and
AdamW on them, in place and in chunks, with torch's semantics and per-step hyper-parameters.

A backward leaves the gradients of a module's parameters in float32 buffers, tensor by tensor. Knows shapes and storage.
Knows nothing of the model's layers, or of batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from skyrl.trainer.lora.adapter import non_finite_gradient
from skyrl.trainer.lora.files import OPTIMIZER_PARTS
from skyrl.trainer.protocol import AdamParams


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


CHUNK = 2**24
"""Elements of a chunk. A step needs 4 bytes more for each element of one chunk."""


@dataclass(frozen=True)
class StepMemory:
    """All memory that a step needs besides weights and gradient: the moments, and one chunk."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    scratch: Tensor


def adamw_step(parameters: FullParameters, params: AdamParams) -> dict[str, float]:
    """Clip by global norm, step, clear the gradient. Formulas, metrics and errors are those of
    `lora.adapter.adamw_step`.

    All memory is allocated before the first number changes: so an error leaves parameters and gradient as they were.
    The first step allocates the moments (8 bytes per parameter); later steps allocate one chunk.
    """
    if parameters.gradient is None:
        return {}
    norm = gradient_norm(parameters)
    if not math.isfinite(norm):
        parameters.gradient = None
        raise non_finite_gradient(norm)
    return take_step(parameters, params, memory_for_step(parameters), norm)


def gradient_norm(parameters: FullParameters) -> float:
    """The norm of the accumulated gradient, which must exist."""
    assert parameters.gradient is not None
    return float(torch.linalg.vector_norm(parameters.gradient))


def memory_for_step(parameters: FullParameters) -> StepMemory:
    """Allocate. Changes nothing; the moments of the first step are zeros."""
    exp_avg, exp_avg_sq = (
        parameters.zeros() if moment is None else moment for moment in (parameters.exp_avg, parameters.exp_avg_sq)
    )
    return StepMemory(exp_avg, exp_avg_sq, torch.empty(min(CHUNK, parameters.numel), device=parameters.device))


@torch.no_grad()
def take_step(parameters: FullParameters, params: AdamParams, memory: StepMemory, norm: float) -> dict[str, float]:
    """Step and clear the gradient, whose norm (over all ranks) is `norm`. Returns the metrics. Allocates nothing."""
    gradient = parameters.gradient
    assert gradient is not None
    step = parameters.step + 1
    clip = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
    for weights, place in parameters.chunks(CHUNK):
        if clip != 1.0:
            gradient[place].mul_(clip)
        moments = memory.exp_avg[place], memory.exp_avg_sq[place]
        _step_chunk(weights, gradient[place], *moments, memory.scratch, step, params)
    parameters.exp_avg, parameters.exp_avg_sq = memory.exp_avg, memory.exp_avg_sq
    parameters.gradient, parameters.step = None, step
    return {"grad_norm": norm, "learning_rate": float(params.learning_rate), "optimizer_step": float(step)}


def _step_chunk(
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scratch: Tensor,
    step: int,
    params: AdamParams,
) -> None:
    exp_avg.lerp_(gradient, 1 - params.beta1)
    exp_avg_sq.mul_(params.beta2).addcmul_(gradient, gradient, value=1 - params.beta2)
    correction1 = 1 - params.beta1**step
    correction2 = math.sqrt(1 - params.beta2**step)
    denominator = torch.sqrt(exp_avg_sq, out=scratch[: len(gradient)]).div_(correction2).add_(params.eps)
    decay_factor = 1 - params.learning_rate * params.weight_decay
    if decay_factor != 1:
        weights.mul_(decay_factor)
    weights.addcdiv_(exp_avg, denominator, value=-params.learning_rate / correction1)
