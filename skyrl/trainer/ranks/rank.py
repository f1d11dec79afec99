"""What every rank of the trainer does: meets the others, loads its shard of the model, scores its shares of a pass.

All ranks get the same calls in the same order. A long sequence of a pass is divided over all ranks: each runs its rows
through the whole model, and all compute the loss. Log-probabilities are one number for each target: the ranks gather
them, and compute the same loss on all of them. Knows nothing of what is trained, of how keys, values or states travel,
or how calls reach it.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh

from skyrl.base.pictures.vision import VisionConfig
from skyrl.trainer.collectives import SameFailureEverywhere, agree, gathered, sendable
from skyrl.trainer.device import failure_of, prepare_device, read_back
from skyrl.trainer.lora.adapter import Target
from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.losses import Tally, served_losses
from skyrl.trainer.model.base_model import BaseModel
from skyrl.trainer.model.logprobs import Targets
from skyrl.trainer.model.recomputation import Setting
from skyrl.trainer.model.row_budget import BudgetSettings, RowBudget, measure_row
from skyrl.trainer.passes.micro_batch import MicroBatch, look_at
from skyrl.trainer.passes.micro_batch_losses import GroupSums, LossGroup, by_datum, losses_of, trained_entries
from skyrl.trainer.passes.pass_run import MicroBatchItem, SinglePassRun
from skyrl.trainer.protocol import Datum, Mixture
from skyrl.trainer.ranks.plan import RankShare
from skyrl.trainer.ranks.sharded_model import ModelForm, ShardedModel, load_sharded_model, local_of, reshard
from skyrl.trainer.rows.packing import PackedItem, pack, pack_alone
from skyrl.trainer.rows.prefixes import Layout, RowRange
from skyrl.trainer.rows.routed_experts import FIELD
from skyrl.trainer.shares import SequencePart
from skyrl.trainer.vision import Seen


@dataclass(frozen=True)
class RankSettings:
    """What a rank is told at its start. `mlp_of_mixtures`: adapters can train the experts of a mixture. `timeout_s`: a
    rank that waits this long for another rank fails. `pictures`: whether a model that sees keeps its vision tower.
    `keep_quantized`: whether weights stay quantized that are quantized in the files."""

    base_model: str
    threads: int
    gradient_checkpointing: Setting
    stable_reinforce: Literal["refuse", "cispo"]
    mlp_of_mixtures: bool
    timeout_s: float
    pictures: bool
    budget: BudgetSettings
    keep_quantized: bool = False


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


@dataclass(frozen=True)
class ShareResult:
    """What a rank computed for one piece: logprobs of its sequences, and sums of its losses. Or `error`: it failed."""

    logprobs: list[npt.NDArray[np.float32]]
    tally: Tally
    error: Exception | None = None


@dataclass(frozen=True)
class ScoredShare:
    """A piece whose loss was computed. `total`: what its backward begins with, also where the piece has failed. `sums`:
    on the device; None where it has failed with `error`."""

    total: Tensor
    sums: GroupSums | None
    error: Exception | None = None


def results_of(
    scored: Sequence[ScoredShare], logprobs: Sequence[Tensor], pieces: Sequence[MicroBatchItem]
) -> list[ShareResult]:
    """Of pieces and their logprobs, float32 [entries] each. Waits for the device once."""
    numbers, found = read_back([each.sums.numbers for each in scored if each.sums is not None], logprobs)
    of_sums = iter(numbers)
    results: list[ShareResult] = []
    for each, own, piece in zip(scored, found, pieces, strict=True):
        if each.sums is None:
            results.append(ShareResult([], Tally(), each.error))
            continue
        (tally,) = each.sums.tallies(next(of_sums))
        is_finite = math.isfinite(tally.loss)
        logprobs_of = by_datum(own, piece.data) if is_finite else []
        results.append(ShareResult(logprobs_of, tally, None if is_finite else FloatingPointError("loss")))
    return results


class RankBase:
    """One rank. Its methods must be called on all ranks of the group at the same time, except `memory` and where a
    subclass says so.

    A method raises SameFailureEverywhere if the command has failed on all ranks in the same way. After any other
    exception the ranks do not agree any more, and the whole group must be started again.
    """

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        self._rank = rank
        self._ranks = ranks
        self._settings = settings
        self._device = prepare_device(settings.threads)
        self._losses = served_losses(settings.stable_reinforce)

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        return self._device.type

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
        timeout = timedelta(seconds=self._settings.timeout_s)
        store = TCPStore(host, port, self._ranks, is_master=self._rank == 0, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo",
            store=PrefixStore(name, store),
            rank=self._rank,
            world_size=self._ranks,
            timeout=timeout,
        )

    def _load_model(self, form: ModelForm) -> ShardedModel:
        """Load this rank's rows of the base model. Raises SameFailureEverywhere with a ConfigError."""
        self._model = load_sharded_model(
            self._settings.base_model,
            self._device,
            init_device_mesh(self._device.type, (self._ranks,)),
            form,
            gradient_checkpointing=self._settings.gradient_checkpointing,
            pictures=self._settings.pictures,
            agree=agree,
        )
        self._base = self._model.base
        return self._model

    def _row_budget(self, targets: Sequence[Target]) -> RowBudget:
        """What this rank's memory allows. `targets`: as for `measure_row`."""
        settings, packed = self._settings.budget, self._base.packed
        if settings.measures_on(self._device):
            measure_row(self._base, targets)
            reshard(packed)
        return settings.of_model(packed, self._model.numel, ranks=self._ranks)

    def memory(self) -> dict[str, int]:
        """`parameters` of the base model on this rank, of `all_parameters`. In bytes: `held`, what these take; this
        process's peak of resident memory, and the device's peak if it has memory of its own."""
        found = {
            "parameters": self._model.numel,
            "all_parameters": self._model.total,
            "held": sum(local_of(parameter).nbytes for parameter in self._base.packed.parameters()),
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if self._device.type == "cuda":
            found["peak_device"] = torch.cuda.max_memory_allocated(self._device)
        return found

    def leave(self) -> None:
        """Forget everything, and leave the group."""
        if hasattr(self, "_base"):
            del self._base, self._model
        if dist.is_initialized():
            dist.destroy_process_group()

    def _run_those_seen(
        self,
        pieces: Sequence[MicroBatchItem],
        run: Callable[[Sequence[MicroBatchItem], Sequence[Mapping[str, Seen]]], Sequence[ShareResult]],
    ) -> list[ShareResult]:
        """Look at the pictures of pieces, and `run` the pieces with what was seen. A piece whose pictures raise an
        exception fails alone: the others run, because other ranks wait for this one."""
        seen: list[Mapping[str, Seen]] = []
        left: list[MicroBatchItem] = []
        failed: dict[int, ShareResult] = {}
        for number, piece in enumerate(pieces):
            try:
                seen.append(look_at(self._base.tower, piece))
                left.append(piece)
            except Exception as error:  # sent to the engine as the piece's outcome
                failed[number] = ShareResult([], Tally(), sendable(failure_of(error, self._device)))
        results = iter(run(left, seen))
        return [failed[number] if number in failed else next(results) for number in range(len(pieces))]

    def _slice(self, running: SinglePassRun, piece: RankShare) -> MicroBatchItem:
        return MicroBatchItem(running, piece.data, piece.rows, last=False)

    def _scored(self, logprobs: Tensor, group: LossGroup) -> ScoredShare:
        """A loss that raises an exception, or is not finite, fails its piece. It ends no rank's backward: the ranks
        gather each layer together, in backward too."""
        try:
            value = group.value(logprobs)
            total = value.total
            return ScoredShare(total, GroupSums.of(group, value, total))
        except Exception as error:  # sent to the engine as the piece's outcome
            return ScoredShare(logprobs.sum() * 0, None, sendable(failure_of(error, self._device)))


def one_token(device: torch.device) -> MicroBatch:
    """A micro-batch for a rank that has nothing to do while others have."""
    token = np.zeros(1, np.int64)
    packed = pack_alone([Datum(token, {})], device)
    targets = Targets.of([token], packed.layout.rows_of, np.ones(1, np.bool_), device)
    return MicroBatch([packed], [targets], [LoraSegment(0, 1, 1.0)])


Score = Callable[[Tensor, LossGroup], ScoredShare]
"""`RankBase._scored`"""
Gradients = Callable[[Sequence[Tensor], Sequence[LoraSegment], Sequence[Tensor]], list[Tensor]]
"""`LoraRank._gradients`"""


def run_divided(
    base: BaseModel, piece: MicroBatchItem, part: SequencePart, score: Score, gradients: Gradients, *, backward: bool
) -> ShareResult:
    """Run this rank's part of a piece that is one sequence. All ranks call this together, each with its own part.

    The result has the logprobs of the whole sequence. The sums of its loss are rank 0's, and empty on the others."""
    made = _micro_batch(piece, part, base.device, backward=backward)
    packed = base.packed
    (datum,) = piece.data
    width = datum.loss_inputs["target_tokens"].size // len(datum.tokens)
    with torch.set_grad_enabled(backward), packed.active.use(made.segments):
        with packed.embeddings_in_graph() as embeddings:
            (own,) = packed(made.packed, made.targets, made.segments)
        sizes = [part.rows_of(rank) * width for rank in range(part.ranks)]
        logprobs = gathered(own.detach(), sizes).requires_grad_(backward)
        scored = score(logprobs, made.losses.groups[0])
        if backward:
            (of_logprobs,) = torch.autograd.grad(scored.total, logprobs)
            total = (own * of_logprobs[part.start * width : part.stop * width]).sum()
            (gradient,) = gradients([total], made.segments, embeddings)
            running = piece.running
            running.gradient = gradient if running.gradient is None else running.gradient.add_(gradient)
    reshard(packed)
    (result,) = results_of([scored], [logprobs], [piece])
    return result if part.rank == 0 else replace(result, tally=Tally())


def _micro_batch(piece: MicroBatchItem, part: SequencePart, device: torch.device, *, backward: bool) -> MicroBatch:
    """The part's rows; the losses are of the whole sequence."""
    (datum,), (of_pass,) = piece.data, piece.parts
    packed = packed_part(datum, part, device)
    target_tokens = datum.loss_inputs["target_tokens"]
    width = target_tokens.size // len(datum.tokens)
    trained = trained_entries(of_pass)[part.start * width : part.stop * width].copy()
    if not trained.any():  # as `trained_entries`
        trained[0] = True
    targets = Targets.of([target_tokens[part.start : part.stop]], packed.layout.rows_of, trained, device)
    adapter = piece.running.adapter
    segment = LoraSegment(0, packed.stop, adapter.scale, adapter.leaves(backward))
    return MicroBatch([packed], [targets], [segment], losses=losses_of([piece], device, joined=False))


def packed_part(datum: Datum, part: SequencePart, device: torch.device) -> PackedItem:
    """The part's rows of a sequence without pictures."""
    rows = slice(part.start, part.stop)
    inputs = {FIELD: datum.loss_inputs[FIELD][rows]} if FIELD in datum.loss_inputs else {}
    count = part.stop - part.start
    layout = Layout((RowRange(0, count, parent=-1, start=0),), (np.arange(count),))
    packed = pack([Datum(datum.tokens[rows], inputs)], layout, 0, device)
    return replace(packed, positions=packed.positions + part.start, part=part)
