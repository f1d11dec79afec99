"""What every rank of the trainer does: meets the others, loads its share of the model, and runs its shares of passes.

All ranks get the same calls in the same order. A trainer on one device is one rank without others: it has the whole
model, and nobody waits for it. So it alone may join passes, leave out backwards that give nothing, and run a failed
micro-batch again.

A long sequence of a pass is divided over all ranks: each runs its rows through the whole model, and all compute the
loss. Log-probabilities are one number for each target: the ranks gather them, and compute the same loss on all of them.
Knows nothing of what is trained, of how keys, values or states travel, or how calls reach it.
"""

from __future__ import annotations

import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh

from skyrl.base.config.backend import Kernels
from skyrl.base.pictures.vision import VisionConfig
from skyrl.trainer.adamw import NonFiniteGradient, adamw_step, gradient_norm
from skyrl.trainer.collectives import SameFailureEverywhere, agree, failed_anywhere, on_all_or_none
from skyrl.trainer.custom_loss.loss import loss_of
from skyrl.trainer.device import failure_of, prepare_device
from skyrl.trainer.lora.adapter import Target
from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.losses import served_losses
from skyrl.trainer.model.base_model import BaseModel
from skyrl.trainer.model.logprobs import outside_of
from skyrl.trainer.model.recomputation import Recomputation, Setting
from skyrl.trainer.model.row_budget import BudgetSettings, RowBudget, measure_row
from skyrl.trainer.passes.batch_parts import one_token, part_of
from skyrl.trainer.passes.micro_batch import MicroBatch, look_at
from skyrl.trainer.passes.outputs import Outputs
from skyrl.trainer.passes.pass_run import (
    ItemResult,
    JoinedPasses,
    MicroBatchItem,
    PassRun,
    ShareResult,
    SinglePassRun,
    added,
    have_finite_norms,
    items_of,
    not_finite,
    record,
)
from skyrl.trainer.passes.scores import Scores
from skyrl.trainer.protocol import AdamParams, Mixture, OutOfMemory, TrainingPass
from skyrl.trainer.quantized.weights import held_bytes
from skyrl.trainer.ranks.plan import Plan, RankShare
from skyrl.trainer.ranks.sharded_model import ModelForm, ShardedModel, load_sharded_model, local_of
from skyrl.trainer.shares import SequencePart
from skyrl.trainer.tally import Tally
from skyrl.trainer.vision import Seen


@dataclass(frozen=True)
class RankSettings:
    """What a rank is told at its start. `mlp_of_mixtures`: adapters can train the experts of a mixture. `timeout_s`: a
    rank that waits this long for another rank fails. `pictures`: whether a model that sees keeps its vision tower.
    `keep_quantized`: whether weights stay quantized that are quantized in the files. `varlen`: whether attention is
    that of `attention.varlen`. `kernels`: what computes between the products of plain layers."""

    base_model: str
    threads: int
    gradient_checkpointing: Setting
    stable_reinforce: Literal["refuse", "cispo"]
    mlp_of_mixtures: bool
    timeout_s: float
    pictures: bool
    budget: BudgetSettings
    keep_quantized: bool = False
    varlen: bool = False
    kernels: Kernels = "torch"


@dataclass(frozen=True)
class BaseFacts:
    """What the engine needs to know of the base model, and of the memory that this rank has."""

    vocab_size: int
    max_context: int
    device: str
    mixture: Mixture | None
    sight: VisionConfig | None
    ties_unembedding: bool
    budget: RowBudget


class RankBase(ABC):
    """One rank. Its methods must be called on all ranks of the group at the same time, except `memory` and where a
    subclass says so.

    A method raises SameFailureEverywhere if the command has failed on all ranks in the same way. After any other
    exception ranks do not agree any more, and the whole group must be started again; a rank alone goes on.
    """

    retries: bool
    """Whether a failed micro-batch has changed nothing, so that a rank alone may run it again."""

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        self._rank = rank
        self._ranks = ranks
        self._settings = settings
        self.device = prepare_device(settings.threads)
        self._losses = served_losses(settings.stable_reinforce)
        self.between: Callable[[], None] = lambda: None
        """Called between two micro-batches of a `run` by a rank alone. It may call `run` and `optim_step` for other
        models."""

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        return self.device.type

    @property
    def alone(self) -> bool:
        return self._ranks == 1

    def answer(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method; returns its result, or SameFailureEverywhere if it has raised that. For callers in another
        process."""
        try:
            return getattr(self, method)(*arguments)
        except SameFailureEverywhere as agreed:
            return agreed

    def join(self, host: str, port: int, name: str) -> None:
        """Meet the other ranks at rank 0's address, under a name that no other group has.

        Raises an error of torch.distributed if they do not come within the timeout."""
        if self.alone:
            return
        timeout = timedelta(seconds=self._settings.timeout_s)
        store = TCPStore(host, port, self._ranks, is_master=self._rank == 0, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=PrefixStore(name, store),
            rank=self._rank,
            world_size=self._ranks,
            timeout=timeout,
        )

    def _load_model(self, form: ModelForm) -> ShardedModel:
        """Load this rank's rows of the base model. Raises SameFailureEverywhere with a ConfigError."""
        self._model = load_sharded_model(
            self._settings.base_model,
            self.device,
            None if self.alone else init_device_mesh(self.device.type, (self._ranks,)),
            form,
            gradient_checkpointing=self._settings.gradient_checkpointing,
            pictures=self._settings.pictures,
            varlen=self._settings.varlen,
            kernels=self._settings.kernels,
            agree=agree,
        )
        self.base: BaseModel = self._model.base
        return self._model

    def _row_budget(self, targets: Sequence[Target]) -> RowBudget:
        """What this rank's memory allows. `targets`: as for `measure_row`."""
        settings, packed = self._settings.budget, self.base.packed
        if settings.measures_on(self.device):
            measure_row(self.base, targets)
            packed.reshard()
        packed.logits_bytes = settings.logits_bytes(packed, self._model.numel)
        return settings.of_model(packed, self._model.numel, self._held(), ranks=self._ranks)

    def _held(self) -> int:
        """Bytes that this rank's parameters of the base model take."""
        return held_bytes(map(local_of, self.base.packed.parameters()))

    def _base_facts(self, targets: Sequence[Target]) -> dict[str, Any]:
        """The fields of `BaseFacts`."""
        base, budget = self.base, self._row_budget(targets)
        self._rows = budget.rows
        return {
            "vocab_size": base.vocab_size,
            "max_context": base.max_context,
            "device": self.device.type,
            "mixture": base.packed.mixture,
            "sight": base.sight,
            "ties_unembedding": base.ties_unembedding,
            "budget": budget,
        }

    def memory(self) -> dict[str, int]:
        """`parameters` of the base model on this rank, of `all_parameters`. In bytes: `held`, what these take; this
        process's peak of resident memory, and the device's peak if it has memory of its own."""
        found = {
            "parameters": self._model.numel,
            "all_parameters": self._model.total,
            "held": self._held(),
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if self.device.type == "cuda":
            found["peak_device"] = torch.cuda.max_memory_allocated(self.device)
        return found

    def leave(self) -> None:
        """Forget everything, and leave the group."""
        if hasattr(self, "base"):
            del self.base, self._model
        if not self.alone and dist.is_initialized():
            dist.destroy_process_group()

    def run(self, passes: Sequence[TrainingPass], forwards: Plan, backwards: Plan) -> dict[int, list[ShareResult]]:
        """Run this rank's items of checked passes: the micro-batches of `forwards`, then those of `backwards`. Returns
        the results of this rank's items, by the pass's number and in the order of the plan.

        Each model gets the gradients of its passes that failed on no rank, summed in the order of the ranks.
        """
        singles = [SinglePassRun(self._trained(each.model_id), each, loss_of(each, self._losses)) for each in passes]
        for plan, backward in ((forwards, False), (backwards, True)):
            running: dict[int, PassRun] = {}
            for number, tree in plan.trees.items():
                members = [singles[each] for each in plan.joined.get(number, (number,))]
                running[number] = members[0] if len(members) == 1 else JoinedPasses(members[0].model, members)
                running[number].tree = tree
                if backward:
                    self._begin(running[number])
            for index, (batches, completed) in enumerate(zip(plan.rounds(), plan.completed(), strict=True)):
                if index:
                    self.between()
                self._run_round(running, batches, backward=backward)
                # soon, so that few gradients wait beside those of the models
                self._finish({number: running[number] for number in completed}, plan, backward=backward)
        return {number: running.sent() for number, running in enumerate(singles)}

    def _run_round(
        self, running: Mapping[int, PassRun], batches: Sequence[Sequence[RankShare]], *, backward: bool
    ) -> None:
        """Run this rank's micro-batch while the others run theirs. batches: by rank."""
        batch = batches[self._rank]
        items = [MicroBatchItem(running[each.number], each.data, each.rows, each.trained) for each in batch]
        if self.alone:
            self._attempt(items, backward=backward)
        elif batch and batch[0].divided:
            part = SequencePart.of(batch[0].rows, self._rank, self._ranks)
            self._divided(items, part, backward=backward)
        else:
            self._beside_others(items, backward=backward)

    def _attempt(self, batch: Sequence[MicroBatchItem], *, backward: bool) -> None:
        """Run items together. If that raises, run each item alone, so that only the one that causes the error fails.
        An item alone that runs out of memory runs once more with its layers recomputed, if they were not and may be.

        The error becomes that of what the item belongs to (OutOfMemory if memory was short). DeviceFault is raised.
        """
        failure: Exception | None = None
        left: list[MicroBatchItem] = []
        results: list[ItemResult] = []
        try:
            left = self._ordered([rest for item in batch if (rest := item.left()) is not None])
            seen = [look_at(self.base.tower, item) for item in left]
            results = self._together(left, seen, backward=backward) if left else []
        except Exception as error:  # each item runs again alone, or its pass fails with it
            failure = failure_of(error, self.device)
        if failure is None:
            self._record(left, results)
        elif len(batch) > 1:  # outside the handler, where the failed attempt's tensors are free again
            for item in batch:
                self._attempt([item], backward=backward)
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
        self._record(left, self._together(left, seen, backward=backward))

    def _divided(self, items: Sequence[MicroBatchItem], part: SequencePart, *, backward: bool) -> None:
        """Run this rank's part of a sequence of which all ranks run one. The sums of its loss are rank 0's."""
        (result,) = self._together(items, [{}], backward=backward, part=part)
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
    ) -> list[ItemResult]:
        """Run items together, with the pictures of each; an empty list runs one token of weight 0. `part`: the rows
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
            gradients: Sequence[Tensor | None] = [None] * len(items)
            if scores.gradient is not None:
                starts = own.starts(scores.gradient, scores.value_gradient)
                gradients = self._backward(items, made.segments, own.of_model, starts, embeddings)
            elif backward:
                gradients = [self._without_backward(item) for item in items]
        packed.reshard()
        of_parts = iter(scores.read())
        results: list[ItemResult] = []
        for item, gradient in zip(items, gradients, strict=True):
            parts = [next(of_parts) for _ in item.parts]
            results.append(ItemResult(parts, gradient if any(each.counts for each in parts) else None))
        return results

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
        """Add the gradient of a pass to its model's."""
        if gradient is not None:
            running.model.gradient = added(running.model.gradient, gradient)

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

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """As `adamw_step`. Raises SameFailureEverywhere with NonFiniteGradient or OutOfMemory."""
        model = self._trained(model_id)
        try:
            metrics = adamw_step(
                model, params, norm=self._norm, agreed=lambda action: on_all_or_none(action, self.device)
            )
        except NonFiniteGradient as error:  # of all ranks alike
            raise SameFailureEverywhere(error) from None
        if metrics:
            self._stepped(model)
        return metrics

    def clear_gradient(self, model_id: str) -> None:
        self._trained(model_id).gradient = None

    def _norm(self, model: Any) -> float:
        """Of the model's gradient, the same on all ranks."""
        return on_all_or_none(lambda: gradient_norm(model), self.device)

    @abstractmethod
    def _stepped(self, model: Any) -> None:
        """The model's weights have new numbers."""

    @abstractmethod
    def _trained(self, model_id: str) -> Any:
        """What a pass of the model adds its gradient to."""

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
    def _backward(
        self,
        items: Sequence[MicroBatchItem],
        segments: Sequence[LoraSegment],
        outputs: Sequence[Tensor],
        starts: Sequence[Tensor],
        embeddings: Sequence[Tensor],
    ) -> Sequence[Tensor | None]:
        """The gradient of each item, or None if it has been added. `starts`: of the losses with respect to the
        outputs, which are the logprobs of each segment and the values of those with a value head."""

    def _without_backward(self, item: MicroBatchItem) -> Tensor | None:
        """The gradient of an item whose micro-batch trains nothing."""
        return None

    def _summed(self, number: int, running: PassRun, holders: Sequence[int]) -> Tensor:
        """The gradient of a pass, which the ranks `holders` have parts of. `number`: of the pass."""
        assert running.gradient is not None
        return running.gradient
