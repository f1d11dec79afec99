"""The backend for full fine-tuning over ranks: checks commands, plans passes, and keeps the one model's place.

Lives in the engine's process, without a model. Knows nothing of how calls reach the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import LoraSpec
from skyrl.training.backends.base import AdapterDtype, InvalidRequest, PassResult, RankDied, TrainingPass
from skyrl.training.backends.torch_full.backend import check_place, weights_not_finite
from skyrl.training.backends.torch_full.sharded_state import ShardedState
from skyrl.training.backends.torch_lora.group import RankGroup
from skyrl.training.backends.torch_lora.over_ranks import BackendOverRanks, outcome_of
from skyrl.training.backends.torch_lora.plan import make_plan


class ShardedFullBackend(BackendOverRanks):
    """Full fine-tuning on several ranks. Each rank holds its rows of all weights, gradients and moments, and runs a
    part of every pass.

    Passes run one at a time, and sums over ranks have a fixed order on CPUs: so results are the same to the last bit
    however passes are grouped, as long as the number of ranks stays the same. Another number of ranks changes the order
    of the sums, so results differ by rounding.

    Files are the same as those of `TorchFullBackend`: each backend reads what the other has written, and what was
    written with another number of ranks.
    """

    merges_passes = False

    def __init__(self, config: ServerConfig, group: RankGroup) -> None:
        """As `BackendOverRanks`."""
        super().__init__(config, group)
        self._state = ShardedState(group, self._path, self._facts)
        self._trained: str | None = None

    @property
    def repeats_exactly(self) -> bool:
        return self._on_cpu

    def create_model(self, model_id: str, spec: LoraSpec) -> None:
        """Begin with the base model's weights. Raises PlaceTaken while another model is trained, and InvalidRequest:
        the id exists, or `spec` asks for an adapter."""
        check_place(spec, model_id, self._trained)
        self._call("create", model_id)
        self._trained = model_id

    def kinds_of_layers(self, spec: LoraSpec) -> list[str]:
        return []

    def create_probe(self, model_id: str, spec: LoraSpec, kinds: Collection[str] = (), size: float = 0.0) -> None:
        """As `Backend.create_probe`."""
        check_place(spec, model_id, self._trained)
        self._call("create_probe", model_id)
        self._trained = model_id

    def delete_model(self, model_id: str) -> None:
        """A save of the model that still runs fails."""
        if self._trained == model_id:
            self._trained = None
            self._call("delete", model_id)

    def _run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        return [self._run_one(each) for each in passes]

    def _run_one(self, training_pass: TrainingPass) -> PassResult | Exception:
        plan = make_plan([(0, training_pass)], self._group.size, self._budget, shared_rows=0)
        if 0 in plan.failed:
            return plan.failed[0]
        try:
            results = self._call("run", training_pass, plan)
        except RankDied:
            raise
        except Exception as error:  # of this pass alone: those before it have added their gradients
            return error
        return outcome_of(training_pass, self._losses[training_pass.loss_fn], 0, plan, results)

    def save_state(self, model_id: str, directory: Path) -> None:
        self._require(model_id)
        self._state.save_state(model_id, directory)

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        self._require(model_id)
        self._state.load_state(model_id, directory, optimizer=optimizer)

    def save_adapter(self, model_id: str, directory: Path, *, dtype: AdapterDtype | None = None) -> None:
        """As `TorchFullBackend.save_adapter`."""
        self._require(model_id)
        chosen = dtype or ("float32" if self._on_cpu else "bfloat16")
        if not all(self._call("is_finite", model_id)):
            raise weights_not_finite()
        self._state.save_model(model_id, directory, getattr(torch, chosen))

    def _require(self, model_id: str) -> None:
        if self._trained != model_id:
            raise InvalidRequest(f"model_id: there is no model {model_id}")
