"""Running slices: computes their losses and gradients, and adds them to the sums of their passes.

Every slice has its own leaves of the adapter's weights, and the gradients of slices are added in order. So where slices
run one at a time on a CPU, the results of a pass do not depend on other passes, to the last bit. Knows nothing of
requests or where results go.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.training.backends.base import Datum, OutOfMemory
from skyrl.training.backends.torch_lora import packing
from skyrl.training.backends.torch_lora.checks import loss_config
from skyrl.training.backends.torch_lora.device import base_dtype, failure_of
from skyrl.training.backends.torch_lora.logprobs import Targets
from skyrl.training.backends.torch_lora.lora import LoraSegment
from skyrl.training.backends.torch_lora.lora_product import groups_adapters
from skyrl.training.backends.torch_lora.losses import LossInputs, LossValue
from skyrl.training.backends.torch_lora.model import BaseModel
from skyrl.training.backends.torch_lora.picture_targets import text_entries
from skyrl.training.backends.torch_lora.prefixes import lay_out
from skyrl.training.backends.torch_lora.recomputation import Recomputation
from skyrl.training.backends.torch_lora.running import Part, Slice, not_finite
from skyrl.training.backends.torch_lora.side_by_side import segment_of, side_by_side, together
from skyrl.training.backends.torch_lora.vision import Seen, VisionTower


@dataclass(frozen=True)
class PartResult:
    """`counts`: whether the gradient of the slice has that of the part."""

    logprobs: Tensor
    inputs: LossInputs
    value: LossValue
    counts: bool = True


@dataclass(frozen=True)
class SliceResult:
    parts: Sequence[PartResult]
    gradient: Tensor | None


def run_micro_batch(base: BaseModel, batch: Sequence[Slice], *, backward: bool) -> None:
    """Run slices together. If that raises, run each slice alone, so that only the one that causes the error fails. A
    slice alone that runs out of memory runs once more with its layers recomputed, if they were not and may be.

    The error becomes that of what the slice belongs to (OutOfMemory if memory was short). DeviceFault is raised.
    """
    failure: Exception | None = None
    left: list[Slice] = []
    results: list[SliceResult] = []
    try:
        left = [rest for piece in batch if (rest := piece.left()) is not None]
        if groups_adapters(base.device):
            left = side_by_side(left)
        results = _forward_backward(base, left, backward) if left else []
    except Exception as error:
        failure = failure_of(error, base.device)
    if failure is None:
        for piece, result in zip(left, results, strict=True):
            record_or_fail(piece, result, base.device)
    elif len(batch) > 1:  # outside the handler, where the failed attempt's tensors are free again
        for piece in batch:
            run_micro_batch(base, [piece], backward=backward)
    elif recomputation := _instead(base, batch[0], failure, backward):
        with recomputation.forced():
            run_micro_batch(base, batch, backward=backward)
    else:
        batch[0].running.fail(failure)


def _instead(base: BaseModel, piece: Slice, failure: Exception, backward: bool) -> Recomputation | None:
    """Of the layers, where recomputing them may help after this failure."""
    recomputation = base.packed.recomputation if backward and isinstance(failure, OutOfMemory) else None
    return recomputation if recomputation and recomputation.ran_out(piece.rows) else None


def record_or_fail(piece: Slice, result: SliceResult, device: torch.device) -> None:
    """Record a result. If there is no memory for metrics and logprobs, `piece.running` fails."""
    try:
        _record(piece, result)
    except Exception as error:
        piece.running.fail(failure_of(error, device))


@dataclass(frozen=True)
class MicroBatch:
    """Slices as `PackedModel.forward` takes them: `packed` has one entry for each slice, `targets` and `segments` one
    for each part of consecutive slices whose adapters are updated together; without that, one for each slice. `inputs`:
    of the losses of each slice's parts. `entries`: how many targets each slice has. `parts`: the slices of each
    segment."""

    packed: list[packing.PackedSlice] = field(default_factory=list)
    targets: list[Targets] = field(default_factory=list)
    segments: list[LoraSegment] = field(default_factory=list)
    inputs: list[list[LossInputs]] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    parts: Sequence[range] = ()

    @staticmethod
    def of(
        batch: Sequence[Slice],
        seen: Sequence[Mapping[str, Seen]],
        device: torch.device,
        *,
        backward: bool,
        together: Sequence[range] | None = None,
    ) -> MicroBatch:
        """With `backward`, each slice gets its own leaves of its adapter's weights. `seen`: the pictures of each
        slice. `together`: which slices are updated together; None: each alone."""
        made = MicroBatch.without_adapters(batch, seen, device, together)
        dtype = base_dtype(device)
        for index, part in enumerate(made.parts):
            slices, packed = batch[part.start : part.stop], made.packed[part.start : part.stop]
            made.segments[index] = segment_of(slices, packed, dtype, backward=backward)
        return made

    @staticmethod
    def without_adapters(
        batch: Sequence[Slice],
        seen: Sequence[Mapping[str, Seen]],
        device: torch.device,
        parts: Sequence[range] | None = None,
    ) -> MicroBatch:
        """`parts`: consecutive slices that make a segment; None: each slice makes one."""
        made = MicroBatch(parts=parts or [range(number, number + 1) for number in range(len(batch))])
        for piece, pictures in zip(batch, seen, strict=True):
            layout = lay_out(piece.running.tree, piece.indices)
            start = made.packed[-1].stop if made.packed else 0
            made.packed.append(packing.pack(piece.data, layout, start, device, pictures))
            made.inputs.append([loss_inputs(part, device) for part in piece.parts])
            made.entries.append(piece.entries)
        for part in made.parts:
            slices, packed = batch[part.start : part.stop], made.packed[part.start : part.stop]
            start, stop = packed[0].start, packed[-1].stop
            arrays = [datum.loss_inputs["target_tokens"] for piece in slices for datum in piece.data]
            rows_of = [rows + (each.start - start) for each in packed for rows in each.layout.rows_of]
            trained = np.concatenate([trained_entries(each) for piece in slices for each in piece.parts])
            made.targets.append(Targets.of(arrays, rows_of, trained, device))
            made.segments.append(LoraSegment(start, stop, 1.0))
        return made

    def of_slices(self, logprobs: Sequence[Tensor]) -> list[Tensor]:
        """The logprobs of each slice, from those of each segment."""
        return [
            of_slice
            for part, of_segment in zip(self.parts, logprobs, strict=True)
            for of_slice in ([of_segment] if len(part) == 1 else of_segment.split(self.entries[part.start : part.stop]))
        ]


def look_at(tower: VisionTower | None, piece: Slice) -> Mapping[str, Seen]:
    """The pictures of a checked slice, by digest. Raises InvalidRequest as `VisionTower.look_at`."""
    found: dict[str, Seen] = {}
    if tower is not None:
        for part in piece.parts:
            numbered = zip(part.indices, part.data, strict=True)
            found |= tower.look_at(numbered, part.running.training_pass.files)
    return found


def loss_of(part: Part, logprobs: Tensor, inputs: LossInputs) -> LossValue:
    """logprobs: of all entries of target_tokens."""
    training_pass = part.running.training_pass
    config = loss_config(training_pass.loss_fn, part.loss, training_pass.loss_config)
    if inputs.entries is not None:
        logprobs = logprobs.index_select(0, inputs.entries)
    return part.loss.function(logprobs, inputs, config)


def _forward_backward(base: BaseModel, batch: Sequence[Slice], backward: bool) -> list[SliceResult]:
    seen = [look_at(base.tower, piece) for piece in batch]
    parts = together(batch) if groups_adapters(base.device) else None
    made = MicroBatch.of(batch, seen, base.device, backward=backward, together=parts)
    with torch.set_grad_enabled(backward), base.packed.active.use(made.segments):
        logprobs = made.of_slices(base.packed(made.packed, made.targets, made.segments))
        scored = [_scored(*each) for each in zip(batch, logprobs, made.inputs, strict=True)]
        totals = [[part.value.total for part in parts if part.counts] for parts in scored]
        gradients = _gradients(totals, made) if backward else [None] * len(batch)
    return [SliceResult(*each) for each in zip(scored, gradients, strict=True)]


def _scored(piece: Slice, logprobs: Tensor, inputs: Sequence[LossInputs]) -> list[PartResult]:
    """The losses of a slice's parts. logprobs: [entries] of the slice, those of one part after those of another."""
    of_parts = logprobs.split([part.entries for part in piece.parts])
    found: list[PartResult] = []
    for part, lp, of_loss in zip(piece.parts, of_parts, inputs, strict=True):
        value = loss_of(part, lp, of_loss)
        found.append(PartResult(lp, of_loss, value, not piece.running.joins_passes or _is_finite(value.total, lp)))
    return found


def _is_finite(total: Tensor, logprobs: Tensor) -> bool:
    """Whether a loss and its gradient with respect to logprobs are finite."""
    if not total.isfinite():
        return False
    if not total.requires_grad:
        return True
    (gradient,) = torch.autograd.grad(total, logprobs, retain_graph=True)
    return bool(gradient.isfinite().all())


def _gradients(totals: Sequence[Sequence[Tensor]], made: MicroBatch) -> list[Tensor | None]:
    """Each slice's gradient; None for a slice without totals."""
    chosen = [any(totals[part.start : part.stop]) for part in made.parts]
    found: Iterator[Tensor | None] = iter(())
    if any(chosen):
        segments = [segment for segment, is_chosen in zip(made.segments, chosen, strict=True) if is_chosen]
        found = iter(slice_gradients([total for of_slice in totals for total in of_slice], segments))
    of_slices = [
        next(found) if is_chosen else None for part, is_chosen in zip(made.parts, chosen, strict=True) for _ in part
    ]
    return [gradient if of_slice else None for gradient, of_slice in zip(of_slices, totals, strict=True)]


def loss_inputs(part: Part, device: torch.device) -> LossInputs:
    """The inputs of a part's loss, flattened to one entry per target in the order of `target_tokens`, without the
    targets that are tokens of pictures."""
    names = (*part.loss.required, *part.loss.optional)
    data = part.data
    arrays = {name: _entries(part, name) for name in names}
    sizes = [datum.loss_inputs["target_tokens"].size for datum in data]
    datum_of_entry = np.repeat(np.arange(len(sizes)), sizes)
    text = text_entries(data)
    if text is None:
        entries = None
    else:
        arrays, datum_of_entry = {name: array[text] for name, array in arrays.items()}, datum_of_entry[text]
        entries = torch.from_numpy(np.flatnonzero(text)).to(device)
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return LossInputs(tensors, torch.from_numpy(datum_of_entry).to(device), len(sizes), entries)


def trained_entries(part: Part) -> npt.NDArray[np.bool_]:
    """The entries where the part's loss may have a gradient: bool [M]. At least one, so that the loss always has a
    graph. Without a backward they are the same, so that the logprobs are the same bits."""
    trained = part.loss.trained
    found = np.ones(part.entries, np.bool_) if trained is None else _entries(part, trained) != 0
    if (text := text_entries(part.data)) is not None:
        found &= text
    if not found.any():
        found[0] = True
    return found


def _entries(part: Part, name: str) -> npt.NDArray[np.float32]:
    """One input of the part, float32 [M]."""
    default = part.loss.optional.get(name, 0.0)
    return np.concatenate(
        [
            datum.loss_inputs[name].reshape(-1).astype(np.float32)
            if name in datum.loss_inputs
            else np.full(datum.loss_inputs["target_tokens"].size, default, np.float32)
            for datum in part.data
        ]
    )


def slice_gradients(
    totals: Sequence[Tensor], segments: Sequence[LoraSegment], also: Sequence[Tensor] = (), *, unused: bool = False
) -> list[Tensor]:
    """The gradient of each slice of some segments, flat float32 in the order of its adapter's buffers, from one
    backward for all slices. The backward goes to the tensors `also`, too. With `unused`, matrices that computed nothing
    get zeros; else they are an error."""
    leaves = [[leaf for pair in segment.pairs.values() for leaf in pair] for segment in segments]
    wanted = [*(leaf for of_slice in leaves for leaf in of_slice), *also]
    gradients = iter(torch.autograd.grad(totals, wanted, materialize_grads=unused))
    found: list[Tensor] = []
    for segment, of_segment in zip(segments, leaves, strict=True):
        own = [next(gradients) for _ in of_segment]
        if segment.stack is not None:
            found += segment.stack.gradients(own)
        elif own:
            found.append(torch.cat([gradient.reshape(-1) for gradient in own]).float())
    return found


def _record(piece: Slice, result: SliceResult) -> None:
    running = piece.running
    for part, of_part in zip(piece.parts, result.parts, strict=True):
        of_pass = part.running
        of_pass.tally.add(of_part.value, part.tokens, part.rows, of_part.inputs.tensors.get("advantages"))
        if of_part.counts and of_pass.error is None and math.isfinite(of_pass.tally.loss):
            of_pass.logprobs |= zip(part.indices, by_datum(of_part.logprobs, part.data), strict=True)
            continue
        error = of_pass.error or not_finite(of_pass.training_pass, of_pass.tally.loss)
        of_pass.fail(error)
        # Then the gradient of this slice, or of an earlier one, has a part of it.
        if of_pass.training_pass.backward and (of_part.counts or of_pass.logprobs):
            running.fail(error)
    if running.error is None and result.gradient is not None:
        running.gradient = result.gradient if running.gradient is None else running.gradient.add_(result.gradient)


def by_datum(logprobs: Tensor, data: Sequence[Datum]) -> list[npt.NDArray[np.float32]]:
    """A slice's logprobs [entries], for each sequence in the shape of its target_tokens."""
    shapes = [datum.loss_inputs["target_tokens"].shape for datum in data]
    flat = np.split(logprobs.detach().cpu().numpy(), np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return [part.reshape(shape) for part, shape in zip(flat, shapes, strict=True)]
