"""How a rank runs its micro-batches: the model's forward, the losses, and the backward of each.

A rank alone reads the results of a micro-batch when it has started the next one. So while the device computes one, the
host prepares another: rows, masks, targets and losses. At most one waits to be read. The order in which gradients are
added does not change, so neither do their bits; a pass that has failed may have one more micro-batch, which adds
nothing. If it is joined with others, all of them then run again apart. Over ranks each micro-batch is read before the
next one. Knows nothing of what is trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skyrl.trainer.collectives import failed_anywhere
from skyrl.trainer.device import failure_of
from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.model.base_model import BaseModel
from skyrl.trainer.model.logprobs import outside_of
from skyrl.trainer.model.recomputation import Recomputation
from skyrl.trainer.passes.batch_parts import one_token, part_of
from skyrl.trainer.passes.micro_batch import MicroBatch, look_at
from skyrl.trainer.passes.outputs import Outputs
from skyrl.trainer.passes.pass_run import (
    ItemResult,
    JoinedPasses,
    MicroBatchItem,
    PassRun,
    SinglePassRun,
    added,
    have_finite_norms,
    items_of,
    not_finite,
    record,
)
from skyrl.trainer.passes.scores import Scores
from skyrl.trainer.passes.started import SentNorms, StartedBatch
from skyrl.trainer.protocol import OutOfMemory
from skyrl.trainer.ranks.plan import Plan, RankShare
from skyrl.trainer.shares import SequencePart
from skyrl.trainer.tally import Tally
from skyrl.trainer.vision import Seen


@dataclass(frozen=True)
class _Waiting:
    """A micro-batch that a rank alone has run or started, and the passes of which it is the last, by number. `started`:
    None if nothing is left to be read. `norms`: of the passes' gradients, if they are asked for and were computed."""

    started: StartedBatch | None
    completed: Mapping[int, PassRun]
    norms: SentNorms | None


@dataclass(frozen=True)
class Computed:
    """What the model has computed, and where its backward begins and ends. outputs: the logprobs of each segment and
    the values of those with a value head. starts: the gradients of the losses with respect to these. `embeddings`: to
    which the backward goes over ranks."""

    segments: Sequence[LoraSegment]
    outputs: Sequence[Tensor]
    starts: Sequence[Tensor]
    embeddings: Sequence[Tensor]


class MicroBatchRunner(ABC):
    """What runs the micro-batches of passes. `retries`: whether a failed micro-batch has changed nothing, so that a
    rank alone may run it again. `between`: called between two micro-batches by a rank alone, of which the first may
    still wait to be read. It may run passes and optimizer steps of other models: they share no number with it."""

    retries: bool
    device: torch.device
    base: BaseModel
    between: Callable[[], None]
    _rank: int
    _ranks: int
    _rows: int
    """At most so many are in a micro-batch."""

    @property
    def alone(self) -> bool:
        return self._ranks == 1

    def _run_plan(self, running: Mapping[int, PassRun], plan: Plan, *, backward: bool) -> None:
        """Run this rank's micro-batches of a plan. running: what the plan runs, by number."""
        waiting: _Waiting | None = None
        for index, (batches, numbers) in enumerate(zip(plan.rounds(), plan.completed(), strict=True)):
            completed = {number: running[number] for number in numbers}
            if not self.alone:
                self._run_round(running, batches, backward=backward)
                # soon, so that few gradients wait beside those of the models
                self._finish(completed, plan, backward=backward)
                continue
            if index:
                self.between()
            items = _items(running, batches[self._rank])
            started, failure = self._started(items, backward=backward)
            norms = self._norms_of([*completed.values()]) if started is not None and plan.merged else None
            if waiting is not None:
                self._end(waiting, plan, backward=backward)
            if waiting is not None and self.retries and isinstance(failure, OutOfMemory):
                self._attempt(items, backward=backward)  # what was read has given its memory back
            elif failure is not None:
                self._again(items, failure, backward=backward)
            waiting = _Waiting(started, completed, norms)
        if waiting is not None:
            self._end(waiting, plan, backward=backward)

    def _end(self, waiting: _Waiting, plan: Plan, *, backward: bool) -> None:
        """Read a micro-batch, and finish the passes that end with it."""
        if waiting.norms is not None:  # first, because these come last: then the scores have come, too
            try:
                waiting.norms.read()
            except Exception as error:  # they are computed again
                failure_of(error, self.device)
        if waiting.started is not None:
            self._read(waiting.started)
        self._finish(waiting.completed, plan, backward=backward)

    def _norms_of(self, completed: Sequence[PassRun]) -> SentNorms | None:
        try:
            return SentNorms.of(completed)
        except Exception as error:  # `_check_norms` computes them again, those of each pass alone
            failure_of(error, self.device)
            return None

    def _run_round(
        self, running: Mapping[int, PassRun], batches: Sequence[Sequence[RankShare]], *, backward: bool
    ) -> None:
        """Run this rank's micro-batch while the others run theirs. batches: by rank."""
        batch = batches[self._rank]
        items = _items(running, batch)
        if batch and batch[0].divided:
            part = SequencePart.of(batch[0].rows, self._rank, self._ranks)
            self._divided(items, part, backward=backward)
        else:
            self._beside_others(items, backward=backward)

    def _started(
        self, batch: Sequence[MicroBatchItem], *, backward: bool
    ) -> tuple[StartedBatch | None, Exception | None]:
        """Start what is left of some items; None if nothing is. Or the exception that this has raised: it has changed
        nothing. DeviceFault is raised."""
        try:
            left = self._ordered([rest for item in batch if (rest := item.left()) is not None])
            seen = [look_at(self.base.tower, item) for item in left]
            started = self._together(left, seen, backward=backward) if left else None
        except Exception as error:  # each item runs again alone, or its pass fails with it
            return None, failure_of(error, self.device)
        if started is not None:
            started.add_gradients(self.device)
        return started, None

    def _read(self, started: StartedBatch) -> None:
        """Record the results. If that raises, what the item belongs to fails."""
        try:
            results = started.results()
        except Exception as error:  # the outcome of all of them
            failure = failure_of(error, self.device)
        else:
            self._record(started.items, results)
            return
        for item in started.items:
            if item.running.error is None:
                item.running.fail(failure)

    def _attempt(self, batch: Sequence[MicroBatchItem], *, backward: bool) -> None:
        """Run items together, and read their results. If that raises, `_again`."""
        started, failure = self._started(batch, backward=backward)
        if failure is not None:  # here the failed attempt's tensors are free again
            self._again(batch, failure, backward=backward)
        elif started is not None:
            self._read(started)

    def _again(self, batch: Sequence[MicroBatchItem], failure: Exception, *, backward: bool) -> None:
        """Items could not be started together: run each alone, so that only the one that causes the error fails. An
        item alone that runs out of memory runs once more when graphs have given theirs back, and once more with its
        layers recomputed, if they were not and may be.

        The error becomes that of what the item belongs to (OutOfMemory if memory was short). DeviceFault is raised.
        """
        if len(batch) == 1 and batch[0].running.error is not None:  # it has failed meanwhile, and keeps its error
            return
        graphs = self.base.packed.layer_graphs if isinstance(failure, OutOfMemory) else None
        made_room = graphs is not None and graphs.make_room()
        if len(batch) > 1:
            for item in batch:
                self._attempt([item], backward=backward)
        elif made_room and self.retries:
            self._attempt(batch, backward=backward)
        elif recomputation := self._instead(batch[0], failure, backward):
            with recomputation.forced():
                self._attempt(batch, backward=backward)
        else:
            batch[0].running.fail(failure)

    def _instead(self, item: MicroBatchItem, failure: Exception, backward: bool) -> Recomputation | None:
        """Of the layers, where recomputing them may help after this failure."""
        keeps = backward and item.trained
        recomputation = self.base.packed.recomputation if keeps and isinstance(failure, OutOfMemory) else None
        return recomputation if recomputation and recomputation.ran_out(item.rows) and self.retries else None

    def _beside_others(self, items: Sequence[MicroBatchItem], *, backward: bool) -> None:
        """Run items while other ranks run theirs: nothing may raise between two collectives. An item whose pictures
        raise an exception fails alone: the others run, because other ranks wait for this one."""
        seen: list[Mapping[str, Seen]] = []
        left: list[MicroBatchItem] = []
        for item in items:
            try:
                seen.append(look_at(self.base.tower, item))
                left.append(item)
            except Exception as error:  # sent to the engine as the item's outcome
                item.running.fail(failure_of(error, self.device))
        self._record(left, self._together(left, seen, backward=backward).results())

    def _divided(self, items: Sequence[MicroBatchItem], part: SequencePart, *, backward: bool) -> None:
        """Run this rank's part of a sequence of which all ranks run one. The sums of its loss are rank 0's."""
        (result,) = self._together(items, [{}], backward=backward, part=part).results()
        if self._rank:
            result = replace(result, parts=[replace(each, tally=Tally()) for each in result.parts])
        self._record(items, [result])

    def _record(self, items: Sequence[MicroBatchItem], results: Sequence[ItemResult]) -> None:
        """If that raises, what the item belongs to fails."""
        for item, result in zip(items, results, strict=True):
            try:
                record(item, result)
            except Exception as error:  # it is this pass's outcome; others go on
                item.running.fail(failure_of(error, self.device))

    def _together(
        self,
        items: Sequence[MicroBatchItem],
        seen: Sequence[Mapping[str, Seen]],
        *,
        backward: bool,
        part: SequencePart | None = None,
    ) -> StartedBatch:
        """Start items together, with the pictures of each; an empty list runs one token of weight 0. `part`: the rows
        that this rank has of the only item's only sequence.

        Ranks gather each layer together in forward, and again in backward. So there a backward goes down to the
        embeddings on every rank, whatever its items train. Alone, nothing is computed for a backward that no item has.
        """
        packed = self.base.packed
        trains = backward and (not self.alone or any(item.trained for item in items))
        if part is not None:
            made = part_of(items[0], part, self.device, backward=trains)
        elif items:
            made = self._of_items(items, seen, backward=trains)
        else:
            made = one_token(self.device)
        with torch.set_grad_enabled(trains), packed.active.use(made.segments):
            with nullcontext([]) if self.alone else packed.embeddings_in_graph() as embeddings:
                own = Outputs(packed(made.packed, made.targets, made.segments), len(made.segments), part)
            scores = Scores.of(made.losses, own.logprobs, own.values, backward=trains, apart=not self.alone)
            scores = replace(scores, outside=own.of_entries(outside_of(made.targets)))
            gradients: list[Tensor | None] = [None] * len(items)
            if scores.gradient is not None:
                starts = own.starts(scores.gradient, scores.value_gradient)
                gradients = [*self._backward(items, Computed(made.segments, own.of_model, starts, embeddings))]
                scores = replace(scores, unlike=[mark for each in made.targets for mark in each.unlike])
            elif backward:
                gradients = [self._without_backward(item) for item in items]
        packed.reshard()
        return StartedBatch(items, scores.sent(), gradients)

    def _finish(self, completed: Mapping[int, PassRun], plan: Plan, *, backward: bool) -> None:
        """Add the gradients of completed passes to their models. A pass that failed on any rank adds nothing."""
        if plan.merged:
            self._check_norms([*completed.values()], backward=backward)
        failed = [each.error is not None for each in completed.values()]
        for (number, each), has_failed in zip(
            completed.items(), failed if self.alone else failed_anywhere(failed), strict=True
        ):
            if backward and not has_failed:
                self._add(each, each.gradient if self.alone else self._summed(number, each, plan.holders(number)))
            each.gradient = None

    def _add(self, running: PassRun, gradient: Tensor | None) -> None:
        """Add the gradient of a pass to its model's. If that raises, the pass of a rank alone fails."""
        try:
            if gradient is not None:
                running.model.gradient = added(running.model.gradient, gradient)
        except Exception as error:
            failure = failure_of(error, self.device)
            if not self.alone:
                raise
            for each in running.members if isinstance(running, JoinedPasses) else [running]:
                each.fail(failure)

    def _check_norms(self, finished: Sequence[PassRun], *, backward: bool) -> None:
        """A pass whose gradient has no finite norm fails. Joined passes that have failed as one, or whose gradient has
        no finite norm, run again apart; then each fails or adds its gradient alone. So do those whose only trained
        passes have failed: each of the others has a gradient of zeros. Waits for the device once, unless some run
        again. DeviceFault is raised."""
        for running, is_finite in zip(finished, have_finite_norms(finished, self.device), strict=True):
            has_none = backward and running.joins_passes and running.gradient is None
            if running.error is None and is_finite and not has_none:
                continue
            running.gradient = None
            if isinstance(running, JoinedPasses):
                for member in running.begin_again():
                    for item in items_of(member, self._rows, self.device.type):
                        self._attempt([item], backward=backward)
                    self._check_norms([member], backward=backward)
                    if member.error is None:
                        self._add(member, member.gradient)
                    member.gradient = None
            elif isinstance(running, SinglePassRun) and running.error is None:
                running.fail(not_finite(running.training_pass, running.tally.loss))

    def _begin(self, running: PassRun) -> None:  # noqa: B027
        """Before the first item of a pass with a backward."""

    def _ordered(self, items: list[MicroBatchItem]) -> list[MicroBatchItem]:
        """The order in which items run together."""
        return items

    @abstractmethod
    def _of_items(
        self, items: Sequence[MicroBatchItem], seen: Sequence[Mapping[str, Seen]], *, backward: bool
    ) -> MicroBatch: ...

    @abstractmethod
    def _backward(self, items: Sequence[MicroBatchItem], computed: Computed) -> Sequence[Tensor | None]:
        """The gradient of each item, or None if it has been added."""

    def _without_backward(self, item: MicroBatchItem) -> Tensor | None:
        """The gradient of an item whose micro-batch trains nothing."""
        return None

    def _summed(self, number: int, running: PassRun, holders: Sequence[int]) -> Tensor:
        """The gradient of a pass, which the ranks `holders` have parts of. `number`: of the pass."""
        assert running.gradient is not None
        return running.gradient


def _items(running: Mapping[int, PassRun], batch: Sequence[RankShare]) -> list[MicroBatchItem]:
    return [MicroBatchItem(running[each.number], each.data, each.rows, each.trained) for each in batch]
