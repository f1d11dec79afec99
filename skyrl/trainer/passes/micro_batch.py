"""Micro-batches: what the model gets of their items, and what items give to the sums of their passes.

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

from skyrl.trainer.device import HOST, base_dtype, failure_of
from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.lora.products import groups_adapters
from skyrl.trainer.losses import Tally
from skyrl.trainer.model.logprobs import Targets
from skyrl.trainer.passes.micro_batch_losses import MicroBatchLosses, PartScore, losses_of, trained_entries
from skyrl.trainer.passes.pass_run import (
    MicroBatchItem,
    PassRun,
    PassShare,
    ShareResult,
    SinglePassRun,
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
        alone: bool,
    ) -> MicroBatch:
        """With `backward`, each slice gets its own leaves of its adapter's weights. `seen`: the pictures of each
        slice. `alone`: there are no other ranks, so adapters may be updated together (`grouped`)."""
        parts = together(batch) if alone and groups_adapters(device) else None
        made = MicroBatch.without_adapters(batch, seen, device, parts)
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


def grouped(batch: list[MicroBatchItem], device: torch.device) -> list[MicroBatchItem]:
    """In the order in which adapters can be updated together, where the device gains by that."""
    return side_by_side(batch) if groups_adapters(device) else batch


def look_at(tower: VisionTower | None, piece: MicroBatchItem) -> Mapping[str, Seen]:
    """The pictures of a checked slice, by digest. Raises InvalidRequest as `VisionTower.look_at`."""
    found: dict[str, Seen] = {}
    if tower is not None:
        for part in piece.parts:
            numbered = zip(part.indices, part.data, strict=True)
            found |= tower.look_at(numbered, part.running.training_pass.files)
    return found


def item_gradients(
    logprobs: Sequence[Tensor],
    segments: Sequence[LoraSegment],
    starts: Sequence[Tensor],
    *,
    also: Sequence[Tensor] = (),
    unused: bool = False,
) -> list[Tensor]:
    """The gradient of each slice of some segments, flat float32 in the order of its adapter's buffers, from one
    backward for all slices. `starts`: the gradients with respect to `logprobs`, float32 [entries] each. The backward
    goes to the tensors `also`, too. With `unused`, matrices that computed nothing get zeros; else they are an error."""
    leaves = [[leaf for pair in segment.pairs.values() for leaf in pair] for segment in segments]
    wanted = [*(leaf for of_slice in leaves for leaf in of_slice), *also]
    gradients = iter(torch.autograd.grad(logprobs, wanted, starts, materialize_grads=unused))
    found: list[Tensor] = []
    for segment, of_segment in zip(segments, leaves, strict=True):
        own = [next(gradients) for _ in of_segment]
        if segment.stack is not None:
            found += segment.stack.gradients(own)
        elif own:
            found.append(torch.cat([gradient.reshape(-1) for gradient in own]).float())
    return found


def record(piece: MicroBatchItem, result: ItemResult) -> None:
    """Add what a slice has given to its passes, and its gradient to that of what it belongs to."""
    running = piece.running
    for part, of_part in zip(piece.parts, result.parts, strict=True):
        of_pass = part.running
        of_pass.tally.add_all(of_part.tally)
        if of_part.counts and of_pass.error is None and math.isfinite(of_pass.tally.loss):
            of_pass.results.append(ShareResult(part.indices, of_part.logprobs, of_part.tally))
            continue
        error = of_pass.error or of_part.error or not_finite(of_pass.training_pass, of_pass.tally.loss)
        of_pass.fail(error)
        # Then the gradient of this slice, or of an earlier one, has a part of it.
        if of_pass.training_pass.backward and (of_part.counts or of_pass.results):
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
            member.tally, member.results = Tally(), []
        return left

    def _member(self, index: int) -> int:
        return bisect_right(self._starts, index) - 1


def join_passes(passes: Sequence[SinglePassRun]) -> list[PassRun]:
    """What runs: the passes of an adapter as one if they have prefixes in common, other passes as they are. Adapters
    come in the order of their first passes."""
    of_adapter: dict[str, list[SinglePassRun]] = {}
    for each in passes:
        of_adapter.setdefault(each.training_pass.model_id, []).append(each)
    found: list[PassRun] = []
    for members in of_adapter.values():
        together = _joined(members) if len(members) > 1 else None
        found += members if together is None else [together]
    return found


def _joined(members: Sequence[SinglePassRun]) -> JoinedPasses | None:
    """None if the passes share no rows, or if there is no memory to find that out."""
    try:
        together = JoinedPasses(members[0].model, members)
        if together.share_rows:
            return together
        together.divide_tree()
        return None
    except Exception as error:  # passes that run apart are right, too; one that cannot be divided fails by itself
        if not isinstance(failure_of(error, HOST), OutOfMemory):
            logger.exception("the rows that passes share could not be found: they run apart")
        return None


def have_finite_norms(finished: Sequence[PassRun], device: torch.device) -> list[bool]:
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
        return [is_finite for each in finished for is_finite in have_finite_norms([each], device)]
    finished[0].fail(failure)
    return [True]
