"""The backend for adapters: it knows them by model id, decides which passes run together, and keeps their files.

Lives in the engine's process; the base model and the adapters are those of its ranks. Knows nothing of the command log,
the wire or the sampler, or of how calls reach the ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.base.config.server import ServerConfig
from skyrl.base.model_files import TrainMlpOfMixtures
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer import checks
from skyrl.trainer.device import HOST, command_on
from skyrl.trainer.experts.routing import with_frozen_experts
from skyrl.trainer.lora import files
from skyrl.trainer.lora.adapter import Adapter, Target, kinds_of, random_adapter
from skyrl.trainer.model.packed_model import trained_targets
from skyrl.trainer.protocol import AdapterDtype, InvalidRequest, PassResult, TrainingPass
from skyrl.trainer.ranks.lora_rank import AdapterBuffers, AdapterFacts, LoraRank
from skyrl.trainer.ranks.over_ranks import BackendOverRanks, RankGroup, results_of
from skyrl.trainer.shares import join_buffers

SHARED_ROWS_ON_CPU = 1024
"""Rows of a micro-batch of several passes on a CPU. Larger ones lose more to the caches than they gain by sharing:
docs/decisions/lora-products.md."""


class LoraBackend(BackendOverRanks):
    """LoRA training: float32 on CPUs, bfloat16 with float32 adapters, gradients and moments on CUDA. Of several ranks
    each holds a part of the base model and runs a part of every pass.

    On CPUs a pass is cut and divided by itself alone, each piece goes through the model alone, and sums over ranks have
    a fixed order: so results are the same to the last bit however passes are grouped, as long as the number of ranks
    stays the same. Another number of ranks changes the order of the sums, so results differ by rounding.

    With `merge_passes` (the default on CUDA), pieces of several passes share a micro-batch, each with its own adapter:
    up to `micro_batch_tokens` on CUDA, and 1,024 rows on a CPU. Without other ranks passes of one adapter then share
    prompts, too. The number of rows may change a matrix product's last bits. On CUDA the last bits may differ anyhow.

    Files do not depend on the number of ranks: what was written with one is read with another.
    """

    rank_class = LoraRank

    def __init__(self, config: ServerConfig, group: RankGroup | None = None) -> None:
        """As `BackendOverRanks`."""
        super().__init__(config, group)
        facts: AdapterFacts = self._facts
        self._targets = facts.targets
        self._divides_experts = config.backend_config.trainer.placement.expert_parallel
        self._max_rank = config.backend_config.lora.max_lora_rank
        self._train_mlp_of_mixtures: TrainMlpOfMixtures = config.backend_config.lora.train_mlp_of_mixtures
        merge = config.backend_config.trainer.merge_passes
        self._merge = not self._on_cpu if merge is None else merge
        self._shared_rows = min(self._budget, SHARED_ROWS_ON_CPU) if self._on_cpu else self._budget
        self._divided_tokens = config.backend_config.trainer.context_parallel_tokens
        self._models: dict[str, tuple[LoraSpec, tuple[Target, ...]]] = {}

    @property
    def merges_passes(self) -> bool:
        return self._merge

    @property
    def repeats_exactly(self) -> bool:
        return self._on_cpu and not self._merge

    def create_model(self, model_id: str, spec: LoraSpec) -> None:
        """Add an adapter. Raises InvalidRequest: the id exists, or the spec cannot be honoured."""
        self._check_new(model_id, spec, self._train_mlp_of_mixtures)
        targets = self._targets_of(spec)
        self._call("create", model_id, spec, targets)
        self._models[model_id] = spec, targets

    def _check_new(self, model_id: str, spec: LoraSpec, train_mlp_of_mixtures: TrainMlpOfMixtures) -> None:
        checks.check_spec(spec, self._max_rank, self._limits.mixture, train_mlp_of_mixtures)
        if model_id in self._models:
            raise InvalidRequest(f"model_id: {model_id} exists already")

    def _targets_of(self, spec: LoraSpec) -> tuple[Target, ...]:
        """What a new adapter trains."""
        mlp = self._limits.mixture is None or self._train_mlp_of_mixtures == "train"
        return tuple(trained_targets(self._targets, spec, mlp=mlp))

    def kinds_of_layers(self, spec: LoraSpec) -> list[str]:
        return kinds_of(self._targets_of(spec))

    def create_probe(self, model_id: str, spec: LoraSpec, kinds: Collection[str] = (), size: float = 0.0) -> None:
        """As `Backend.create_probe`."""
        self._check_new(model_id, spec, self._train_mlp_of_mixtures)
        with command_on(HOST, waits=False):
            self._put(model_id, random_adapter(spec, self._targets_of(spec), kinds, size, HOST))

    def delete_model(self, model_id: str) -> None:
        if self._models.pop(model_id, None) is not None:
            self._call("delete", model_id)

    def _run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        outcomes = self._run_planned(
            passes, merge=self._merge, shared_rows=self._shared_rows, divided_tokens=self._divided_tokens
        )
        known = [self._known(each.model_id) for each in passes]
        return [
            with_frozen_experts(each, *of_model, self._limits.mixture)
            for each, of_model in zip(outcomes, known, strict=True)
        ]

    def save_state(self, model_id: str, directory: Path) -> None:
        with command_on(HOST, waits=False):
            files.save_state(self._copy(model_id, optimizer=True), self._path, directory)

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        self._load(model_id, self._empty(model_id), directory, optimizer=optimizer)

    def restore_model(self, model_id: str, spec: LoraSpec, directory: Path) -> None:
        """As `Backend.restore_model`. A model trains on what it trained when it was saved, also where
        `train_mlp_of_mixtures` is another one now. Also raises SafetensorError when files are damaged."""
        self._check_new(model_id, spec, "train")
        empty = Adapter(spec, self._targets_of(spec), HOST, drawn=False)
        self._load(model_id, empty, directory, optimizer=True)

    def _load(self, model_id: str, empty: Adapter, directory: Path, *, optimizer: bool) -> None:
        with command_on(HOST, waits=False):
            self._put(model_id, files.load_state(empty, directory, self._targets, optimizer=optimizer))

    def _put(self, model_id: str, adapter: Adapter) -> None:
        """Give all ranks this adapter as the model's."""
        parts = (adapter.weights, adapter.exp_avg, adapter.exp_avg_sq, adapter.gradient)
        weights, exp_avg, exp_avg_sq, gradient = (None if part is None else part.numpy() for part in parts)
        assert weights is not None
        buffers = AdapterBuffers(weights, exp_avg, exp_avg_sq, gradient, adapter.step)
        self._call("replace", model_id, adapter.spec, adapter.targets, buffers)
        self._models[model_id] = adapter.spec, adapter.targets

    def save_adapter(self, model_id: str, directory: Path, *, dtype: AdapterDtype | None = None) -> None:
        with command_on(HOST, waits=False):
            adapter = self._copy(model_id, optimizer=False)
            files.save_adapter(adapter, self._path, directory, getattr(torch, dtype or "float32"))

    def close(self) -> None:
        self._models.clear()
        super().close()

    def _require(self, model_id: str) -> None:
        self._known(model_id)

    def _known(self, model_id: str) -> tuple[LoraSpec, tuple[Target, ...]]:
        if model_id not in self._models:
            raise InvalidRequest(f"model_id: there is no model {model_id}")
        return self._models[model_id]

    def _empty(self, model_id: str) -> Adapter:
        """An adapter of the model's shape on the CPU. Its weights are not the model's."""
        spec, targets = self._known(model_id)
        return Adapter(spec, targets, HOST, drawn=False)

    def _copy(self, model_id: str, *, optimizer: bool) -> Adapter:
        adapter = self._empty(model_id)
        if self._divides_experts:
            answers = self.group.read_all("export", model_id, optimizer)
        else:
            answers = [self.group.read("export", model_id, optimizer)]
        buffers: list[AdapterBuffers] = results_of(answers)
        parts = zip(*((each.weights, each.exp_avg, each.exp_avg_sq, each.gradient) for each in buffers), strict=True)
        weights, exp_avg, exp_avg_sq, gradient = (_tensor(of_ranks, adapter) for of_ranks in parts)
        assert weights is not None
        adapter.replace(weights, exp_avg, exp_avg_sq, gradient, buffers[0].step)
        return adapter


def _tensor(of_ranks: Sequence[npt.NDArray[np.float32] | None], adapter: Adapter) -> Tensor | None:
    """One of the adapter's flat buffers from what ranks have of it. From one rank it is a tensor on the array's memory,
    which is not written to: the arrays that Ray delivers are read-only."""
    arrays = [array for array in of_ranks if array is not None]
    if not arrays:
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(arrays[0] if len(arrays) == 1 else join_buffers(arrays, adapter.shapes))
