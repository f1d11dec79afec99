"""Passes on their way through the model: slices, their loss and gradients, and what a pass adds up to.

A pass is cut into slices by a rule that looks at that pass alone; every slice has its own leaves of the
adapter's weights, and slices' gradients are added in order. Where slices run one at a time on a CPU, a pass therefore
gives the same bits whatever runs beside it. Deliberately knows nothing of model ids, requests or where results go.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.backends.base import Datum, InvalidRequest, PassResult, TrainingPass
from skyrl.backends.torch_lora import packing
from skyrl.backends.torch_lora.adapter import Adapter
from skyrl.backends.torch_lora.checks import loss_config
from skyrl.backends.torch_lora.device import failure_of
from skyrl.backends.torch_lora.logprobs import Targets, target_logprobs
from skyrl.backends.torch_lora.lora import LoraSegment
from skyrl.backends.torch_lora.losses import Loss, LossInputs, LossValue
from skyrl.backends.torch_lora.metrics import Tally
from skyrl.backends.torch_lora.model import BaseModel


@dataclass
class RunningPass:
    """A checked pass and what its slices have given so far; the gradient is flat, float32."""

    training_pass: TrainingPass
    adapter: Adapter
    loss: Loss
    tally: Tally = field(default_factory=Tally)
    logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)
    gradient: Tensor | None = None
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """The pass has failed; what its slices have given so far is dropped."""
        self.error, self.gradient = error, None

    def outcome(self) -> PassResult | Exception:
        if self.error is not None:
            return self.error
        notice = {} if self.loss.notice is None else {self.loss.notice: 1.0}
        return PassResult(self.logprobs, self.tally.metrics() | notice)


@dataclass(frozen=True)
class Slice:
    """Consecutive sequences of one pass; `last` marks the pass's last one."""

    running: RunningPass
    data: Sequence[Datum]
    tokens: int
    last: bool

    @property
    def loss(self) -> Loss:
        return self.running.loss


@dataclass(frozen=True)
class _SliceResult:
    logprobs: Tensor
    inputs: LossInputs
    value: LossValue
    gradient: Tensor | None


def slices_of(running: RunningPass, budget: int) -> Iterator[Slice]:
    """Slices of at most `budget` tokens, or of one sequence that is longer."""
    data = running.training_pass.data
    lengths = [len(datum.tokens) for datum in data]
    for run in packing.cut(lengths, budget):
        yield Slice(running, data[run.start : run.stop], sum(lengths[run.start : run.stop]), run.stop == len(data))


def run_micro_batch(base: BaseModel, batch: Sequence[Slice], *, backward: bool) -> None:
    """Run slices together; should that raise, run each alone, so that only the culprit's pass fails.

    A failure is the pass's outcome (OutOfMemory for a lack of memory); DeviceFault is raised.
    """
    batch = [piece for piece in batch if piece.running.error is None]
    if not batch:
        return
    failure: Exception | None = None
    results: list[_SliceResult] = []
    try:
        results = _forward_backward(base, batch, backward)
    except Exception as error:
        failure = failure_of(error, base.device)
    if failure is None:
        for piece, result in zip(batch, results, strict=True):
            _record_or_fail(piece, result, base.device)
    elif len(batch) > 1:  # after the handler: what the failed attempt held is free again
        for piece in batch:
            run_micro_batch(base, [piece], backward=backward)
    else:
        batch[0].running.fail(failure)


def _record_or_fail(piece: Slice, result: _SliceResult, device: torch.device) -> None:
    """Metrics and logprobs take memory too; a pass for which there is none leaves its model's gradient as it was."""
    try:
        _record(piece, result)
    except Exception as error:
        piece.running.fail(failure_of(error, device))


def _forward_backward(base: BaseModel, batch: Sequence[Slice], backward: bool) -> list[_SliceResult]:
    packed: list[packing.PackedSlice] = []
    segments: list[LoraSegment] = []
    for piece in batch:
        packed.append(packing.pack(piece.data, packed[-1].stop if packed else 0, base.device))
        adapter = piece.running.adapter
        segments.append(LoraSegment(packed[-1].start, packed[-1].stop, adapter.scale, adapter.leaves(backward)))
    inputs = [_loss_inputs(piece, base.device) for piece in batch]
    logprobs: list[Tensor] = []
    values: list[LossValue] = []
    with torch.set_grad_enabled(backward), base.active.use(segments):
        hidden = base.hidden_states(packed)
        for piece, segment, given in zip(batch, segments, inputs, strict=True):
            targets = Targets.of([datum.loss_inputs["target_tokens"] for datum in piece.data], base.device)
            logprobs.append(target_logprobs(hidden[segment.start : segment.stop], targets, base.lm_head, segment))
            training_pass = piece.running.training_pass
            config = loss_config(training_pass.loss_fn, piece.loss, training_pass.loss_config)
            values.append(piece.loss.function(logprobs[-1], given, config))
        gradients = _gradients(values, segments) if backward else [None] * len(batch)
    return [_SliceResult(*parts) for parts in zip(logprobs, inputs, values, gradients, strict=True)]


def _loss_inputs(piece: Slice, device: torch.device) -> LossInputs:
    """The slice's inputs, flattened to one entry per target in the order of `target_tokens`."""
    sizes = [datum.loss_inputs["target_tokens"].size for datum in piece.data]
    tensors: dict[str, Tensor] = {}
    for name in (*piece.loss.required, *piece.loss.optional):
        default = piece.loss.optional.get(name, 0.0)
        parts = [
            datum.loss_inputs[name].reshape(-1).astype(np.float32)
            if name in datum.loss_inputs
            else np.full(size, default, np.float32)
            for datum, size in zip(piece.data, sizes, strict=True)
        ]
        tensors[name] = torch.from_numpy(np.concatenate(parts)).to(device)
    owner = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(device)
    return LossInputs(tensors, owner, len(sizes))


def _gradients(values: Sequence[LossValue], segments: Sequence[LoraSegment]) -> list[Tensor]:
    """Each slice's gradient, flat float32 in the order of its adapter's buffers: one backward, separate leaves."""
    leaves = [[leaf for pair in segment.pairs.values() for leaf in pair] for segment in segments]
    found = iter(torch.autograd.grad([value.total for value in values], [leaf for own in leaves for leaf in own]))
    return [torch.cat([next(found).reshape(-1) for _ in own]) for own in leaves]


def _record(piece: Slice, result: _SliceResult) -> None:
    running = piece.running
    running.tally.add(result.value, piece.tokens, result.inputs.tensors.get("advantages"))
    if not math.isfinite(running.tally.loss):
        running.fail(
            InvalidRequest(
                f"loss_fn: the sum of {running.training_pass.loss_fn} is {running.tally.loss}, no gradient was "
                "kept; check loss_fn_inputs (logprobs far from the model's own overflow the ratio) and the "
                "learning rate of earlier steps"
            )
        )
        return
    shapes = [datum.loss_inputs["target_tokens"].shape for datum in piece.data]
    flat = np.split(result.logprobs.detach().cpu().numpy(), np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    running.logprobs += [part.reshape(shape) for part, shape in zip(flat, shapes, strict=True)]
    if result.gradient is not None:
        running.gradient = result.gradient if running.gradient is None else running.gradient.add_(result.gradient)
    if piece.last and running.gradient is not None:
        running.adapter.accumulate(running.gradient)
        running.gradient = None
