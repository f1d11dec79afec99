"""The backends for adapters: on this process's device, or with the base model spread over ranks.

They keep adapters by model id on one base model, decide which passes run together, and keep files of adapters. Over
ranks the backend lives in the engine's process, without a model, and plans passes. Knows nothing of the command log,
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

from skyrl.base.config.server import ServerConfig, takes_pictures
from skyrl.base.model_files import TrainMlpOfMixtures
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer import checks
from skyrl.trainer.device import HOST, command_on, failure_of, prepare_device
from skyrl.trainer.experts.routing import with_frozen_experts
from skyrl.trainer.lora import files
from skyrl.trainer.lora.adapter import Adapter, Target, adamw_step, kinds_of, random_adapter
from skyrl.trainer.losses import served_losses
from skyrl.trainer.model.base_model import load_base_model
from skyrl.trainer.model.packed_model import trained_targets
from skyrl.trainer.model.row_budget import BudgetSettings, measure_row
from skyrl.trainer.passes.micro_batch import finish, join_passes, run_micro_batch
from skyrl.trainer.passes.pass_run import PassRun, SinglePassRun, items_of
from skyrl.trainer.protocol import (
    AdamParams,
    AdapterDtype,
    InvalidRequest,
    ModelLimits,
    PassResult,
    StateSnapshots,
    TrainingPass,
)
from skyrl.trainer.ranks.lora_rank import AdapterBuffers, AdapterFacts
from skyrl.trainer.ranks.over_ranks import BackendOverRanks, RankGroup, outcome_of, results_of
from skyrl.trainer.ranks.plan import make_plan
from skyrl.trainer.ranks.rank import ShareResult
from skyrl.trainer.rows.packing import cut
from skyrl.trainer.rows.routed_experts import with_sorted_experts
from skyrl.trainer.shares import join_buffers

SHARED_ROWS_ON_CPU = 1024
"""Rows of a micro-batch of several passes on a CPU. Larger ones lose more to the caches than they gain by sharing:
docs/decisions/lora-products.md."""


class TorchLoraBackend(StateSnapshots):
    """LoRA training on one device: float32 on a CPU, bfloat16 with float32 adapters, gradients and moments on CUDA.

    On a CPU each slice of a pass goes through the base model alone. Results and gradients are then the same to the last
    bit however passes are grouped, because no kernel sees another slice's rows. With `merge_passes` (the default on
    CUDA), slices of several passes share a micro-batch, each with its own adapter: up to `micro_batch_tokens` on CUDA,
    and 1,024 rows on a CPU. Passes of one adapter then share prompts, too. The number of rows may change a matrix
    product's last bits. On CUDA the last bits may differ in both cases.

    Raises ConfigError when the base model cannot be trained.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._max_rank = config.backend_config.lora.max_lora_rank
        self._train_mlp_of_mixtures: TrainMlpOfMixtures = config.backend_config.lora.train_mlp_of_mixtures
        self._device = prepare_device(config.threads)
        merge = config.backend_config.trainer.merge_passes
        self._merge = self._device.type == "cuda" if merge is None else merge
        self._base = load_base_model(
            config.base_model_path,
            self._device,
            gradient_checkpointing=config.backend_config.trainer.gradient_checkpointing,
            mlp_of_mixtures=self._train_mlp_of_mixtures == "train",
            pictures=takes_pictures(config),
            keep_quantized=config.backend_config.trainer.keep_quantized,
        )
        budget = BudgetSettings.of(config)
        if budget.measures_on(self._device):
            measure_row(self._base, self._base.targets)
        self._budget = budget.chosen([budget.of_model(self._base.packed)])
        shared_rows = self._budget if self._device.type == "cuda" else min(self._budget, SHARED_ROWS_ON_CPU)
        self._shared_rows = shared_rows if self._merge else 1
        self._limits = self._base.limits(config)
        self._losses = served_losses(config.losses.stable_reinforce)
        self._adapters: dict[str, Adapter] = {}

    @property
    def limits(self) -> ModelLimits:
        return self._limits

    @property
    def micro_batch_tokens(self) -> int:
        return self._budget

    @property
    def merges_passes(self) -> bool:
        return self._merge

    @property
    def repeats_exactly(self) -> bool:
        return self._device.type == "cpu" and not self._merge

    def create_model(self, model_id: str, spec: LoraSpec) -> None:
        """Add an adapter. Raises InvalidRequest: the id exists, or the spec cannot be honoured."""
        self._check_new(model_id, spec, self._train_mlp_of_mixtures)
        with command_on(self._device, waits=True):
            self._adapters[model_id] = Adapter(spec, self._targets(spec), self._device)

    def restore_model(self, model_id: str, spec: LoraSpec, directory: Path) -> None:
        """As `Backend.restore_model`. A model trains on what it trained when it was saved, also where
        `train_mlp_of_mixtures` is another one now. Also raises SafetensorError when files are damaged."""
        self._check_new(model_id, spec, "train")
        with command_on(self._device, waits=True):
            empty = Adapter(spec, self._targets(spec), self._device, drawn=False)
            self._adapters[model_id] = files.load_state(empty, directory, self._base.targets, optimizer=True)

    def _check_new(self, model_id: str, spec: LoraSpec, train_mlp_of_mixtures: TrainMlpOfMixtures) -> None:
        checks.check_spec(spec, self._max_rank, self._limits.mixture, train_mlp_of_mixtures)
        if model_id in self._adapters:
            raise InvalidRequest(f"model_id: {model_id} exists already")

    def _targets(self, spec: LoraSpec) -> list[Target]:
        """What a new adapter trains."""
        mlp = self._limits.mixture is None or self._train_mlp_of_mixtures == "train"
        return trained_targets(self._base.targets, spec, mlp=mlp)

    def kinds_of_layers(self, spec: LoraSpec) -> list[str]:
        return kinds_of(self._targets(spec))

    def create_probe(self, model_id: str, spec: LoraSpec, kinds: Collection[str] = (), size: float = 0.0) -> None:
        """As `Backend.create_probe`."""
        self._check_new(model_id, spec, self._train_mlp_of_mixtures)
        with command_on(self._device, waits=True):
            self._adapters[model_id] = random_adapter(spec, self._targets(spec), kinds, size, self._device)

    def delete_model(self, model_id: str) -> None:
        self._adapters.pop(model_id, None)

    def check(self, training_pass: TrainingPass) -> None:
        self._adapter(training_pass.model_id)
        checks.check_pass(training_pass, self._limits, self._losses)

    def run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        """One outcome per pass, in order; gradients are added in the order of `passes`.

        A pass that `check` refuses, or with a loss that is not finite, fails with InvalidRequest; with `merge_passes`
        also one whose gradient has no finite norm. If a micro-batch raises, its slices run again one by one;
        OutOfMemory, or another error of torch, is the outcome of the passes that fail again. Raises DeviceFault when
        the device does not answer any more.
        """
        with command_on(self._device, waits=True):
            return self._run(passes)

    def _run(self, training_passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        started = [self._start(each) for each in training_passes]
        for backward in (False, True):
            passes = [
                running
                for running in started
                if isinstance(running, SinglePassRun) and running.training_pass.backward == backward
            ]
            self._run_checked(join_passes(passes, self._device) if self._merge else passes, backward=backward)
        return [
            with_frozen_experts(running.outcome(), running.adapter.spec, running.adapter.targets, self._limits.mixture)
            if isinstance(running, SinglePassRun)
            else running
            for running in started
        ]

    def _run_checked(self, running: Sequence[PassRun], *, backward: bool) -> None:
        of_each = [items_of(each, self._budget, self._device) for each in running]
        for trained in (False, True):
            slices = [piece for of_one in of_each for piece in of_one if piece.trained is trained]
            for batch in cut([piece.rows for piece in slices], self._shared_rows):
                pieces = slices[batch.start : batch.stop]
                run_micro_batch(self._base, pieces, backward=backward)
                # soon, so that few gradients wait beside those of the adapters
                self._finish([piece.running for piece in pieces if piece.last], backward=backward)
        self._finish([each for each, of_one in zip(running, of_each, strict=True) if not of_one], backward=backward)

    def _finish(self, finished: Sequence[PassRun], *, backward: bool) -> None:
        if self._merge:
            finish(self._base, finished, self._budget, backward=backward)
            return
        for running in finished:
            running.add_gradient()

    def check_step(self, params: AdamParams) -> None:
        checks.check_adam(params)

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """See `adamw_step` for metrics and errors. Raises InvalidRequest for hyper-parameters out of range."""
        self.check_step(params)
        with command_on(self._device, waits=True):
            return adamw_step(self._adapter(model_id), params)

    def clear_gradient(self, model_id: str) -> None:
        self._adapter(model_id).gradient = None

    def save_state(self, model_id: str, directory: Path) -> None:
        with command_on(self._device, waits=False):  # saves do not wait for other models' passes
            files.save_state(self._adapter(model_id), self._base.path, directory)

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        with command_on(self._device, waits=True):
            adapter = self._adapter(model_id)
            self._adapters[model_id] = files.load_state(adapter, directory, self._base.targets, optimizer=optimizer)

    def save_adapter(self, model_id: str, directory: Path, *, dtype: AdapterDtype | None = None) -> None:
        with command_on(self._device, waits=False):
            files.save_adapter(self._adapter(model_id), self._base.path, directory, getattr(torch, dtype or "float32"))

    def close(self) -> None:
        self._adapters.clear()

    def _adapter(self, model_id: str) -> Adapter:
        if model_id not in self._adapters:
            raise InvalidRequest(f"model_id: there is no model {model_id}")
        return self._adapters[model_id]

    def _start(self, training_pass: TrainingPass) -> SinglePassRun | Exception:
        try:
            self.check(training_pass)
            training_pass = with_sorted_experts(training_pass, self._limits.mixture)
        except Exception as error:  # it is this pass's outcome; others go on
            return failure_of(error, self._device)
        return SinglePassRun(self._adapter(training_pass.model_id), training_pass, self._losses[training_pass.loss_fn])


class ShardedBackend(BackendOverRanks):
    """LoRA training on several ranks. Each rank holds a part of the base model and runs a part of every pass.

    On CPUs a pass is cut and divided by itself alone, each piece goes through the model alone, and sums over ranks have
    a fixed order: so results are the same to the last bit however passes are grouped, as long as the number of ranks
    stays the same. Another number of ranks changes the order of the sums, so results differ by rounding. With
    `merge_passes` (the default on CUDA) and on CUDA, see `TorchLoraBackend`.

    Files are the same as those of `TorchLoraBackend`: each backend reads what the other has written, and what was
    written with another number of ranks.
    """

    def __init__(self, config: ServerConfig, group: RankGroup) -> None:
        """As `BackendOverRanks`."""
        super().__init__(config, group)
        facts: AdapterFacts = self._facts
        self._targets = facts.targets
        self._divides_experts = config.backend_config.trainer.placement.expert_parallel
        self._max_rank = config.backend_config.lora.max_lora_rank
        self._train_mlp_of_mixtures: TrainMlpOfMixtures = config.backend_config.lora.train_mlp_of_mixtures
        merge = config.backend_config.trainer.merge_passes
        self._merge = not self._on_cpu if merge is None else merge
        shared_rows = min(self._budget, SHARED_ROWS_ON_CPU) if self._on_cpu else self._budget
        self._shared_rows = shared_rows if self._merge else 0
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
        self._put(model_id, random_adapter(spec, self._targets_of(spec), kinds, size, HOST))

    def delete_model(self, model_id: str) -> None:
        if self._models.pop(model_id, None) is not None:
            self._call("delete", model_id)

    def _run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        numbered = list(enumerate(passes))
        forwards, backwards = (
            make_plan(
                [(number, each) for number, each in numbered if each.backward == backward],
                self._group.size,
                self._budget,
                shared_rows=self._shared_rows,
                divided_tokens=self._divided_tokens,
            )
            for backward in (False, True)
        )
        results: list[dict[int, list[ShareResult]]] = self._call("run", passes, forwards, backwards)
        outcomes = (
            outcome_of(each, self._losses[each.loss_fn], number, backwards if each.backward else forwards, results)
            for number, each in numbered
        )
        known = [self._known(each.model_id) for each in passes]
        return [
            with_frozen_experts(each, *of_model, self._limits.mixture)
            for each, of_model in zip(outcomes, known, strict=True)
        ]

    def save_state(self, model_id: str, directory: Path) -> None:
        files.save_state(self._copy(model_id, optimizer=True), self._path, directory)

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        self._load(model_id, self._empty(model_id), directory, optimizer=optimizer)

    def restore_model(self, model_id: str, spec: LoraSpec, directory: Path) -> None:
        """As `TorchLoraBackend.restore_model`."""
        self._check_new(model_id, spec, "train")
        empty = Adapter(spec, self._targets_of(spec), HOST, drawn=False)
        self._load(model_id, empty, directory, optimizer=True)

    def _load(self, model_id: str, empty: Adapter, directory: Path, *, optimizer: bool) -> None:
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
            answers = self._group.read_all("export", model_id, optimizer)
        else:
            answers = [self._group.read("export", model_id, optimizer)]
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
