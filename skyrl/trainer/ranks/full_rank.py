"""One rank of the trainer for full fine-tuning: its shard of weights, gradient and moments, and its share of each pass.

Nothing that is trained exists twice: each rank makes the optimizer step of its own rows. Knows nothing of how calls
reach it, of files of checkpoints, or of requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from skyrl.trainer.adamw import changing
from skyrl.trainer.collectives import SameFailureEverywhere, on_all_or_none, total_norm
from skyrl.trainer.files.model_files import FileTensor
from skyrl.trainer.full.full_model import PlainModel, are_finite
from skyrl.trainer.full.parameters import FullParameters, GradientSink
from skyrl.trainer.lora.files import OPTIMIZER_PARTS
from skyrl.trainer.passes.micro_batch import MicroBatch
from skyrl.trainer.passes.pass_run import MicroBatchItem, PassRun
from skyrl.trainer.protocol import InvalidRequest
from skyrl.trainer.ranks.micro_batches import Computed
from skyrl.trainer.ranks.plan import Plan
from skyrl.trainer.ranks.rank import BaseFacts, RankBase, RankSettings
from skyrl.trainer.ranks.sharded_model import ModelForm, local_of
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


class FullRank(RankBase):
    """One rank that trains all parameters of one model. Ranks with others compute with the rows that they train. On a
    rank alone each model that begins has its weights in new memory, so that a save of the model before can go on: on a
    CPU the module shares them; on CUDA they are float32 beside a module in bfloat16."""

    retries = False  # a part of the gradient may have been added

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        super().__init__(rank, ranks, settings)
        self._model_in_training: tuple[str, FullParameters] | None = None
        self._views: Mapping[str, Tensor] = {}
        """Of the gradient of the running pass."""
        self._running: PassRun | None = None
        self._loaded: dict[str, Tensor] = {}
        """What a load has brought so far, in main memory."""
        self._saved: list[tuple[str, FullParameters]] = []
        """Of running saves."""

    def load(self) -> FullFacts:
        """Load this rank's rows of the base model. Raises SameFailureEverywhere with a ConfigError."""
        sharded = self._load_model(ModelForm(PlainModel, trained=True))
        model: Any = sharded.base.packed.model
        self._named: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._gradients = GradientSink(self._named.items(), local_of)
        shapes = {name: tuple(parameter.shape) for name, parameter in self._named.items()}
        return FullFacts(
            **self._base_facts(()), shapes=shapes, in_files=sharded.in_files, architecture=type(model).__name__
        )

    def create(self, model_id: str) -> None:
        """Begin with the base model's weights. No other model may exist. Raises SameFailureEverywhere with the error of
        reading them; ranks' rows may then hold anything, and no model has them."""
        rows = on_all_or_none(self._read_base, self.device)
        self._model_in_training = model_id, FullParameters(rows, self.device)
        self._weights_changed()

    def _read_base(self) -> Mapping[str, Tensor]:
        if not self.alone:
            self._model.read_again({})
            return self._own_rows()
        rows = {name: torch.empty(each.shape, device=self.device) for name, each in self._named.items()}
        self._model.read_again({id(each): rows[name] for name, each in self._named.items()})
        return rows

    def _own_rows(self) -> dict[str, Tensor]:
        """What the module computes with; over ranks, the shards that FSDP gathers parameters from."""
        return {name: local_of(parameter).detach() for name, parameter in self._named.items()}

    def _weights_changed(self) -> None:
        """Compute with the model's weights of now."""
        if self.alone and self._model_in_training is not None:
            weights = self._model_in_training[1].weights
            for name, parameter in self._named.items():
                if parameter.dtype == torch.float32:
                    parameter.data = weights[name]
                else:
                    parameter.data.copy_(weights[name])

    def create_probe(self, model_id: str) -> None:
        """Begin with the weights that `load` has read. No other model may have existed."""
        self._model_in_training = model_id, FullParameters(self._own_rows(), self.device)

    def delete(self, model_id: str) -> None:
        if self._model_in_training is not None and self._model_in_training[0] == model_id:
            self._model_in_training = None

    def _trained(self, model_id: str) -> FullParameters:
        return self.parameters(model_id)

    def _begin(self, running: PassRun) -> None:
        running.gradient = on_all_or_none(running.model.zeros, self.device)
        self._views = running.model.views(running.gradient)
        self._running = running

    def _finish(self, completed: Mapping[int, PassRun], plan: Plan, *, backward: bool) -> None:
        super()._finish(completed, plan, backward=backward)
        has_failed = self.alone and self._running is not None and self._running.error is not None
        if completed or has_failed:  # else the gradient that the pass has dropped stays in memory until the pass ends
            self._views, self._running = {}, None

    def _of_items(
        self, items: Sequence[MicroBatchItem], seen: Sequence[Mapping[str, Seen]], *, backward: bool
    ) -> MicroBatch:
        return MicroBatch.of(items, seen, self.device)

    def _backward(self, items: Sequence[MicroBatchItem], computed: Computed) -> Sequence[None]:
        """Adds this rank's rows of the gradient, summed over all ranks, tensor by tensor: it never exists as a whole.
        A rank without items adds to what its pass has, as others do."""
        with self._gradients.into(self._views):
            torch.autograd.backward(computed.outputs, computed.starts)
        return [None] * len(items)

    def _norm(self, model: FullParameters) -> float:
        return total_norm(super()._norm(model))

    def _stepped(self, model: FullParameters) -> None:
        with changing(self.device):
            self._weights_changed()

    def begin_save(self, model_id: str) -> None:
        """Until `end_save` a rank alone keeps the model's memory: a save goes on when the model has ended."""
        if self.alone:
            self._saved.append((model_id, self.parameters(model_id)))

    def end_save(self, model_id: str) -> None:
        if self.alone:
            self._saved.remove(next(each for each in self._saved if each[0] == model_id))

    def is_finite(self, model_id: str) -> bool:
        """Whether no weight of this rank is NaN or infinite. Raises SameFailureEverywhere with OutOfMemory."""
        parameters = self.parameters(model_id)
        return on_all_or_none(lambda: are_finite(parameters), self.device)

    def state_facts(self, model_id: str) -> StateFacts:
        parameters = self.parameters(model_id)
        parts = tuple(part for part in OPTIMIZER_PARTS if getattr(parameters, part) is not None)
        return StateFacts(parameters.step, parts)

    def read_part(
        self, model_id: str, part: StatePart, start: int, stop: int, dtype: FileDtype
    ) -> npt.NDArray[np.uint8]:
        """The bytes of elements [start, stop) of this rank's shard, rounded to the nearest `dtype`; fewer, or none, at
        the shard's end. Raises SameFailureEverywhere with OutOfMemory."""
        parameters = self.parameters(model_id)

        def read() -> npt.NDArray[np.uint8]:
            if part == "weights":
                chosen = _elements(parameters.weights.values(), start, stop)
            else:
                chosen = getattr(parameters, part)[start:stop]
            return chosen.to("cpu", getattr(torch, dtype)).view(torch.uint8).numpy()

        return on_all_or_none(read, self.device)

    def begin_load(self, model_id: str, parts: Sequence[str]) -> None:
        """Make room for the weights and for other `parts`, in main memory. Raises SameFailureEverywhere with
        OutOfMemory."""
        parameters = self.parameters(model_id)
        self._loaded = {}
        names = ("weights", *parts)
        self._loaded = on_all_or_none(lambda: {part: torch.empty(parameters.numel) for part in names}, self.device)

    def load_part(self, part: str, start: int, values: npt.NDArray[np.float32]) -> None:
        """Take elements of this rank's shard, from `start` on."""
        self._loaded[part].numpy()[start : start + len(values)] = values

    def end_load(self, model_id: str, step: int) -> None:
        """Replace the model's state by what was loaded. Raises SameFailureEverywhere with OutOfMemory; then nothing has
        changed."""
        parameters = self.parameters(model_id)
        loaded, self._loaded = self._loaded, {}
        weights = loaded.pop("weights")
        room = on_all_or_none(lambda: parameters.room_for(loaded), self.device)
        parameters.load(parameters.views(weights), loaded, room, step)
        self._weights_changed()

    def abandon_load(self) -> None:
        self._loaded = {}

    def memory(self) -> dict[str, int]:
        """As `RankBase.memory`, and the bytes of this rank's `weights`, `moments` and `gradient`."""
        parameters = None if self._model_in_training is None else self._model_in_training[1]
        weights = self._own_rows() if parameters is None else parameters.weights
        held = {"weights": sum(rows.nbytes for rows in weights.values()), "moments": 0, "gradient": 0}
        if parameters is not None:
            moments = (parameters.exp_avg, parameters.exp_avg_sq)
            held["moments"] = sum(moment.nbytes for moment in moments if moment is not None)
            held["gradient"] = 0 if parameters.gradient is None else parameters.gradient.nbytes
        return super().memory() | held

    def leave(self) -> None:
        self._model_in_training, self._views, self._loaded, self._saved = None, {}, {}, []
        if hasattr(self, "_named"):
            del self._named, self._gradients
        super().leave()

    def parameters(self, model_id: str) -> FullParameters:
        for name, parameters in (*filter(None, [self._model_in_training]), *self._saved):
            if name == model_id:
                return parameters
        raise SameFailureEverywhere(InvalidRequest(f"model_id: there is no model {model_id}"))  # deleted meanwhile


def _elements(tensors: Any, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of all tensors, one after the other: float32, flat."""
    found: list[Tensor] = []
    place = 0
    for tensor in tensors:
        flat = tensor.view(-1)
        found.append(flat[max(0, start - place) : max(0, stop - place)])
        place += len(flat)
    return torch.cat(found)
