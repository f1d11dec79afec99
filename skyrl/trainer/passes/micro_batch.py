"""Running micro-batches: computes losses and gradients of their items, and adds them to the sums of their passes.

Every item has its own leaves of the adapter's weights, and the gradients of items are added in order. So where items
run one at a time on a CPU, the results of a pass do not depend on other passes, to the last bit.

Passes of one adapter run as one if their sequences have prefixes in common. Their sequences have one tree, so that rows
are shared between passes; each pass keeps its own loss, metrics and failures. A row that several passes share counts
for the first of them. Their gradients come as one sum. So if a pass is found to be at fault after the sum has a part of
it, the sum is dropped and the passes run again apart. If the first of them fails without that, none counts the row.
Knows nothing of requests or where results go.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from skyrl.trainer.device import base_dtype, failure_of
from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.lora.products import groups_adapters
from skyrl.trainer.losses import Tally
from skyrl.trainer.model.base_model import BaseModel
from skyrl.trainer.model.logprobs import Targets
from skyrl.trainer.model.recomputation import Recomputation
from skyrl.trainer.passes.micro_batch_losses import MicroBatchLosses, PartScore, Scores, losses_of, trained_entries
from skyrl.trainer.passes.pass_run import (
    MicroBatchItem,
    PassRun,
    PassShare,
    SinglePassRun,
    items_of,
    not_finite,
    segment_of,
    side_by_side,
    together,
)
from skyrl.trainer.protocol import Datum, OutOfMemory
from skyrl.trainer.rows import packing
from skyrl.trainer.rows.prefixes import lay_out
from skyrl.trainer.vision import Seen, VisionTower


@dataclass(frozen=True)
class ItemResult:
    """`parts`: of each pass that has sequences in the slice."""

    parts: Sequence[PartScore]
    gradient: Tensor | None


def run_micro_batch(base: BaseModel, batch: Sequence[MicroBatchItem], *, backward: bool) -> None:
    """Run slices together. If that raises, run each slice alone, so that only the one that causes the error fails. A
    slice alone that runs out of memory runs once more with its layers recomputed, if they were not and may be.

    The error becomes that of what the slice belongs to (OutOfMemory if memory was short). DeviceFault is raised.
    """
    failure: Exception | None = None
    left: list[MicroBatchItem] = []
    results: list[ItemResult] = []
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


def _instead(base: BaseModel, piece: MicroBatchItem, failure: Exception, backward: bool) -> Recomputation | None:
    """Of the layers, where recomputing them may help after this failure."""
    keeps = backward and piece.trained
    recomputation = base.packed.recomputation if keeps and isinstance(failure, OutOfMemory) else None
    return recomputation if recomputation and recomputation.ran_out(piece.rows) else None


def record_or_fail(piece: MicroBatchItem, result: ItemResult, device: torch.device) -> None:
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

    packed: list[packing.PackedItem] = field(default_factory=list)
    targets: list[Targets] = field(default_factory=list)
    segments: list[LoraSegment] = field(default_factory=list)
    parts: Sequence[range] = ()
    losses: MicroBatchLosses = MicroBatchLosses()

    @staticmethod
    def of(
        batch: Sequence[MicroBatchItem],
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
        batch: Sequence[MicroBatchItem],
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


def look_at(tower: VisionTower | None, piece: MicroBatchItem) -> Mapping[str, Seen]:
    """The pictures of a checked slice, by digest. Raises InvalidRequest as `VisionTower.look_at`."""
    found: dict[str, Seen] = {}
    if tower is not None:
        for part in piece.parts:
            numbered = zip(part.indices, part.data, strict=True)
            found |= tower.look_at(numbered, part.running.training_pass.files)
    return found


def _forward_backward(base: BaseModel, batch: Sequence[MicroBatchItem], of_passes: bool) -> list[ItemResult]:
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
            gradients = item_gradients(logprobs, made.segments, starts=of_logprobs)
    of_parts = iter(scores.read())
    results: list[ItemResult] = []
    for piece, gradient in zip(batch, gradients, strict=True):
        own = [next(of_parts) for _ in piece.parts]
        if of_passes and not backward and not any(piece.running.trained):
            gradient = torch.zeros_like(piece.running.adapter.weights)  # the step after the pass has a gradient
        results.append(ItemResult(own, gradient if any(part.counts for part in own) else None))
    return results


def item_gradients(
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


def _record(piece: MicroBatchItem, result: ItemResult) -> None:
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


logger = logging.getLogger(__name__)


@dataclass
class JoinedPasses(PassRun):
    """Passes of one adapter. `data`: the sequences of the first pass, then those of the second, and so on."""

    members: Sequence[SinglePassRun]

    joins_passes = True

    def __post_init__(self) -> None:
        self._data = [datum for member in self.members for datum in member.data]
        self._starts = [0, *accumulate(len(member.data) for member in self.members)]

    @property
    def data(self) -> Sequence[Datum]:
        return self._data

    def _find_trained(self) -> Sequence[bool]:
        return [trained for member in self.members for trained in member.trained]

    def parts(self, indices: Sequence[int], rows: int) -> list[PassShare]:
        found: list[PassShare] = []
        stop, counted = 0, 0
        for number, group in groupby(indices, self._member):
            own = [index - self._starts[number] for index in group]
            stop += len(own)
            together = rows if stop == len(indices) else self.tree.rows(indices[:stop])
            found.append(PassShare(self.members[number], own, together - counted))
            counted = together
        return found

    def left(self, indices: Sequence[int]) -> Sequence[int]:
        if self.error is not None:
            return []
        return [index for index in indices if self.members[self._member(index)].error is None]

    @property
    def share_rows(self) -> bool:
        """Whether sequences of different passes have rows in common."""
        return any(len(set(map(self._member, family))) > 1 for family in self.tree.families)

    def divide_tree(self) -> None:
        """Give each pass its part of the tree, if passes share no rows."""
        for member, (start, stop) in zip(self.members, pairwise(self._starts), strict=True):
            member.tree = self.tree.of_range(start, stop)

    def begin_again(self) -> list[SinglePassRun]:
        """The passes that have not failed themselves, without results."""
        left = [member for member in self.members if member.error is None]
        for member in left:
            member.tally, member.logprobs = Tally(), {}
        return left

    def _member(self, index: int) -> int:
        return bisect_right(self._starts, index) - 1


def join_passes(passes: Sequence[SinglePassRun], device: torch.device) -> list[PassRun]:
    """What runs: the passes of an adapter as one if they have prefixes in common, other passes as they are. Adapters
    come in the order of their first passes. DeviceFault is raised."""
    of_adapter: dict[int, list[SinglePassRun]] = {}
    for each in passes:
        of_adapter.setdefault(id(each.adapter), []).append(each)
    found: list[PassRun] = []
    for members in of_adapter.values():
        together = _joined(members, device) if len(members) > 1 else None
        found += members if together is None else [together]
    return found


def _joined(members: Sequence[SinglePassRun], device: torch.device) -> JoinedPasses | None:
    """None if the passes share no rows, or if there is no memory to find that out."""
    try:
        together = JoinedPasses(members[0].adapter, members)
        if together.share_rows:
            return together
        together.divide_tree()
        return None
    except Exception as error:  # passes that run apart are right, too; one that cannot be divided fails by itself
        if not isinstance(failure_of(error, device), OutOfMemory):
            logger.exception("the rows that passes share could not be found: they run apart")
        return None


def finish(base: BaseModel, finished: Sequence[PassRun], budget: int, *, backward: bool) -> None:
    """After the last slice of each: add its gradient to the adapter's. A pass whose gradient has no finite norm fails.
    Joined passes that have failed as one, or whose gradient has no finite norm, run again apart; then each fails or
    adds its gradient alone. Waits for the device once, unless some run again. DeviceFault is raised."""
    for running, is_finite in zip(finished, _have_finite_norms(finished, base.device), strict=True):
        if running.error is None and is_finite:
            running.add_gradient()
            continue
        running.gradient = None
        if isinstance(running, JoinedPasses):
            for member in running.begin_again():
                for piece in items_of(member, budget, base.device):
                    run_micro_batch(base, [piece], backward=backward)
                finish(base, [member], budget, backward=backward)
        elif isinstance(running, SinglePassRun) and running.error is None:
            running.fail(not_finite(running.training_pass, running.tally.loss))


def _have_finite_norms(finished: Sequence[PassRun], device: torch.device) -> list[bool]:
    """Whether the norm of each gradient is finite, as the optimizer's step asks; True without a gradient. One whose
    norm cannot be computed fails."""
    gradients = [each.gradient for each in finished if each.gradient is not None]
    if not gradients:
        return [True] * len(finished)
    try:
        of_each = torch._foreach_norm(gradients)  # type: ignore[attr-defined]
        norms = iter(torch.stack(of_each).tolist())
    except Exception as error:  # the outcome of one pass; others go on
        failure = failure_of(error, device)
    else:
        return [each.gradient is None or math.isfinite(next(norms)) for each in finished]
    if len(finished) > 1:
        return [is_finite for each in finished for is_finite in _have_finite_norms([each], device)]
    finished[0].fail(failure)
    return [True]
