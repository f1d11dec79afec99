"""The backend: checks commands, calls all ranks, and puts together what they have computed; first for adapters.

A `RankGroup` is the ranks as the engine sees them: a call goes to all of them, and comes back with the answers of all
(`skyrl.engine.rank_actors` has the implementation on Ray). A trainer on one device is a group of one rank in the
engine's process (`InThisProcess`). `BackendOverRanks` is what all backends share. `LoraBackend` knows adapters by model
id, decides which passes run together, and keeps their files. Knows nothing of the command log, the wire or the sampler,
or of how calls reach other ranks.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.base.config.server import ServerConfig
from skyrl.base.model_files import TrainMlpOfMixtures
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer import losses
from skyrl.trainer.adamw import check_adam
from skyrl.trainer.collectives import SameFailureEverywhere
from skyrl.trainer.critic import with_advantages
from skyrl.trainer.custom_loss.loss import loss_of, with_custom
from skyrl.trainer.device import HOST, command_on, failure_of
from skyrl.trainer.experts.routing import with_frozen_experts
from skyrl.trainer.lora import files
from skyrl.trainer.lora.adapter import Adapter, Target, check_pattern, check_spec, random_adapter, with_value_head
from skyrl.trainer.losses import Loss, served_losses
from skyrl.trainer.model.packed_model import trained_targets
from skyrl.trainer.model.row_budget import BudgetSettings
from skyrl.trainer.passes.pass_run import ShareResult, result_of
from skyrl.trainer.protocol import (
    AdamParams,
    AdapterDtype,
    InvalidRequest,
    ModelLimits,
    PassResult,
    TrainingPass,
)
from skyrl.trainer.ranks.lora_rank import AdapterArrays, AdapterFacts, LoraRank
from skyrl.trainer.ranks.plan import Plan, make_plan, plan_alone
from skyrl.trainer.ranks.rank import BaseFacts, RankBase, RankSettings
from skyrl.trainer.rows.routed_experts import with_sorted_experts
from skyrl.trainer.shares import join_buffers
from skyrl.trainer.tally import Tally


class RankGroup(Protocol):
    """Ranks that run the same calls in the same order: each a `RankBase`, in a process of its own if they are several.

    `call`, `call_each`, `read` and `read_all` return what `RankBase.answer` has returned. They raise RankDied, naming
    the rank and its node, when a rank has died, has raised an exception, or has not answered for the group's timeout;
    from then on always.
    """

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks, with the same arguments; the answers by rank. Several threads may call: the
        calls of several ranks run one after the other."""
        ...

    def call_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """As `call`, with other arguments for each rank."""
        ...

    def read(self, method: str, *arguments: Any) -> Any:
        """Call a method on rank 0 that changes nothing. It may run beside a `call`."""
        ...

    def read_all(self, method: str, *arguments: Any) -> list[Any]:
        """As `read`, on every rank; the answers by rank."""
        ...

    def close(self) -> None:
        """End the ranks. They keep nothing."""
        ...


class InThisProcess:
    """A group of one rank on this process's device. Errors of the rank are raised as they are, or as OutOfMemory or
    DeviceFault. A `read` may run on another thread while the rank runs a `call`, and does not wait for the device.

    Calls do not wait for each other: a save's, on its own thread, run beside those of other models. What they read is
    its model's alone, so nothing is lost. All calls that change a model come from one thread.
    """

    size = 1

    def __init__(self, rank: RankBase) -> None:
        self.rank = rank

    def call(self, method: str, *arguments: Any) -> list[Any]:
        with command_on(self.rank.device, waits=True):
            return [self.rank.answer(method, arguments)]

    def call_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        return self.call(method, *arguments[0])

    def read(self, method: str, *arguments: Any) -> Any:
        with command_on(self.rank.device, waits=False):
            return self.rank.answer(method, arguments)

    def read_all(self, method: str, *arguments: Any) -> list[Any]:
        return [self.read(method, *arguments)]

    def close(self) -> None:
        self.rank.leave()


def results_of(answers: Sequence[Any]) -> list[Any]:
    """The results by rank. If the ranks have agreed on a failure, raises the error of the first rank that has one."""
    for answer in answers:
        if isinstance(answer, SameFailureEverywhere) and answer.error is not None:
            raise answer.error
    return list(answers)


class BackendOverRanks(ABC):
    """A backend whose model is divided over the ranks of a group, or whole on the only one."""

    rank_class: type[RankBase]
    """Of the rank in this process."""

    def __init__(self, config: ServerConfig, group: RankGroup | None = None) -> None:
        """Loads the base model on all ranks of `group`, which `close` ends. None: on this process's device.

        Raises ConfigError when the base model cannot be trained, and RankDied.
        """
        group = InThisProcess(self.rank_class(0, 1, RankSettings.of(config))) if group is None else group
        self.group = group
        self._path = config.base_model_path
        self._losses = served_losses(config.losses.stable_reinforce)
        try:
            facts: list[BaseFacts] = results_of(group.call("load"))
        except BaseException:
            group.close()
            raise
        self._device_type = facts[0].device
        self._on_cpu = all(each.device == "cpu" for each in facts)
        self._budget = BudgetSettings.of(config).chosen([each.budget for each in facts])
        max_model_len = config.backend_config.inference.max_model_len
        first = facts[0]
        context = min(first.max_context, max_model_len or first.max_context)
        name = config.role.state_keys[0]
        self._limits = ModelLimits(first.vocab_size, context, first.mixture, first.sight, name, first.ties_unembedding)
        self._facts: Any = first

    @property
    def limits(self) -> ModelLimits:
        return self._limits

    @property
    def micro_batch_tokens(self) -> int:
        return self._budget

    def check(self, training_pass: TrainingPass) -> None:
        self._require(training_pass.model_id)
        head = self._has_value_head(training_pass.model_id)
        losses.check_pass(training_pass, self._limits, with_custom(self._losses, training_pass), value_head=head)

    def run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        """One outcome per pass, in order; gradients are added in the order of `passes`.

        A pass that `check` refuses, or with a loss that is not finite, fails with InvalidRequest; on one device with
        `merge_passes` also one whose gradient has no finite norm. There, if a micro-batch raises, its pieces run again
        one by one; OutOfMemory, or another error of torch, is the outcome of the passes that fail again. Memory that
        runs out in the base model leaves several ranks apart: RankDied.
        """
        outcomes: dict[int, PassResult | Exception] = {}
        checked: list[tuple[int, TrainingPass]] = []
        for index, training_pass in enumerate(passes):
            try:
                self.check(training_pass)
                training_pass = with_advantages(training_pass)
                if (mixture := self._limits.mixture) is not None:
                    training_pass = with_sorted_experts(training_pass, mixture)
                checked.append((index, training_pass))
            except Exception as error:  # it is this pass's outcome; others go on
                outcomes[index] = failure_of(error, HOST)
        if checked:
            for (index, _), outcome in zip(checked, self._run([each for _, each in checked]), strict=True):
                outcomes[index] = outcome
        return [outcomes[index] for index in range(len(passes))]

    def yield_to(self, others: Callable[[], None]) -> None:
        if isinstance(self.group, InThisProcess):
            self.group.rank.between = others

    def check_step(self, params: AdamParams) -> None:
        check_adam(params)

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """See `adamw_step` for metrics and errors. Raises InvalidRequest for hyper-parameters out of range."""
        self.check_step(params)
        self._require(model_id)
        return self._call("optim_step", model_id, params)[0]

    def clear_gradient(self, model_id: str) -> None:
        self._require(model_id)
        self._call("clear_gradient", model_id)

    def save_snapshot(self, model_id: str, directory: Path) -> None:
        """Write the files of `save_state`."""
        self.save_state(model_id, directory)

    @abstractmethod
    def save_state(self, model_id: str, directory: Path) -> None: ...

    def close(self) -> None:
        self.group.close()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return results_of(self.group.call(method, *arguments))

    def _run_planned(
        self, passes: Sequence[TrainingPass], *, merge: bool, shared_rows: int, divided_tokens: int | None = None
    ) -> list[PassResult | Exception]:
        """Run checked passes. `merge`: whether passes share micro-batches, of at most `shared_rows` rows."""

        def plan(*, backward: bool) -> Plan:
            chosen = [(number, each) for number, each in enumerate(passes) if each.backward == backward]
            if self.group.size == 1:
                rows = shared_rows if merge else 1
                return plan_alone(chosen, self._budget, self._losses, self._device_type, merge=merge, shared_rows=rows)
            rows = shared_rows if merge else 0
            return make_plan(chosen, self.group.size, self._budget, shared_rows=rows, divided_tokens=divided_tokens)

        forwards, backwards = plan(backward=False), plan(backward=True)
        results: list[dict[int, list[ShareResult]]] = self._call("run", passes, forwards, backwards)
        failed = {**forwards.failed, **backwards.failed}
        return [
            failed[number] if number in failed else outcome_of(loss_of(each, self._losses), number, results)
            for number, each in enumerate(passes)
        ]

    @abstractmethod
    def _require(self, model_id: str) -> None:
        """Raise InvalidRequest unless there is such a model."""

    def _has_value_head(self, model_id: str) -> bool:
        return False

    @abstractmethod
    def _run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        """Run checked passes."""


def outcome_of(
    loss: Loss, number: int, results: Sequence[Mapping[int, Sequence[ShareResult]]]
) -> PassResult | Exception:
    """A pass's outcome from the pieces that the ranks ran, added rank by rank in the order in which each ran them."""
    tally = Tally()
    logprobs: dict[int, npt.NDArray[np.float32]] = {}
    values: dict[int, npt.NDArray[np.float32]] = {}
    for of_rank in results:
        for result in of_rank[number]:
            if result.error is not None:
                return result.error
            tally.add_all(result.tally)
            logprobs |= zip(result.data, result.logprobs, strict=True)
            values |= zip(result.data, result.values or (), strict=False)
    return result_of(loss, logprobs, tally, values)


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
        self._hidden = next(each.in_features for each in facts.targets if each.name.endswith("lm_head"))
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
        check_pattern(spec, targets)
        self._call("create", model_id, spec, targets)
        self._models[model_id] = spec, targets

    def _check_new(self, model_id: str, spec: LoraSpec, train_mlp_of_mixtures: TrainMlpOfMixtures) -> None:
        check_spec(spec, self._max_rank, self._limits.mixture, train_mlp_of_mixtures)
        if model_id in self._models:
            raise InvalidRequest(f"model_id: {model_id} exists already")

    def _targets_of(self, spec: LoraSpec) -> tuple[Target, ...]:
        """What a new adapter trains."""
        mlp = self._limits.mixture is None or self._train_mlp_of_mixtures == "train"
        targets = tuple(trained_targets(self._targets, spec, mlp=mlp))
        return with_value_head(targets, self._hidden) if spec.value_head else targets

    def layers_of(self, spec: LoraSpec) -> tuple[Target, ...]:
        return self._targets_of(spec)

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
        if self._limits.mixture is None:
            return outcomes
        return [
            with_frozen_experts(outcome, *self._known(each.model_id))
            for outcome, each in zip(outcomes, passes, strict=True)
        ]

    def save_state(self, model_id: str, directory: Path) -> None:
        with command_on(HOST, waits=False):
            files.save_state(self._exported(model_id, optimizer=True), self._path, directory)

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
        arrays = [None if part is None else part.numpy() for part in adapter.parts]
        self._call("replace", model_id, adapter.spec, adapter.targets, arrays, adapter.step)
        self._models[model_id] = adapter.spec, adapter.targets

    def save_adapter(self, model_id: str, directory: Path, *, dtype: AdapterDtype | None = None) -> None:
        with command_on(HOST, waits=False):
            adapter = self._exported(model_id, optimizer=False)
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

    def _has_value_head(self, model_id: str) -> bool:
        return self._known(model_id)[0].value_head

    def _empty(self, model_id: str) -> Adapter:
        """An adapter of the model's shape on the CPU. Its weights are not the model's."""
        spec, targets = self._known(model_id)
        return Adapter(spec, targets, HOST, drawn=False)

    def _exported(self, model_id: str, *, optimizer: bool) -> Adapter:
        adapter = self._empty(model_id)
        if self._divides_experts:
            answers = self.group.read_all("export", model_id, optimizer)
        else:
            answers = [self.group.read("export", model_id, optimizer)]
        exported: list[tuple[AdapterArrays, int]] = results_of(answers)
        parts = zip(*(arrays for arrays, _ in exported), strict=True)
        adapter.replace([_tensor(of_ranks, adapter) for of_ranks in parts], exported[0][1])
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
