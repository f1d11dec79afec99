"""One rank of the trainer: its shard of the base model, whole copies of all adapters, and its share of each pass.

All ranks get the same calls in the same order. Adapters are the same bits on every rank: each makes the same optimizer
step on the same summed gradient. Knows nothing of how calls reach it, of files of adapters, or of requests.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh

from skyrl.backends.base import AdamParams, Datum, InvalidRequest, TrainingPass
from skyrl.backends.torch_lora.adapter import Adapter, Target
from skyrl.backends.torch_lora.collectives import (
    Agreed,
    agree,
    failed_anywhere,
    is_same_everywhere,
    on_all_or_none,
    summed_in_rank_order,
)
from skyrl.backends.torch_lora.device import command_on, failure_of, prepare_device
from skyrl.backends.torch_lora.logprobs import Targets
from skyrl.backends.torch_lora.lora import LoraSegment, trained_targets
from skyrl.backends.torch_lora.losses import served_losses
from skyrl.backends.torch_lora.metrics import Tally
from skyrl.backends.torch_lora.optimizer import NonFiniteGradient, compute_step, take_step
from skyrl.backends.torch_lora.packing import pack
from skyrl.backends.torch_lora.passes import (
    MicroBatch,
    RunningPass,
    Slice,
    by_datum,
    loss_of,
    slice_gradients,
)
from skyrl.backends.torch_lora.plan import Piece, Plan
from skyrl.backends.torch_lora.sharding import load_sharded_model, reshard
from skyrl.types.lora import LoraSpec


@dataclass(frozen=True)
class RankSettings:
    """What a rank is told at its start. `timeout_s`: a rank that waits this long for another rank fails."""

    base_model: str
    threads: int
    gradient_checkpointing: bool
    stable_reinforce: Literal["refuse", "cispo"]
    timeout_s: float


@dataclass(frozen=True)
class BaseFacts:
    """What the engine needs to know of the base model."""

    vocab_size: int
    max_context: int
    targets: tuple[Target, ...]
    device: str


@dataclass(frozen=True)
class PieceResult:
    """What a rank computed for one piece: logprobs of its sequences, and sums of its losses. Or `error`: it failed."""

    logprobs: list[npt.NDArray[np.float32]]
    tally: Tally
    error: Exception | None = None


@dataclass(frozen=True)
class AdapterBuffers:
    """All that an adapter holds, as flat float32 arrays in main memory."""

    weights: npt.NDArray[np.float32]
    exp_avg: npt.NDArray[np.float32] | None
    exp_avg_sq: npt.NDArray[np.float32] | None
    gradient: npt.NDArray[np.float32] | None
    step: int


class Rank:
    """One rank. Its methods must be called on all ranks of the group at the same time, except `export` and `memory`.

    A method raises Agreed if the command has failed on all ranks in the same way. After any other exception the ranks
    do not agree any more, and the whole group must be started again.
    """

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        self._rank = rank
        self._ranks = ranks
        self._settings = settings
        self._device = prepare_device(settings.threads)
        self._losses = served_losses(settings.stable_reinforce)
        self._adapters: dict[str, Adapter] = {}

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        return self._device.type

    def answer(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method; returns its result, or Agreed if it has raised that. For callers in another process."""
        try:
            return getattr(self, method)(*arguments)
        except Agreed as agreed:
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

    def load(self) -> BaseFacts:
        """Load this rank's rows of the base model. Raises Agreed with a ConfigError."""
        mesh = init_device_mesh(self._device.type, (self._ranks,))
        model = load_sharded_model(
            self._settings.base_model,
            self._device,
            mesh,
            gradient_checkpointing=self._settings.gradient_checkpointing,
            agree=agree,
        )
        self._model, self._base = model, model.base
        base = model.base
        targets = tuple(base.targets)
        return BaseFacts(base.vocab_size, base.max_context, targets, self._device.type)

    def create(self, model_id: str, spec: LoraSpec) -> None:
        """Add an adapter, with initial weights drawn from its seed. Raises Agreed with OutOfMemory."""
        targets = trained_targets(self._base.targets, spec)
        self._adapters[model_id] = on_all_or_none(lambda: Adapter(spec, targets, self._device), self._device)

    def delete(self, model_id: str) -> None:
        self._adapters.pop(model_id, None)

    def clear_gradient(self, model_id: str) -> None:
        self._adapters[model_id].gradient = None

    def replace(self, model_id: str, buffers: AdapterBuffers) -> None:
        """Give an adapter other weights, moments and gradient. Raises Agreed with OutOfMemory."""
        parts = (buffers.weights, buffers.exp_avg, buffers.exp_avg_sq, buffers.gradient)
        copies = on_all_or_none(lambda: [self._copied(part) for part in parts], self._device)
        weights, exp_avg, exp_avg_sq, gradient = copies
        assert weights is not None
        self._adapters[model_id].replace(weights, exp_avg, exp_avg_sq, gradient, buffers.step)

    def export(self, model_id: str, optimizer: bool) -> AdapterBuffers:
        """A copy of the weights; with `optimizer`, of moments and gradient too. May run beside commands of other
        models, on another thread."""
        adapter = self._adapters.get(model_id)
        if adapter is None:  # deleted since the engine asked: the model's session has ended
            raise Agreed(InvalidRequest(f"model_id: there is no model {model_id}"))
        with command_on(self._device, waits=False):
            weights = adapter.weights.cpu().numpy()
            if not optimizer:
                return AdapterBuffers(weights, None, None, None, 0)
            parts = (adapter.exp_avg, adapter.exp_avg_sq, adapter.gradient)
            exp_avg, exp_avg_sq, gradient = (None if part is None else part.cpu().numpy() for part in parts)
            return AdapterBuffers(weights, exp_avg, exp_avg_sq, gradient, adapter.step)

    def run(self, passes: Sequence[TrainingPass], forwards: Plan, backwards: Plan) -> dict[int, list[PieceResult]]:
        """Run this rank's pieces of checked passes: the micro-batches of `forwards`, then those of `backwards`. Returns
        the results of this rank's pieces, by the pass's number and in the order of the plan.

        Each adapter gets the gradients of its passes that failed on no rank, summed in the order of the ranks.
        """
        running = [RunningPass(each, self._adapters[each.model_id], self._losses[each.loss_fn]) for each in passes]
        results: dict[int, list[PieceResult]] = {}
        for plan, backward in ((forwards, False), (backwards, True)):
            for batch, completed in zip(plan.of(self._rank), plan.completed(), strict=True):
                pieces = [self._slice(running[piece.number], piece) for piece in batch]
                outcomes = self._micro_batch(pieces, backward=backward)
                for piece, outcome in zip(batch, outcomes, strict=True):
                    results.setdefault(piece.number, []).append(outcome)
                    if outcome.error is not None:
                        running[piece.number].fail(outcome.error)
                if backward:
                    self._accumulate({number: running[number] for number in completed}, plan)
        return results

    def _accumulate(self, completed: Mapping[int, RunningPass], plan: Plan) -> None:
        """Add the gradients of completed passes to their adapters. A pass that failed on any rank adds nothing."""
        failed = failed_anywhere([each.error is not None for each in completed.values()])
        for (number, each), has_failed in zip(completed.items(), failed, strict=True):
            if not has_failed:
                numel = each.adapter.weights.numel()
                total = summed_in_rank_order(each.gradient, plan.holders(number), numel, self._device)
                each.adapter.accumulate(total)
            each.gradient = None

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """As `adamw_step`. Raises Agreed with NonFiniteGradient or OutOfMemory, and RuntimeError if the ranks have
        computed different weights."""
        adapter = self._adapters[model_id]
        try:
            step = on_all_or_none(lambda: compute_step(adapter, params), self._device)
        except Agreed as agreed:
            own = agreed.error if isinstance(agreed.error, NonFiniteGradient) else None
            (not_finite,) = failed_anywhere([own is not None])  # another rank may have had no memory to find that out
            if not not_finite:
                raise
            adapter.gradient = None
            raise Agreed(own) from None
        if step is None:
            return {}
        if not is_same_everywhere(_digest(step.weights)):
            raise RuntimeError(
                "the ranks have computed different weights from the same gradient: their processors or their versions "
                "of torch differ"
            )
        return take_step(adapter, step)

    def memory(self) -> dict[str, int]:
        """`parameters` of the base model on this rank, of `all_parameters`. In bytes: this process's peak of resident
        memory, and the device's peak if it has memory of its own."""
        found = {
            "parameters": self._model.numel,
            "all_parameters": self._model.total,
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if self._device.type == "cuda":
            found["peak_device"] = torch.cuda.max_memory_allocated(self._device)
        return found

    def leave(self) -> None:
        """Forget everything, and leave the group."""
        self._adapters.clear()
        if hasattr(self, "_base"):
            del self._base, self._model
        if dist.is_initialized():
            dist.destroy_process_group()

    def _copied(self, part: npt.NDArray[np.float32] | None) -> Tensor | None:
        if part is None:
            return None
        copy = torch.empty(part.shape, dtype=torch.float32)
        copy.numpy()[:] = part  # torch.from_numpy warns of arrays that are read-only, as those from Ray are
        return copy.to(self._device)

    def _slice(self, running: RunningPass, piece: Piece) -> Slice:
        data = [running.training_pass.data[index] for index in piece.data]
        return Slice(running, data, piece.tokens, last=False)

    def _micro_batch(self, pieces: Sequence[Slice], *, backward: bool) -> list[PieceResult]:
        """Run pieces together; an empty list runs one token of weight 0.

        The ranks gather each layer together in forward, and again in backward. So a backward goes down to the
        embeddings on every rank, whatever its pieces train, and a loss that raises an exception or is not finite ends
        no rank's backward.
        """
        made = MicroBatch.of(pieces, self._device, backward=backward) if pieces else _one_token(self._device)
        packed = self._base.packed
        errors: list[Exception | None] = []
        tallies: list[Tally] = []
        totals: list[Tensor] = []
        with torch.set_grad_enabled(backward), packed.active.use(made.segments):
            with packed.embeddings_in_graph() as embeddings:
                logprobs = packed(made.packed, made.targets, made.segments)
            for piece, of_piece, inputs in zip(pieces, logprobs, made.inputs, strict=bool(pieces)):
                tallies.append(Tally())
                try:
                    value = loss_of(piece, of_piece, inputs)
                    tallies[-1].add(value, piece.tokens, inputs.tensors.get("advantages"))
                    totals.append(value.total)
                    errors.append(None if math.isfinite(tallies[-1].loss) else FloatingPointError("loss"))
                except Exception as error:
                    totals.append(of_piece.sum() * 0)
                    errors.append(_sendable(failure_of(error, self._device)))
            if backward:
                totals = totals or [logprobs[0].sum() * 0]
                gradients = slice_gradients(totals, made.segments, embeddings)
                for piece, gradient in zip(pieces, gradients, strict=True):
                    total = piece.running.gradient
                    piece.running.gradient = gradient if total is None else total.add_(gradient)
        reshard(packed)
        return [
            PieceResult(by_datum(of_piece, piece.data) if error is None else [], tally, error)
            for piece, of_piece, tally, error in zip(pieces, logprobs, tallies, errors, strict=bool(pieces))
        ]


def _one_token(device: torch.device) -> MicroBatch:
    """A micro-batch for a rank that has nothing to do while others have."""
    token = np.zeros(1, np.int64)
    packed = pack([Datum(token, {})], 0, device)
    return MicroBatch([packed], [Targets.of([token], device)], [LoraSegment(0, 1, 1.0)], [])


def _digest(weights: Tensor) -> int:
    """The sum of the weights' bits as integers, modulo 2^62."""
    return int(weights.view(torch.int32).sum(dtype=torch.int64)) % 2**62


def _sendable(error: Exception) -> Exception:
    """The error as one that any process can read: an exception of torch may have no way through pickle."""
    known = type(error).__module__ in ("builtins", "skyrl.backends.base")
    return error if known else RuntimeError(f"{type(error).__name__}: {error}")
