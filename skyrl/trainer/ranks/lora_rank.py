"""One rank of the trainer for adapters: its shard of the base model, copies of all adapters, its share of each pass.

Adapters are whole and the same bits on every rank: each makes the same optimizer step on the same summed gradient.
Every item has its own leaves of the adapter's weights, and the gradients of items are added in order. So where items
run one at a time on a CPU, the results of a pass do not depend on other passes, to the last bit. Where a device gains
by it, items whose adapters are updated together lie side by side, with their matrices in stacks.

An `ExpertRank` holds some experts of each layer, with all that adapters have of these experts: rows of its
micro-batches travel to the ranks of their experts (`ExpertExchange`), and rows of all ranks come here. So this rank
computes the gradients of its experts for every pass, and has their matrices, gradients and moments alone. Knows nothing
of how calls reach it, of files of adapters, or of requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.adamw import norm_of
from skyrl.trainer.collectives import (
    SameFailureEverywhere,
    is_same_everywhere,
    on_all_or_none,
    summed_in_rank_order,
    total_norm,
)
from skyrl.trainer.device import base_dtype, command_on, uploaded
from skyrl.trainer.experts.layers import ExpertExchange
from skyrl.trainer.lora.adapter import Adapter, Target, whole_shapes
from skyrl.trainer.lora.linear import LoraSegment, groups_adapters
from skyrl.trainer.lora.stack import AdapterStack, grouped_rank
from skyrl.trainer.model.packed_model import PackedModel, trained_targets
from skyrl.trainer.model.row_budget import RowBudget
from skyrl.trainer.passes.entry_gradients import with_gradients
from skyrl.trainer.passes.micro_batch import MicroBatch
from skyrl.trainer.passes.outputs import value_rows_of
from skyrl.trainer.passes.pass_run import MicroBatchItem, PassRun, ShareResult
from skyrl.trainer.passes.started import StartedBatch
from skyrl.trainer.protocol import InvalidRequest, TrainingPass
from skyrl.trainer.ranks.micro_batches import Computed
from skyrl.trainer.ranks.plan import Plan, RankShare
from skyrl.trainer.ranks.rank import BaseFacts, RankBase, RankSettings
from skyrl.trainer.ranks.sharded_model import ModelForm
from skyrl.trainer.rows.packing import PackedItem
from skyrl.trainer.shares import ExpertShare, SequencePart, common_numel
from skyrl.trainer.vision import Seen


@dataclass(frozen=True)
class AdapterFacts(BaseFacts):
    """`targets`: the layers that adapters can train."""

    targets: tuple[Target, ...]


AdapterArrays = Sequence[npt.NDArray[np.float32] | None]
"""As `Adapter.parts`, in main memory."""


class LoraRank(RankBase):
    """One rank that trains adapters. `export` may be called on one rank alone."""

    retries = True

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        super().__init__(rank, ranks, settings)
        self.adapters: dict[str, Adapter] = {}

    def load(self) -> AdapterFacts:
        """Load this rank's rows of the base model. Raises SameFailureEverywhere with a ConfigError."""
        base = self._load_model(self._form()).base
        targets = tuple(base.targets)
        mlp = base.packed.mixture is None or self._settings.mlp_of_mixtures
        probed = trained_targets(targets, LoraSpec(rank=1, alpha=1.0, seed=0), mlp=mlp)
        return AdapterFacts(**self._base_facts(probed), targets=targets)

    def _form(self) -> ModelForm:
        settings = self._settings
        wraps = partial(PackedModel, mlp_of_mixtures=settings.mlp_of_mixtures)
        return ModelForm(wraps, trained=False, keep_quantized=settings.keep_quantized)

    def _adapter(self, spec: LoraSpec, targets: Sequence[Target], *, drawn: bool) -> Adapter:
        """What this rank has of an adapter."""
        return Adapter(spec, targets, self.device, drawn=drawn)

    def create(self, model_id: str, spec: LoraSpec, targets: Sequence[Target]) -> None:
        """Add an adapter, with initial weights drawn from its seed. Raises SameFailureEverywhere with OutOfMemory."""
        self.adapters[model_id] = on_all_or_none(lambda: self._adapter(spec, targets, drawn=True), self.device)

    def delete(self, model_id: str) -> None:
        self.adapters.pop(model_id, None)

    def replace(
        self, model_id: str, spec: LoraSpec, targets: Sequence[Target], arrays: AdapterArrays, step: int
    ) -> None:
        """Add an adapter with these weights, moments and gradient, or put it in the place of the model's. Raises
        SameFailureEverywhere with OutOfMemory."""
        parts = on_all_or_none(lambda: [self._copied(array, spec, targets) for array in arrays], self.device)
        adapter = self._adapter(spec, targets, drawn=False)
        adapter.replace(parts, step)
        self.adapters[model_id] = adapter

    def export(self, model_id: str, optimizer: bool) -> tuple[AdapterArrays, int]:
        """The weights, and 0; with `optimizer`, moments and gradient too, and the number of steps. May run beside
        commands of other models, on another thread. On a CPU it is the adapter's own memory, which the model's next
        command changes."""
        adapter = self.adapters.get(model_id)
        if adapter is None:  # deleted since the engine asked: the model's session has ended
            raise SameFailureEverywhere(InvalidRequest(f"model_id: there is no model {model_id}"))
        with command_on(self.device, waits=False):
            parts = adapter.parts if optimizer else (adapter.weights, None, None, None)
            arrays = [None if part is None else part.to("cpu").numpy() for part in parts]
            return arrays, adapter.step if optimizer else 0

    def _trained(self, model_id: str) -> Adapter:
        return self.adapters[model_id]

    def _ordered(self, items: list[MicroBatchItem]) -> list[MicroBatchItem]:
        """Where the device gains by it, in the order in which adapters can be updated together."""
        return side_by_side(items) if groups_adapters(self.device) else items

    def _of_items(
        self, items: Sequence[MicroBatchItem], seen: Sequence[Mapping[str, Seen]], *, backward: bool
    ) -> MicroBatch:
        """Each item gets its own leaves of its adapter's weights."""
        parts = together(items) if self.alone and groups_adapters(self.device) else None
        made = MicroBatch.of(items, seen, self.device, parts)
        if self.alone:  # over ranks a loss that raises must do so where it fails its part alone
            made = with_gradients(made, items)
        dtype = base_dtype(self.device)
        for index, part in enumerate(made.parts):
            of_part, packed = items[part.start : part.stop], made.packed[part.start : part.stop]
            made.segments[index] = segment_of(of_part, packed, dtype, backward=backward)
        return made

    def _backward(self, items: Sequence[MicroBatchItem], computed: Computed) -> Sequence[Tensor]:
        return item_gradients(computed, computed.segments)

    def _without_backward(self, item: MicroBatchItem) -> Tensor | None:
        """The step after a pass has a gradient."""
        return None if any(item.running.trained) else torch.zeros_like(item.running.model.weights)

    def _summed(self, number: int, running: PassRun, holders: Sequence[int]) -> Tensor:
        return summed_in_rank_order(running.gradient, holders, running.model.weights.numel(), self.device)

    def _stepped(self, model: Adapter) -> None:
        """Raises RuntimeError if the ranks have computed different weights."""
        if not self.alone and not is_same_everywhere(_digest(self._common(model))):
            raise RuntimeError(
                "the ranks have computed different weights from the same gradient: their processors or their versions "
                "of torch differ"
            )

    def _common(self, adapter: Adapter) -> Tensor:
        """The weights that all ranks have, flat."""
        return adapter.weights

    def leave(self) -> None:
        self.adapters.clear()
        super().leave()

    def _copied(self, part: npt.NDArray[np.float32] | None, spec: LoraSpec, targets: Sequence[Target]) -> Tensor | None:
        """What this rank has of one of an adapter's flat buffers."""
        if part is None:
            return None
        copy = torch.empty(part.shape, dtype=torch.float32)
        copy.numpy()[:] = part  # torch.from_numpy warns of arrays that are read-only, as those from Ray are
        return copy.to(self.device)


def _digest(weights: Tensor) -> int:
    """The sum of the weights' bits as integers, modulo 2^62."""
    return int(weights.view(torch.int32).sum(dtype=torch.int64)) % 2**62


class ExpertRank(LoraRank):
    """`export` gives what this rank has of an adapter; `replace` takes the whole adapter."""

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        super().__init__(rank, ranks, settings)
        self._share = ExpertShare(rank, ranks)
        self._batches: Sequence[Sequence[RankShare]] = ()
        self._others: Sequence[Sequence[LoraSegment]] = ()
        """Of the running micro-batches of other ranks, by rank: segments with the matrices of this rank's experts."""
        self._pieces: Sequence[MicroBatchItem] = ()
        self._of_others: dict[tuple[int, int], Tensor] = {}
        """The gradient of this rank's experts, flat, by the pass's number and the rank whose rows it comes from. Not
        this rank's own rows: that one is in the gradient of the running pass."""

    def run(self, passes: Sequence[TrainingPass], forwards: Plan, backwards: Plan) -> dict[int, list[ShareResult]]:
        try:
            return super().run(passes, forwards, backwards)
        finally:
            self._of_others.clear()

    def _form(self) -> ModelForm:
        return replace(super()._form(), whole_experts=True)

    def _row_budget(self, targets: Sequence[Target]) -> RowBudget:
        """The probe's adapter trains no experts: on every rank its rows are in the slot without an adapter."""
        with self._exchange.use([()] * self._ranks, 0, [0]):
            return super()._row_budget([target for target in targets if target.experts is None])

    @property
    def _exchange(self) -> ExpertExchange:
        exchange = self._model.exchange
        assert exchange is not None
        return exchange

    def _adapter(self, spec: LoraSpec, targets: Sequence[Target], *, drawn: bool) -> Adapter:
        return Adapter(spec, targets, self.device, drawn=drawn, share=self._share)

    def _copied(self, part: npt.NDArray[np.float32] | None, spec: LoraSpec, targets: Sequence[Target]) -> Tensor | None:
        if part is None:
            return None
        held = [part[place] for place in self._share.slices(whole_shapes(spec, targets))]
        return super()._copied(np.concatenate(held), spec, targets)

    def _run_round(
        self, running: Mapping[int, PassRun], batches: Sequence[Sequence[RankShare]], *, backward: bool
    ) -> None:
        self._batches = batches
        self._others = [
            [] if rank == self._rank else [_experts_of(running[piece.number].model, backward) for piece in batch]
            for rank, batch in enumerate(batches)
        ]
        try:
            super()._run_round(running, batches, backward=backward)
        finally:
            self._others = ()

    def _divided(self, items: Sequence[MicroBatchItem], part: SequencePart, *, backward: bool) -> None:
        """The rows of each rank's part travel as those of its other micro-batches do: the piece is in slot 0 of all."""
        with self._exchange.use(self._others, 1, [0]):
            super()._divided(items, part, backward=backward)

    def _beside_others(self, items: Sequence[MicroBatchItem], *, backward: bool) -> None:
        self._pieces = items
        super()._beside_others(items, backward=backward)

    def _together(
        self,
        items: Sequence[MicroBatchItem],
        seen: Sequence[Mapping[str, Seen]],
        *,
        backward: bool,
        part: SequencePart | None = None,
    ) -> StartedBatch:
        """A piece's slot is its place in the plan: the other ranks know whose rows these are. `items` may lack some of
        the plan's."""
        if part is not None:
            return super()._together(items, seen, backward=backward, part=part)
        slots = max(map(len, self._batches))
        own = [slot for slot, piece in enumerate(self._pieces) if any(piece is each for each in items)] or [slots]
        with self._exchange.use(self._others, slots, own):
            return super()._together(items, seen, backward=backward)

    def _backward(self, items: Sequence[MicroBatchItem], computed: Computed) -> Sequence[Tensor]:
        """Of this rank's segments. Those of other ranks, whose backward sends rows here, are kept in `_of_others`."""
        others = {
            (piece.number, rank, slot): segment
            for rank, of_rank in enumerate(self._others)
            for slot, (segment, piece) in enumerate(zip(of_rank, self._batches[rank], strict=False))
            if segment.pairs
        }
        found = item_gradients(computed, [*computed.segments, *others.values()], unused=True)
        own = len(found) - len(others)
        for (number, rank, _), gradient in zip(others, found[own:], strict=True):
            total = self._of_others.get((number, rank))
            self._of_others[number, rank] = gradient if total is None else total.add_(gradient)
        return found[:own]

    def _summed(self, number: int, running: PassRun, holders: Sequence[int]) -> Tensor:
        """Of the experts the parts that the ranks' rows have given are summed here, in the order of the ranks, too."""
        gradient = running.gradient
        if gradient is None:
            gradient = torch.zeros_like(running.model.weights)
        common, experts = gradient.tensor_split([common_numel(running.model.shapes)])
        if len(common):
            summed_in_rank_order(common, holders, len(common), self.device)
        if len(experts):
            parts = [experts if rank == self._rank else self._of_others.pop((number, rank)) for rank in holders]
            total = parts[0].clone()
            for part in parts[1:]:
                total.add_(part)
            experts.copy_(total)
        return gradient

    def _norm(self, model: Adapter) -> float:
        def of_parts() -> list[float]:
            assert model.gradient is not None
            parts = model.gradient.tensor_split([common_numel(model.shapes)])
            return [norm_of(part) for part in parts]

        common, experts = on_all_or_none(of_parts, self.device)
        return math.hypot(common, total_norm(experts))

    def _common(self, adapter: Adapter) -> Tensor:
        return adapter.weights[: common_numel(adapter.shapes)]


def _experts_of(adapter: Adapter, requires_grad: bool) -> LoraSegment:
    """A segment with new leaves of an adapter's experts. Where its rows are does not matter."""
    leaves = adapter.leaves(requires_grad)
    pairs = {target.name: leaves[target.name] for target in adapter.targets if target.experts is not None}
    return LoraSegment.of(0, 0, adapter, pairs)


MOST_PADDING = 4
"""Padding makes no adapter's matrices more than this many times larger, else it is updated with others or alone. The
low-rank products of its rows grow by the same factor. Ranks below 8 count as 8."""


Kind = tuple[int, tuple[str, ...]]
"""An adapter's rank, rounded up for grouped products, and the names of its layers."""


def _kind_of(adapter: Adapter) -> Kind | None:
    """None for an adapter that trains experts, has several ranks or a value head: it is updated alone."""
    own = adapter.own_scales or adapter.has_value_head
    if own or any(target.experts is not None for target in adapter.targets):
        return None
    return grouped_rank(adapter.spec.rank), tuple(target.name for target in adapter.targets)


def groups_of(adapters: Sequence[Adapter]) -> list[int | None]:
    """For each adapter the number of its group, whose adapters are updated together; None for one that is updated
    alone."""
    kinds = [_kind_of(adapter) for adapter in adapters]
    targets = [target for adapter in dict(zip(kinds, adapters, strict=True)).values() for target in adapter.targets]
    widths = {target.name: target.in_features + target.out_features for target in targets}

    def numel(*stacked: Kind) -> int:
        """Elements of one adapter in a stack of adapters of these kinds."""
        layers: set[str] = set().union(*(names for _, names in stacked))
        return max(rank for rank, _ in stacked) * sum(widths[name] for name in layers)

    groups: list[list[Kind]] = []
    for kind in sorted({kind for kind in kinds if kind is not None}, key=lambda kind: (numel(kind), kind)):
        fitting = (group for group in groups if numel(*group, kind) <= MOST_PADDING * numel(group[0]))
        if (group := next(fitting, None)) is None:
            groups.append([kind])
        else:
            group.append(kind)
    number_of = {kind: number for number, group in enumerate(groups) for kind in group}
    return [None if kind is None else number_of[kind] for kind in kinds]


def side_by_side(slices: Sequence[MicroBatchItem]) -> list[MicroBatchItem]:
    """The slices, those of one group next to each other, by rank. Slices of one adapter stay in their order."""
    first: dict[int | None, int] = {}
    groups = groups_of([piece.running.model for piece in slices])
    for number, group in enumerate(groups):
        first.setdefault(group, number)

    def place(number: int) -> tuple[int, int, int]:
        adapter = slices[number].running.model
        return first[groups[number]], adapter.spec.rank, len(adapter.targets)

    return [slices[number] for number in sorted(range(len(slices)), key=place)]


def together(slices: Sequence[MicroBatchItem]) -> list[range]:
    """Consecutive slices whose adapters are updated together."""
    found: list[range] = []
    groups = groups_of([piece.running.model for piece in slices])
    for group, numbered in groupby(enumerate(groups), lambda each: each[1]):
        numbers = [number for number, _ in numbered]
        found += (
            [range(number, number + 1) for number in numbers] if group is None else [range(numbers[0], numbers[-1] + 1)]
        )
    return found


def segment_of(
    slices: Sequence[MicroBatchItem], packed: Sequence[PackedItem], dtype: torch.dtype, *, backward: bool
) -> LoraSegment:
    """The rows of consecutive slices whose adapters are updated together, with leaves of `dtype` that the backward
    reaches."""
    adapters = [piece.running.model for piece in slices]
    start, stop = packed[0].start, packed[-1].stop
    if len(slices) == 1:
        rows = value_rows_of(adapters[0], packed[0])
        return LoraSegment.of(start, stop, adapters[0], adapters[0].leaves(backward, dtype), rows)
    ends = np.cumsum([each.stop - each.start for each in packed], dtype=np.int32)
    stack = AdapterStack(adapters)
    (on_device,) = uploaded([ends], adapters[0].device)
    return LoraSegment(start, stop, 1.0, stack.leaves(backward, dtype), on_device, stack)


def item_gradients(computed: Computed, segments: Sequence[LoraSegment], *, unused: bool = False) -> list[Tensor]:
    """The gradient of each slice of some segments, flat float32 in the order of its adapter's buffers, from one
    backward for all slices. With `unused`, matrices that computed nothing get zeros; else they are an error."""
    leaves = [[leaf for pair in segment.pairs.values() for leaf in pair] for segment in segments]
    wanted = [*(leaf for of_slice in leaves for leaf in of_slice), *computed.embeddings]
    gradients = iter(torch.autograd.grad(computed.outputs, wanted, computed.starts, materialize_grads=unused))
    found: list[Tensor] = []
    for segment, of_segment in zip(segments, leaves, strict=True):
        own = [next(gradients) for _ in of_segment]
        if segment.stack is not None:
            found += segment.stack.gradients(own)
        elif own:
            found.append(torch.cat([gradient.reshape(-1) for gradient in own]).float())
    return found
