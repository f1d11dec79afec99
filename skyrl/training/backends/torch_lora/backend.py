"""The backend: keeps adapters by model id on one base model, and decides which slices run together.

Knows nothing of the command log, the wire or the sampler.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from skyrl.base.config.server import ServerConfig, takes_pictures
from skyrl.base.model_files import TrainMlpOfMixtures
from skyrl.base.types.weights import LoraSpec
from skyrl.training.backends.base import (
    AdamParams,
    AdapterDtype,
    InvalidRequest,
    ModelLimits,
    PassResult,
    TrainingPass,
)
from skyrl.training.backends.torch_lora import checks, state
from skyrl.training.backends.torch_lora.adapter import Adapter, Target
from skyrl.training.backends.torch_lora.device import command_on, failure_of, prepare_device
from skyrl.training.backends.torch_lora.experts import noted
from skyrl.training.backends.torch_lora.joined import finish, joined
from skyrl.training.backends.torch_lora.losses import served_losses
from skyrl.training.backends.torch_lora.model import load_base_model
from skyrl.training.backends.torch_lora.optimizer import adamw_step
from skyrl.training.backends.torch_lora.packing import cut
from skyrl.training.backends.torch_lora.passes import run_micro_batch
from skyrl.training.backends.torch_lora.probe import kinds_of, random_adapter
from skyrl.training.backends.torch_lora.projections import trained_targets
from skyrl.training.backends.torch_lora.routed_experts import with_sorted_experts
from skyrl.training.backends.torch_lora.row_budget import BudgetSettings
from skyrl.training.backends.torch_lora.row_probe import measure_row
from skyrl.training.backends.torch_lora.running import Running, RunningPass, slices_of
from skyrl.training.backends.torch_lora.state_snapshots import StateSnapshots

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
            self._adapters[model_id] = state.load_state(empty, directory, self._base.targets, optimizer=True)

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
                if isinstance(running, RunningPass) and running.training_pass.backward == backward
            ]
            self._run_checked(joined(passes, self._device) if self._merge else passes, backward=backward)
        return [
            noted(running.outcome(), running.adapter.spec, running.adapter.targets, self._limits.mixture)
            if isinstance(running, RunningPass)
            else running
            for running in started
        ]

    def _run_checked(self, running: Sequence[Running], *, backward: bool) -> None:
        of_each = [slices_of(each, self._budget, self._device) for each in running]
        for trained in (False, True):
            slices = [piece for of_one in of_each for piece in of_one if piece.trained is trained]
            for batch in cut([piece.rows for piece in slices], self._shared_rows):
                pieces = slices[batch.start : batch.stop]
                run_micro_batch(self._base, pieces, backward=backward)
                # soon, so that few gradients wait beside those of the adapters
                self._finish([piece.running for piece in pieces if piece.last], backward=backward)
        self._finish([each for each, of_one in zip(running, of_each, strict=True) if not of_one], backward=backward)

    def _finish(self, finished: Sequence[Running], *, backward: bool) -> None:
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
            state.save_state(self._adapter(model_id), self._base.path, directory)

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        with command_on(self._device, waits=True):
            adapter = self._adapter(model_id)
            self._adapters[model_id] = state.load_state(adapter, directory, self._base.targets, optimizer=optimizer)

    def save_adapter(self, model_id: str, directory: Path, *, dtype: AdapterDtype | None = None) -> None:
        with command_on(self._device, waits=False):
            state.save_adapter(self._adapter(model_id), self._base.path, directory, getattr(torch, dtype or "float32"))

    def close(self) -> None:
        self._adapters.clear()

    def _adapter(self, model_id: str) -> Adapter:
        if model_id not in self._adapters:
            raise InvalidRequest(f"model_id: there is no model {model_id}")
        return self._adapters[model_id]

    def _start(self, training_pass: TrainingPass) -> RunningPass | Exception:
        try:
            self.check(training_pass)
            training_pass = with_sorted_experts(training_pass, self._limits.mixture)
        except Exception as error:  # it is this pass's outcome; others go on
            return failure_of(error, self._device)
        return RunningPass(self._adapter(training_pass.model_id), training_pass, self._losses[training_pass.loss_fn])
