"""The backend for full fine-tuning: one model at a time, all of whose parameters are trained.

Knows nothing of the command log, the wire or the sampler.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from skyrl.base.config.server import ServerConfig, takes_pictures
from skyrl.base.types.weights import LoraSpec
from skyrl.training.backends.base import (
    AdamParams,
    AdapterDtype,
    InvalidRequest,
    ModelLimits,
    PassResult,
    PlaceTaken,
    TrainingPass,
)
from skyrl.training.backends.torch_full import state
from skyrl.training.backends.torch_full.model import FullModel
from skyrl.training.backends.torch_full.optimizer import adamw_step
from skyrl.training.backends.torch_full.parameters import FullParameters
from skyrl.training.backends.torch_full.passes import run_slice
from skyrl.training.backends.torch_lora import checks
from skyrl.training.backends.torch_lora.device import command_on, failure_of, prepare_device
from skyrl.training.backends.torch_lora.losses import served_losses
from skyrl.training.backends.torch_lora.routed_experts import with_sorted_experts
from skyrl.training.backends.torch_lora.row_budget import BudgetSettings
from skyrl.training.backends.torch_lora.row_probe import measure_row
from skyrl.training.backends.torch_lora.running import RunningPass, slices_of
from skyrl.training.backends.torch_lora.state_snapshots import StateSnapshots


class TorchFullBackend(StateSnapshots):
    """Full fine-tuning on one device: float32 on a CPU; on CUDA bfloat16, with float32 weights, gradients and moments.

    Slices run one at a time, so on a CPU results are the same to the last bit however passes are grouped.

    Raises ConfigError when the base model cannot be trained.
    """

    merges_passes = False

    def __init__(self, config: ServerConfig) -> None:
        trainer = config.backend_config.trainer
        self._device = prepare_device(config.threads)
        self._model = FullModel(
            config.base_model_path,
            self._device,
            gradient_checkpointing=trainer.gradient_checkpointing,
            pictures=takes_pictures(config),
        )
        budget = BudgetSettings.of(config)
        if budget.measures_on(self._device):
            measure_row(self._model.base, ())
        self._budget = budget.chosen([budget.of_model(self._model.base.packed)])
        self._limits = self._model.base.limits(config)
        self._losses = served_losses(config.losses.stable_reinforce)
        self._trained: tuple[str, FullParameters] | None = None

    @property
    def limits(self) -> ModelLimits:
        return self._limits

    @property
    def micro_batch_tokens(self) -> int:
        return self._budget

    @property
    def repeats_exactly(self) -> bool:
        return self._device.type == "cpu"

    def create_model(self, model_id: str, spec: LoraSpec) -> None:
        """Begin with the base model's weights. Raises PlaceTaken while another model is trained, and InvalidRequest:
        the id exists, or `spec` asks for an adapter."""
        check_place(spec, model_id, None if self._trained is None else self._trained[0])
        with command_on(self._device, waits=True):
            weights = self._model.read_base()
            copies = {name: tensor.to(self._device, copy=True) for name, tensor in weights.items()}
            parameters = FullParameters(copies, self._device)
            self._model.bind(parameters)
        self._trained = model_id, parameters

    def kinds_of_layers(self, spec: LoraSpec) -> list[str]:
        return []

    def create_probe(self, model_id: str, spec: LoraSpec, kinds: Collection[str] = (), size: float = 0.0) -> None:
        """As `Backend.create_probe`."""
        check_place(spec, model_id, None if self._trained is None else self._trained[0])
        self._trained = model_id, self._model.parameters(self._device)

    def delete_model(self, model_id: str) -> None:
        """A save of the model that still runs goes on with the model's own memory."""
        if self._trained is not None and self._trained[0] == model_id:
            self._trained = None

    def check(self, training_pass: TrainingPass) -> None:
        self._parameters(training_pass.model_id)
        checks.check_pass(training_pass, self._limits, self._losses)

    def run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        """One outcome per pass, in order. A pass that `check` refuses, or with a loss that is not finite, fails with
        InvalidRequest; OutOfMemory, or another error of torch, fails its pass. Raises DeviceFault when the device does
        not answer any more."""
        with command_on(self._device, waits=True):
            return [self._run(training_pass) for training_pass in passes]

    def _run(self, training_pass: TrainingPass) -> PassResult | Exception:
        try:
            self.check(training_pass)
            training_pass = with_sorted_experts(training_pass, self._limits.mixture)
        except Exception as error:  # it is this pass's outcome
            return failure_of(error, self._device)
        parameters = self._parameters(training_pass.model_id)
        # A RunningPass only hands its gradient over, which the parameters take as an adapter does
        running = RunningPass(cast(Any, parameters), training_pass, self._losses[training_pass.loss_fn])
        for piece in slices_of(running, self._budget, self._device):
            run_slice(self._model, parameters, piece, backward=training_pass.backward)
        running.add_gradient()
        return running.outcome()

    def check_step(self, params: AdamParams) -> None:
        checks.check_adam(params)

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """See `torch_lora.optimizer.adamw_step` for metrics and errors. Raises InvalidRequest for hyper-parameters out
        of range."""
        self.check_step(params)
        parameters = self._parameters(model_id)
        with command_on(self._device, waits=True):
            metrics = adamw_step(parameters, params)
            self._model.weights_changed(parameters)
            return metrics

    def clear_gradient(self, model_id: str) -> None:
        self._parameters(model_id).gradient = None

    def save_state(self, model_id: str, directory: Path) -> None:
        with command_on(self._device, waits=False):
            state.save_state(self._model, self._parameters(model_id), directory)

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        with command_on(self._device, waits=True):
            state.load_state(self._model, self._parameters(model_id), directory, optimizer=optimizer)

    def save_adapter(self, model_id: str, directory: Path, *, dtype: AdapterDtype | None = None) -> None:
        """Write the whole model in Hugging Face's format. `dtype` None: the dtype that the model computes in, which is
        that of vLLM on such a device. Raises FloatingPointError for weights that no sampler takes."""
        chosen = self._model.dtype if dtype is None else getattr(torch, dtype)
        with command_on(self._device, waits=False):
            if not state.are_finite(self._parameters(model_id)):
                raise weights_not_finite()
            state.save_model(self._model, self._parameters(model_id), directory, chosen)

    def close(self) -> None:
        self._trained = None

    def _parameters(self, model_id: str) -> FullParameters:
        if self._trained is None or self._trained[0] != model_id:
            raise InvalidRequest(f"model_id: there is no model {model_id}")
        return self._trained[1]


def check_place(spec: LoraSpec, model_id: str, trained: str | None) -> None:
    """Raise InvalidRequest for an adapter, for a model of which only a part is to be trained, and for an id that
    exists; PlaceTaken while another model is `trained`."""
    if not spec.is_full:
        raise InvalidRequest(
            f"lora_config.rank: must be 0, got {spec.rank}: this server trains whole models (trainer.full_finetuning)"
        )
    if not (spec.train_attn and spec.train_mlp and spec.train_unembed):
        raise InvalidRequest("lora_config: with rank 0 train_attn, train_mlp and train_unembed must all be true")
    if trained == model_id:
        raise InvalidRequest(f"model_id: {model_id} exists already")
    if trained is not None:
        raise PlaceTaken("lora_config.rank: another model is being trained")


def weights_not_finite() -> FloatingPointError:
    return FloatingPointError(
        "the model's weights hold NaN or infinity, so nothing can be sampled from them: load a checkpoint from before, "
        "and lower the learning rate"
    )
