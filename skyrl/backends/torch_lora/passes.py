"""Running passes: cuts them into slices, computes each slice's loss and gradient, and sums up each pass.

How a pass is cut depends on that pass alone. Every slice has its own leaves of the adapter's weights, and the gradients
of slices are added in order. So where slices run one at a time on a CPU, the results of a pass do not depend on other
passes, to the last bit. Knows nothing of requests or where results go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.backends.base import Datum, InvalidRequest, PassResult, TrainingPass
from skyrl.backends.torch_lora import packing
from skyrl.backends.torch_lora.adapter import Adapter
from skyrl.backends.torch_lora.checks import loss_config
from skyrl.backends.torch_lora.device import failure_of
from skyrl.backends.torch_lora.logprobs import Targets
from skyrl.backends.torch_lora.lora import LoraSegment
from skyrl.backends.torch_lora.losses import Loss, LossInputs, LossValue
from skyrl.backends.torch_lora.metrics import Tally
from skyrl.backends.torch_lora.model import BaseModel
from skyrl.backends.torch_lora.prefixes import PrefixTree, lay_out, prefix_tree


@dataclass
class RunningPass:
    """A checked pass and the sums over its finished slices. `logprobs`: by the index of the sequence. `gradient`: flat,
    float32."""

    training_pass: TrainingPass
    adapter: Adapter
    loss: Loss
    tally: Tally = field(default_factory=Tally)
    logprobs: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    gradient: Tensor | None = None
    error: Exception | None = None

    @cached_property
    def tree(self) -> PrefixTree:
        """The common prefixes of the pass's sequences."""
        return prefix_tree(self.training_pass.data)

    def fail(self, error: Exception) -> None:
        """Fail the pass, and drop the gradient of its finished slices."""
        self.error, self.gradient = error, None

    def outcome(self) -> PassResult | Exception:
        if self.error is not None:
            return self.error
        return result_of(self.loss, self.logprobs, self.tally)


@dataclass(frozen=True)
class Slice:
    """Sequences of one pass that run together: their `indices`, ascending. `rows`: how many rows they have, each common
    prefix once. `last` marks the last slice of the pass."""

    running: RunningPass
    indices: Sequence[int]
    rows: int
    last: bool

    @staticmethod
    def of(running: RunningPass, indices: Sequence[int], *, last: bool) -> Slice:
        return Slice(running, indices, running.tree.rows(indices), last)

    @property
    def loss(self) -> Loss:
        return self.running.loss

    @property
    def data(self) -> list[Datum]:
        return [self.running.training_pass.data[index] for index in self.indices]

    @property
    def tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)


@dataclass(frozen=True)
class SliceResult:
    logprobs: Tensor
    inputs: LossInputs
    value: LossValue
    gradient: Tensor | None


def slices_of(running: RunningPass, budget: int, device: torch.device) -> list[Slice]:
    """Slices of at most `budget` rows. A longer sequence has its own slice. If that raises, for example because memory
    is short, the pass fails and has no slices. DeviceFault is raised."""
    try:
        parts = running.tree.cut(budget)
        return [Slice.of(running, part, last=number == len(parts)) for number, part in enumerate(parts, start=1)]
    except Exception as error:
        running.fail(failure_of(error, device))
        return []


def run_micro_batch(base: BaseModel, batch: Sequence[Slice], *, backward: bool) -> None:
    """Run slices together. If that raises, run each slice alone, so that only the pass that causes the error fails.

    The error becomes the outcome of the pass (OutOfMemory if memory was short). DeviceFault is raised.
    """
    batch = [piece for piece in batch if piece.running.error is None]
    if not batch:
        return
    failure: Exception | None = None
    results: list[SliceResult] = []
    try:
        results = _forward_backward(base, batch, backward)
    except Exception as error:
        failure = failure_of(error, base.device)
    if failure is None:
        for piece, result in zip(batch, results, strict=True):
            record_or_fail(piece, result, base.device)
    elif len(batch) > 1:  # outside the handler, where the failed attempt's tensors are free again
        for piece in batch:
            run_micro_batch(base, [piece], backward=backward)
    else:
        batch[0].running.fail(failure)


def record_or_fail(piece: Slice, result: SliceResult, device: torch.device) -> None:
    """Record a result. If there is no memory for metrics and logprobs, the pass fails; its model's gradient stays."""
    try:
        _record(piece, result)
    except Exception as error:
        piece.running.fail(failure_of(error, device))


@dataclass(frozen=True)
class MicroBatch:
    """Slices as `PackedModel.forward` takes them: one entry for each slice in each list. `inputs`: of their losses."""

    packed: list[packing.PackedSlice] = field(default_factory=list)
    targets: list[Targets] = field(default_factory=list)
    segments: list[LoraSegment] = field(default_factory=list)
    inputs: list[LossInputs] = field(default_factory=list)

    @staticmethod
    def of(batch: Sequence[Slice], device: torch.device, *, backward: bool) -> MicroBatch:
        """With `backward`, each slice gets its own leaves of its adapter's weights."""
        made = MicroBatch.without_adapters(batch, device)
        for index, piece in enumerate(batch):
            packed, adapter = made.packed[index], piece.running.adapter
            made.segments[index] = LoraSegment(packed.start, packed.stop, adapter.scale, adapter.leaves(backward))
        return made

    @staticmethod
    def without_adapters(batch: Sequence[Slice], device: torch.device) -> MicroBatch:
        made = MicroBatch()
        for piece in batch:
            data, layout = piece.data, lay_out(piece.running.tree, piece.indices)
            packed = packing.pack(data, layout, made.packed[-1].stop if made.packed else 0, device)
            made.packed.append(packed)
            arrays = [datum.loss_inputs["target_tokens"] for datum in data]
            made.targets.append(Targets.of(arrays, layout.rows_of, trained_entries(piece), device))
            made.segments.append(LoraSegment(packed.start, packed.stop, 1.0))
            made.inputs.append(loss_inputs(piece, device))
        return made


def loss_of(piece: Slice, logprobs: Tensor, inputs: LossInputs) -> LossValue:
    training_pass = piece.running.training_pass
    config = loss_config(training_pass.loss_fn, piece.loss, training_pass.loss_config)
    return piece.loss.function(logprobs, inputs, config)


def _forward_backward(base: BaseModel, batch: Sequence[Slice], backward: bool) -> list[SliceResult]:
    made = MicroBatch.of(batch, base.device, backward=backward)
    with torch.set_grad_enabled(backward), base.packed.active.use(made.segments):
        logprobs = base.packed(made.packed, made.targets, made.segments)
        values = [loss_of(*each) for each in zip(batch, logprobs, made.inputs, strict=True)]
        totals = [value.total for value in values]
        gradients = slice_gradients(totals, made.segments) if backward else [None] * len(batch)
    return [SliceResult(*parts) for parts in zip(logprobs, made.inputs, values, gradients, strict=True)]


def loss_inputs(piece: Slice, device: torch.device) -> LossInputs:
    """The slice's inputs, flattened to one entry per target in the order of `target_tokens`."""
    names = (*piece.loss.required, *piece.loss.optional)
    tensors = {name: torch.from_numpy(_entries(piece, name)).to(device) for name in names}
    sizes = [datum.loss_inputs["target_tokens"].size for datum in piece.data]
    datum_of_entry = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(device)
    return LossInputs(tensors, datum_of_entry, len(sizes))


def trained_entries(piece: Slice) -> npt.NDArray[np.bool_]:
    """The entries where the slice's loss may have a gradient: bool [M]. At least one, so that the loss always has a
    graph. Without a backward they are the same, so that the logprobs are the same bits."""
    if piece.loss.trained is not None:
        found = _entries(piece, piece.loss.trained) != 0
    else:
        found = np.ones(sum(datum.loss_inputs["target_tokens"].size for datum in piece.data), np.bool_)
    if not found.any():
        found[0] = True
    return found


def _entries(piece: Slice, name: str) -> npt.NDArray[np.float32]:
    """One input of the slice, float32 [M]."""
    default = piece.loss.optional.get(name, 0.0)
    return np.concatenate(
        [
            datum.loss_inputs[name].reshape(-1).astype(np.float32)
            if name in datum.loss_inputs
            else np.full(datum.loss_inputs["target_tokens"].size, default, np.float32)
            for datum in piece.data
        ]
    )


def slice_gradients(
    totals: Sequence[Tensor], segments: Sequence[LoraSegment], also: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Each slice's gradient, flat float32 in the order of its adapter's buffers, from one backward for all slices. The
    backward goes to the tensors `also`, too."""
    leaves = [[leaf for pair in segment.pairs.values() for leaf in pair] for segment in segments]
    gradients = iter(torch.autograd.grad(totals, [*(leaf for of_slice in leaves for leaf in of_slice), *also]))
    return [torch.cat([next(gradients).reshape(-1) for _ in of_slice]) for of_slice in leaves if of_slice]


def _record(piece: Slice, result: SliceResult) -> None:
    running = piece.running
    running.tally.add(result.value, piece.tokens, piece.rows, result.inputs.tensors.get("advantages"))
    if not math.isfinite(running.tally.loss):
        running.fail(not_finite(running.training_pass, running.tally.loss))
        return
    running.logprobs |= zip(piece.indices, by_datum(result.logprobs, piece.data), strict=True)
    if result.gradient is not None:
        running.gradient = result.gradient if running.gradient is None else running.gradient.add_(result.gradient)
    if piece.last and running.gradient is not None:
        running.adapter.accumulate(running.gradient)
        running.gradient = None


def not_finite(training_pass: TrainingPass, loss: float) -> InvalidRequest:
    """The failure of a pass whose loss is NaN or infinite."""
    return InvalidRequest(
        f"loss_fn: the sum of {training_pass.loss_fn} is {loss}, no gradient was kept; check loss_fn_inputs (logprobs "
        "far from the model's own overflow the ratio) and the learning rate of earlier steps"
    )


def by_datum(logprobs: Tensor, data: Sequence[Datum]) -> list[npt.NDArray[np.float32]]:
    """A slice's logprobs [entries], for each sequence in the shape of its target_tokens."""
    shapes = [datum.loss_inputs["target_tokens"].shape for datum in data]
    flat = np.split(logprobs.detach().cpu().numpy(), np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return [part.reshape(shape) for part, shape in zip(flat, shapes, strict=True)]


def result_of(loss: Loss, logprobs: Mapping[int, npt.NDArray[np.float32]], tally: Tally) -> PassResult:
    """logprobs: of every sequence of the pass, by its index."""
    notice = {} if loss.notice is None else {loss.notice: 1.0}
    return PassResult([logprobs[index] for index in range(len(logprobs))], tally.metrics() | notice)
