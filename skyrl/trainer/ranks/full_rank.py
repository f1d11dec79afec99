"""One rank of the trainer for full fine-tuning: its shard of weights, gradient and moments, and its share of each pass.

Nothing that is trained exists twice: each rank makes the optimizer step of its own rows. Knows nothing of how calls
reach it, of files of checkpoints, or of requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.collectives import SameFailureEverywhere, failed_anywhere, on_all_or_none, total_norm
from skyrl.trainer.files.model_files import FileTensor
from skyrl.trainer.full.full_model import PlainModel, are_finite, check_all_trained, plain
from skyrl.trainer.full.parameters import FullParameters, GradientSink, gradient_norm, memory_for_step, take_step
from skyrl.trainer.lora.adapter import non_finite_gradient
from skyrl.trainer.lora.files import OPTIMIZER_PARTS
from skyrl.trainer.passes.micro_batch import MicroBatch
from skyrl.trainer.passes.pass_run import MicroBatchItem, SinglePassRun
from skyrl.trainer.protocol import AdamParams, InvalidRequest, TrainingPass
from skyrl.trainer.ranks.plan import Plan
from skyrl.trainer.ranks.rank import BaseFacts, RankBase, RankSettings, ShareResult, one_token, results_of
from skyrl.trainer.ranks.sharded_model import ModelForm, local_of, reshard
from skyrl.trainer.vision import Seen

StatePart = Literal["weights", "exp_avg", "exp_avg_sq", "gradient"]
FileDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class FullFacts(BaseFacts):
    """`shapes`: of the whole parameters, by name. `in_files`: see `file_tensors`. `architecture`: the model's class in
    transformers."""

    shapes: dict[str, tuple[int, ...]]
    in_files: dict[str, list[FileTensor]]
    architecture: str


@dataclass(frozen=True)
class StateFacts:
    """The number of steps that a model has made, and which buffers besides the weights it has. Alike on all ranks."""

    step: int
    parts: tuple[str, ...]


def _wrap(path: str, model: Any) -> PlainModel:
    check_all_trained(path, model)
    return plain(path, model)


class FullRank(RankBase):
    """One rank that trains all parameters of one model."""

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        super().__init__(rank, ranks, settings)
        self._trained: tuple[str, FullParameters] | None = None
        self._loaded: dict[str, Tensor] = {}
        """What a load has brought so far, in main memory."""

    def load(self) -> FullFacts:
        """Load this rank's rows of the base model. Raises SameFailureEverywhere with a ConfigError."""
        sharded = self._load_model(ModelForm(_wrap, trained=True))
        base = sharded.base
        model: Any = base.packed.model
        named = dict(model.named_parameters())
        self._rows = {name: local_of(parameter).detach() for name, parameter in named.items()}
        """The shards that FSDP gathers parameters from."""
        self._gradients = GradientSink(named.items(), local_of)
        shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        return FullFacts(
            base.vocab_size,
            base.max_context,
            self._device.type,
            base.packed.mixture,
            base.sight,
            base.ties_unembedding,
            self._row_budget(()),
            shapes,
            sharded.in_files,
            type(model).__name__,
        )

    def create(self, model_id: str) -> None:
        """Begin with the base model's weights. No other model may exist. Raises SameFailureEverywhere with the error of
        reading them; the rows may then hold anything, and no model has them."""
        on_all_or_none(self._model.read_again, self._device)
        self._trained = model_id, FullParameters(self._rows, self._device)

    def create_probe(self, model_id: str) -> None:
        """Begin with the weights that `load` has read. No other model may have existed."""
        self._trained = model_id, FullParameters(self._rows, self._device)

    def delete(self, model_id: str) -> None:
        if self._trained is not None and self._trained[0] == model_id:
            self._trained = None

    def clear_gradient(self, model_id: str) -> None:
        self._parameters(model_id).gradient = None

    def run(self, training_pass: TrainingPass, plan: Plan) -> dict[int, list[ShareResult]]:
        """Run this rank's pieces of a checked pass, which is number 0 of the plan. Returns their results, in the order
        of the plan. A pass that fails on any rank adds no gradient. Raises SameFailureEverywhere with OutOfMemory."""
        parameters = self._parameters(training_pass.model_id)
        # A SinglePassRun hands its gradient to an adapter; here the gradient is kept beside it
        running = SinglePassRun(cast(Any, parameters), training_pass, self._losses[training_pass.loss_fn])
        running.tree = plan.trees[0]
        gradient = on_all_or_none(parameters.zeros, self._device) if training_pass.backward else None
        views = None if gradient is None else parameters.views(gradient)
        results: list[ShareResult] = []
        for batch in plan.of(self._rank):
            results += self._micro_batch([self._slice(running, piece) for piece in batch], views)
        (failed,) = failed_anywhere([any(result.error is not None for result in results)])
        if gradient is not None and not failed:
            parameters.accumulate(gradient)
        return {0: results}

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """As `full.parameters.adamw_step`, each rank on its rows. Raises SameFailureEverywhere with NonFiniteGradient
        or OutOfMemory."""
        parameters = self._parameters(model_id)
        if parameters.gradient is None:
            return {}
        memory, own = on_all_or_none(lambda: (memory_for_step(parameters), gradient_norm(parameters)), self._device)
        norm = total_norm(own)
        if not math.isfinite(norm):
            parameters.gradient = None
            raise SameFailureEverywhere(non_finite_gradient(norm))
        return take_step(parameters, params, memory, norm)

    def is_finite(self, model_id: str) -> bool:
        """Whether no weight of this rank is NaN or infinite. Raises SameFailureEverywhere with OutOfMemory."""
        parameters = self._parameters(model_id)
        return on_all_or_none(lambda: are_finite(parameters), self._device)

    def state_facts(self, model_id: str) -> StateFacts:
        parameters = self._parameters(model_id)
        parts = tuple(part for part in OPTIMIZER_PARTS if getattr(parameters, part) is not None)
        return StateFacts(parameters.step, parts)

    def read_part(
        self, model_id: str, part: StatePart, start: int, stop: int, dtype: FileDtype
    ) -> npt.NDArray[np.uint8]:
        """The bytes of elements [start, stop) of this rank's shard, rounded to the nearest `dtype`; fewer, or none, at
        the shard's end. Raises SameFailureEverywhere with OutOfMemory."""
        parameters = self._parameters(model_id)

        def read() -> npt.NDArray[np.uint8]:
            if part == "weights":
                chosen = _elements(parameters.weights.values(), start, stop)
            else:
                chosen = getattr(parameters, part)[start:stop]
            return chosen.to("cpu", getattr(torch, dtype)).view(torch.uint8).numpy()

        return on_all_or_none(read, self._device)

    def begin_load(self, model_id: str, parts: Sequence[str]) -> None:
        """Make room for the weights and for other `parts`, in main memory. Raises SameFailureEverywhere with
        OutOfMemory."""
        parameters = self._parameters(model_id)
        self._loaded = {}
        names = ("weights", *parts)
        self._loaded = on_all_or_none(lambda: {part: torch.empty(parameters.numel) for part in names}, self._device)

    def load_part(self, part: str, start: int, values: npt.NDArray[np.float32]) -> None:
        """Take elements of this rank's shard, from `start` on."""
        self._loaded[part].numpy()[start : start + len(values)] = values

    def end_load(self, model_id: str, step: int) -> None:
        """Replace the model's state by what was loaded. Raises SameFailureEverywhere with OutOfMemory; then nothing has
        changed."""
        parameters = self._parameters(model_id)
        loaded, self._loaded = self._loaded, {}
        weights = loaded.pop("weights")
        room = on_all_or_none(lambda: parameters.room_for(loaded), self._device)
        parameters.load(parameters.views(weights), loaded, room, step)

    def abandon_load(self) -> None:
        self._loaded = {}

    def memory(self) -> dict[str, int]:
        """As `RankBase.memory`, and the bytes of this rank's `weights`, `moments` and `gradient`."""
        parameters = None if self._trained is None else self._trained[1]
        held = {"weights": sum(rows.nbytes for rows in self._rows.values()), "moments": 0, "gradient": 0}
        if parameters is not None:
            moments = (parameters.exp_avg, parameters.exp_avg_sq)
            held["moments"] = sum(moment.nbytes for moment in moments if moment is not None)
            held["gradient"] = 0 if parameters.gradient is None else parameters.gradient.nbytes
        return super().memory() | held

    def leave(self) -> None:
        self._trained, self._loaded = None, {}
        if hasattr(self, "_rows"):
            del self._rows, self._gradients
        super().leave()

    def _parameters(self, model_id: str) -> FullParameters:
        if self._trained is None or self._trained[0] != model_id:  # it was deleted since the engine asked
            raise SameFailureEverywhere(InvalidRequest(f"model_id: there is no model {model_id}"))
        return self._trained[1]

    def _micro_batch(
        self, pieces: Sequence[MicroBatchItem], gradient: Mapping[str, Tensor] | None
    ) -> list[ShareResult]:
        return self._run_those_seen(pieces, partial(self._one, gradient=gradient))

    def _one(
        self,
        pieces: Sequence[MicroBatchItem],
        seen: Sequence[Mapping[str, Seen]],
        *,
        gradient: Mapping[str, Tensor] | None,
    ) -> list[ShareResult]:
        """Run one piece, with the pictures `seen` in it, or one token of weight 0 if `pieces` is empty. Adds this
        rank's rows of the gradient, summed over all ranks, to `gradient`; None: without backward."""
        backward = gradient is not None
        made = MicroBatch.without_adapters(pieces, seen, self._device) if pieces else one_token(self._device)
        with torch.set_grad_enabled(backward):
            logprobs = self._base.packed(made.packed, made.targets, made.segments)
            scored = [self._scored(*each) for each in zip(logprobs, made.losses.groups, strict=bool(pieces))]
            if gradient is not None:
                (total,) = [each.total for each in scored] or [logprobs[0].sum() * 0]
                with self._gradients.into(gradient):
                    total.backward()
        reshard(self._base.packed)
        return results_of(scored, logprobs, pieces) if pieces else []


def _elements(tensors: Any, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of all tensors, one after the other: float32, flat."""
    found: list[Tensor] = []
    place = 0
    for tensor in tensors:
        flat = tensor.view(-1)
        found.append(flat[max(0, start - place) : max(0, stop - place)])
        place += len(flat)
    return torch.cat(found)
