"""Running slices: computes their losses and gradients, and adds them to the sums of their passes.

Every slice has its own leaves of the adapter's weights, and the gradients of slices are added in order. So where slices
run one at a time on a CPU, the results of a pass do not depend on other passes, to the last bit. Knows nothing of
requests or where results go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from skyrl.training.backends.base import OutOfMemory
from skyrl.training.backends.torch_lora import packing
from skyrl.training.backends.torch_lora.device import base_dtype, failure_of
from skyrl.training.backends.torch_lora.logprobs import Targets
from skyrl.training.backends.torch_lora.lora import LoraSegment
from skyrl.training.backends.torch_lora.lora_product import groups_adapters
from skyrl.training.backends.torch_lora.loss_inputs import MicroBatchLosses, losses_of, trained_entries
from skyrl.training.backends.torch_lora.model import BaseModel
from skyrl.training.backends.torch_lora.prefixes import lay_out
from skyrl.training.backends.torch_lora.recomputation import Recomputation
from skyrl.training.backends.torch_lora.running import Slice, not_finite
from skyrl.training.backends.torch_lora.scores import PartScore, Scores
from skyrl.training.backends.torch_lora.side_by_side import segment_of, side_by_side, together
from skyrl.training.backends.torch_lora.vision import Seen, VisionTower


@dataclass(frozen=True)
class SliceResult:
    """`parts`: of each pass that has sequences in the slice."""

    parts: Sequence[PartScore]
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
    except Exception as error:  # each slice runs again alone, or its pass fails with it
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
    keeps = backward and piece.trained
    recomputation = base.packed.recomputation if keeps and isinstance(failure, OutOfMemory) else None
    return recomputation if recomputation and recomputation.ran_out(piece.rows) else None


def record_or_fail(piece: Slice, result: SliceResult, device: torch.device) -> None:
    """Record a result. If that raises, `piece.running` fails."""
    try:
        _record(piece, result)
    except Exception as error:  # it is this pass's outcome; others go on
        piece.running.fail(failure_of(error, device))


@dataclass(frozen=True)
class MicroBatch:
    """Slices as `PackedModel.forward` takes them: `packed` has one entry for each slice, `targets` and `segments` one
    for each part of consecutive slices whose adapters are updated together; without that, one for each slice.
    `parts`: the slices of each segment. `losses`: of the slices' parts; of one kind together where adapters are updated
    together."""

    packed: list[packing.PackedSlice] = field(default_factory=list)
    targets: list[Targets] = field(default_factory=list)
    segments: list[LoraSegment] = field(default_factory=list)
    parts: Sequence[range] = ()
    losses: MicroBatchLosses = MicroBatchLosses()

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
        losses = losses_of(batch, device, joined=parts is not None)
        made = MicroBatch(parts=parts or [range(number, number + 1) for number in range(len(batch))], losses=losses)
        for piece, pictures in zip(batch, seen, strict=True):
            layout = lay_out(piece.running.tree, piece.indices)
            start = made.packed[-1].stop if made.packed else 0
            made.packed.append(packing.pack(piece.data, layout, start, device, pictures))
        for part in made.parts:
            slices, packed = batch[part.start : part.stop], made.packed[part.start : part.stop]
            start, stop = packed[0].start, packed[-1].stop
            arrays = [datum.loss_inputs["target_tokens"] for piece in slices for datum in piece.data]
            rows_of = [rows + (each.start - start) for each in packed for rows in each.layout.rows_of]
            trained = np.concatenate([trained_entries(each) for piece in slices for each in piece.parts])
            made.targets.append(Targets.of(arrays, rows_of, trained, device))
            made.segments.append(LoraSegment(start, stop, 1.0))
        return made


def look_at(tower: VisionTower | None, piece: Slice) -> Mapping[str, Seen]:
    """The pictures of a checked slice, by digest. Raises InvalidRequest as `VisionTower.look_at`."""
    found: dict[str, Seen] = {}
    if tower is not None:
        for part in piece.parts:
            numbered = zip(part.indices, part.data, strict=True)
            found |= tower.look_at(numbered, part.running.training_pass.files)
    return found


def _forward_backward(base: BaseModel, batch: Sequence[Slice], of_passes: bool) -> list[SliceResult]:
    """of_passes: whether the passes of the slices have a backward. Without a slice that is trained nothing is computed
    for one."""
    backward = of_passes and any(piece.trained for piece in batch)
    seen = [look_at(base.tower, piece) for piece in batch]
    parts = together(batch) if groups_adapters(base.device) else None
    made = MicroBatch.of(batch, seen, base.device, backward=backward, together=parts)
    gradients: Sequence[Tensor | None] = [None] * len(batch)
    with torch.set_grad_enabled(backward), base.packed.active.use(made.segments):
        logprobs = base.packed(made.packed, made.targets, made.segments)
        scores = Scores.of(made.losses, logprobs[0] if len(logprobs) == 1 else torch.cat(logprobs), backward=backward)
        if scores.gradient is not None:
            of_logprobs = scores.gradient.split([len(of_segment) for of_segment in logprobs])
            gradients = slice_gradients(logprobs, made.segments, starts=of_logprobs)
    of_parts = iter(scores.read())
    results: list[SliceResult] = []
    for piece, gradient in zip(batch, gradients, strict=True):
        own = [next(of_parts) for _ in piece.parts]
        if of_passes and not backward and not any(piece.running.trained):
            gradient = torch.zeros_like(piece.running.adapter.weights)  # the step after the pass has a gradient
        results.append(SliceResult(own, gradient if any(part.counts for part in own) else None))
    return results


def slice_gradients(
    totals: Sequence[Tensor],
    segments: Sequence[LoraSegment],
    also: Sequence[Tensor] = (),
    *,
    starts: Sequence[Tensor] | None = None,
    unused: bool = False,
) -> list[Tensor]:
    """The gradient of each slice of some segments, flat float32 in the order of its adapter's buffers, from one
    backward for all slices. `starts`: the gradients with respect to `totals`; None: totals are scalars. The backward
    goes to the tensors `also`, too. With `unused`, matrices that computed nothing get zeros; else they are an error."""
    leaves = [[leaf for pair in segment.pairs.values() for leaf in pair] for segment in segments]
    wanted = [*(leaf for of_slice in leaves for leaf in of_slice), *also]
    gradients = iter(torch.autograd.grad(totals, wanted, starts, materialize_grads=unused))
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
        of_pass.tally.add_all(of_part.tally)
        if of_part.counts and of_pass.error is None and math.isfinite(of_pass.tally.loss):
            of_pass.logprobs |= zip(part.indices, of_part.logprobs, strict=True)
            continue
        error = of_pass.error or not_finite(of_pass.training_pass, of_pass.tally.loss)
        of_pass.fail(error)
        # Then the gradient of this slice, or of an earlier one, has a part of it.
        if of_pass.training_pass.backward and (of_part.counts or of_pass.logprobs):
            running.fail(error)
    if running.error is None and result.gradient is not None:
        running.gradient = result.gradient if running.gradient is None else running.gradient.add_(result.gradient)
