"""The backend whose base model is spread over ranks: checks commands, plans passes, and keeps files of adapters.

Lives in the engine's process, without a model. Knows nothing of how calls reach the ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.backends.base import (
    AdamParams,
    AdapterDtype,
    InvalidRequest,
    ModelLimits,
    PassResult,
    TrainingPass,
)
from skyrl.backends.torch_lora import checks, state
from skyrl.backends.torch_lora.adapter import Adapter, Target
from skyrl.backends.torch_lora.group import RankGroup, results_of
from skyrl.backends.torch_lora.lora import trained_targets
from skyrl.backends.torch_lora.losses import Loss, served_losses
from skyrl.backends.torch_lora.metrics import Tally
from skyrl.backends.torch_lora.passes import not_finite, result_of
from skyrl.backends.torch_lora.plan import Plan, make_plan
from skyrl.backends.torch_lora.rank import AdapterBuffers, BaseFacts, PieceResult, RankSettings
from skyrl.config.server import ServerConfig
from skyrl.types.lora import LoraSpec

_CPU = torch.device("cpu")


def rank_settings(config: ServerConfig) -> RankSettings:
    trainer = config.backend_config.trainer
    return RankSettings(
        config.base_model_path,
        config.threads,
        trainer.gradient_checkpointing,
        config.losses.stable_reinforce,
        trainer.rank_timeout_s,
    )


class ShardedBackend:
    """LoRA training on several ranks. Each rank holds a part of the base model and runs a part of every pass.

    On CPUs a pass is cut and divided by itself alone, each piece goes through the model alone, and sums over ranks have
    a fixed order: so results are the same to the last bit however passes are grouped, as long as the number of ranks
    stays the same. Another number of ranks changes the order of the sums, so results differ by rounding. With
    `merge_passes` (the default on CUDA) and on CUDA, see `TorchLoraBackend`.

    Files are the same as those of `TorchLoraBackend`: each backend reads what the other has written, and what was
    written with another number of ranks.
    """

    def __init__(self, config: ServerConfig, group: RankGroup) -> None:
        """Loads the base model on all ranks of `group`, which `close` ends.

        Raises ConfigError when the base model cannot be trained, and RankDied.
        """
        self._group = group
        self._path = config.base_model_path
        self._budget = config.backend_config.trainer.micro_batch_tokens
        self._max_rank = config.backend_config.lora.max_lora_rank
        self._losses = served_losses(config.losses.stable_reinforce)
        try:
            facts: list[BaseFacts] = results_of(group.call("load"))
        except BaseException:
            group.close()
            raise
        self._on_cpu = all(each.device == "cpu" for each in facts)
        merge = config.backend_config.trainer.merge_passes
        self._merge = not self._on_cpu if merge is None else merge
        self._targets = facts[0].targets
        max_model_len = config.backend_config.inference.max_model_len
        max_context = facts[0].max_context
        self._limits = ModelLimits(facts[0].vocab_size, min(max_context, max_model_len or max_context))
        self._models: dict[str, tuple[LoraSpec, tuple[Target, ...]]] = {}

    @property
    def limits(self) -> ModelLimits:
        return self._limits

    @property
    def merges_passes(self) -> bool:
        return self._merge

    @property
    def repeats_exactly(self) -> bool:
        return self._on_cpu and not self._merge

    def create_model(self, model_id: str, spec: LoraSpec) -> None:
        """Add an adapter. Raises InvalidRequest: the id exists, or the spec cannot be honoured."""
        checks.check_spec(spec, self._max_rank)
        if model_id in self._models:
            raise InvalidRequest(f"model_id: {model_id} exists already")
        self._call("create", model_id, spec)
        self._models[model_id] = spec, tuple(trained_targets(self._targets, spec))

    def delete_model(self, model_id: str) -> None:
        if self._models.pop(model_id, None) is not None:
            self._call("delete", model_id)

    def check(self, training_pass: TrainingPass) -> None:
        self._known(training_pass.model_id)
        checks.check_pass(training_pass, self._limits, self._losses)

    def run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        """One outcome per pass, in order; gradients are added in the order of `passes`.

        A pass that `check` refuses, or with a loss that is not finite, fails with InvalidRequest. Memory that runs out
        in the base model leaves the ranks apart: RankDied.
        """
        outcomes: dict[int, PassResult | Exception] = {}
        checked: list[tuple[int, TrainingPass]] = []
        for index, training_pass in enumerate(passes):
            try:
                self.check(training_pass)
            except InvalidRequest as error:
                outcomes[index] = error
            else:
                checked.append((index, training_pass))
        if checked:
            for (index, _), outcome in zip(checked, self._run([each for _, each in checked]), strict=True):
                outcomes[index] = outcome
        return [outcomes[index] for index in range(len(passes))]

    def _run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        numbered = list(enumerate(passes))
        forwards, backwards = (
            make_plan(
                [(number, each) for number, each in numbered if each.backward == backward],
                self._group.size,
                self._budget,
                merge=self._merge,
            )
            for backward in (False, True)
        )
        results: list[dict[int, list[PieceResult]]] = self._call("run", passes, forwards, backwards)
        return [
            _outcome(each, self._losses[each.loss_fn], number, backwards if each.backward else forwards, results)
            for number, each in numbered
        ]

    def check_step(self, params: AdamParams) -> None:
        checks.check_adam(params)

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """See `adamw_step` for metrics and errors. Raises InvalidRequest for hyper-parameters out of range."""
        self.check_step(params)
        self._known(model_id)
        return self._call("optim_step", model_id, params)[0]

    def clear_gradient(self, model_id: str) -> None:
        self._known(model_id)
        self._call("clear_gradient", model_id)

    def save_state(self, model_id: str, directory: Path) -> None:
        state.save_state(self._copy(model_id, optimizer=True), self._path, directory)

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        adapter = self._empty(model_id)
        state.load_state(adapter, directory, optimizer=optimizer)
        parts = (adapter.weights, adapter.exp_avg, adapter.exp_avg_sq, adapter.gradient)
        weights, exp_avg, exp_avg_sq, gradient = (None if part is None else part.numpy() for part in parts)
        assert weights is not None
        self._call("replace", model_id, AdapterBuffers(weights, exp_avg, exp_avg_sq, gradient, adapter.step))

    def save_adapter(self, model_id: str, directory: Path, *, dtype: AdapterDtype | None = None) -> None:
        copied = self._copy(model_id, optimizer=False)
        state.save_adapter(copied, self._path, directory, getattr(torch, dtype or "float32"))

    def save_snapshot(self, model_id: str, directory: Path) -> None:
        """A snapshot has the same files as a checkpoint: every rank has whole adapters, so one rank sends all."""
        self.save_state(model_id, directory)

    def restore_model(self, model_id: str, spec: LoraSpec, directory: Path) -> None:
        """As `Backend.restore_model`. Also raises SafetensorError when files are damaged."""
        self.create_model(model_id, spec)
        try:
            self.load_state(model_id, directory, optimizer=True)
        except Exception:
            self.delete_model(model_id)
            raise

    def close(self) -> None:
        self._models.clear()
        self._group.close()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return results_of(self._group.call(method, *arguments))

    def _known(self, model_id: str) -> tuple[LoraSpec, tuple[Target, ...]]:
        if model_id not in self._models:
            raise InvalidRequest(f"model_id: there is no model {model_id}")
        return self._models[model_id]

    def _empty(self, model_id: str) -> Adapter:
        """An adapter of the model's shape on the CPU. Its weights are not the model's."""
        spec, targets = self._known(model_id)
        return Adapter(spec, targets, _CPU, drawn=False)

    def _copy(self, model_id: str, *, optimizer: bool) -> Adapter:
        adapter = self._empty(model_id)
        buffers: AdapterBuffers = results_of([self._group.read("export", model_id, optimizer)])[0]
        parts = (buffers.weights, buffers.exp_avg, buffers.exp_avg_sq, buffers.gradient)
        weights, exp_avg, exp_avg_sq, gradient = (None if part is None else _tensor(part) for part in parts)
        assert weights is not None
        adapter.replace(weights, exp_avg, exp_avg_sq, gradient, buffers.step)
        return adapter


def _tensor(array: npt.NDArray[np.float32]) -> Tensor:
    """A tensor on the array's memory, which is not written to: the arrays that Ray delivers are read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(array)


def _outcome(
    training_pass: TrainingPass,
    loss: Loss,
    number: int,
    plan: Plan,
    results: Sequence[Mapping[int, Sequence[PieceResult]]],
) -> PassResult | Exception:
    """A pass's outcome from the pieces that the ranks ran, added rank by rank in the order of the plan."""
    of_rank = [iter(each.get(number, ())) for each in results]
    tally = Tally()
    logprobs: dict[int, npt.NDArray[np.float32]] = {}
    for rank, piece in plan.pieces_of(number):
        result = next(of_rank[rank])
        tally.add_all(result.tally)
        if isinstance(result.error, FloatingPointError):
            return not_finite(training_pass, tally.loss)
        if result.error is not None:
            return result.error
        logprobs |= zip(piece.data, result.logprobs, strict=True)
    return result_of(loss, [logprobs[index] for index in range(len(training_pass.data))], tally)
