"""What backends over ranks share: they check commands, call all ranks, and put together what the ranks have computed.

A `RankGroup` is the ranks as the engine sees them: a call goes to all of them, and comes back with the answers of all
(`skyrl.engine.rank_actors` has the implementation on Ray). Lives in the engine's process, without a model.
Knows nothing of how calls reach the ranks, or of what is trained.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from skyrl.base.config.server import ServerConfig, takes_pictures
from skyrl.trainer import checks
from skyrl.trainer.collectives import SameFailureEverywhere
from skyrl.trainer.device import HOST, failure_of
from skyrl.trainer.losses import Loss, Tally, served_losses
from skyrl.trainer.model.row_budget import BudgetSettings
from skyrl.trainer.passes.pass_run import not_finite, result_of
from skyrl.trainer.protocol import AdamParams, ModelLimits, PassResult, StateSnapshots, TrainingPass
from skyrl.trainer.ranks.plan import Plan
from skyrl.trainer.ranks.rank import BaseFacts, RankSettings, ShareResult
from skyrl.trainer.rows.routed_experts import with_sorted_experts


class RankGroup(Protocol):
    """Ranks that run the same calls in the same order: each a `RankBase` in a process of its own.

    `call`, `call_each`, `read` and `read_all` return what `RankBase.answer` has returned. They raise RankDied, naming
    the rank and its node, when a rank has died, has raised an exception, or has not answered for the group's timeout;
    from then on always.
    """

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks, with the same arguments; the answers by rank. Several threads may call: their
        calls run one after the other."""
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


def results_of(answers: Sequence[Any]) -> list[Any]:
    """The results by rank. If the ranks have agreed on a failure, raises the error of the first rank that has one."""
    for answer in answers:
        if isinstance(answer, SameFailureEverywhere) and answer.error is not None:
            raise answer.error
    return list(answers)


def rank_settings(config: ServerConfig) -> RankSettings:
    trainer = config.backend_config.trainer
    return RankSettings(
        config.base_model_path,
        config.threads,
        trainer.gradient_checkpointing,
        config.losses.stable_reinforce,
        config.backend_config.lora.train_mlp_of_mixtures == "train",
        trainer.rank_timeout_s,
        takes_pictures(config),
        BudgetSettings.of(config),
        trainer.keep_quantized,
    )


class BackendOverRanks(StateSnapshots):
    """A backend whose model is divided over the ranks of a group."""

    def __init__(self, config: ServerConfig, group: RankGroup) -> None:
        """Loads the base model on all ranks of `group`, which `close` ends.

        Raises ConfigError when the base model cannot be trained, and RankDied.
        """
        self._group = group
        self._path = config.base_model_path
        self._losses = served_losses(config.losses.stable_reinforce)
        try:
            facts: list[BaseFacts] = results_of(group.call("load"))
        except BaseException:
            group.close()
            raise
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
                checked.append((index, with_sorted_experts(training_pass, self._limits.mixture)))
            except Exception as error:  # it is this pass's outcome; others go on
                outcomes[index] = failure_of(error, HOST)
        if checked:
            for (index, _), outcome in zip(checked, self._run([each for _, each in checked]), strict=True):
                outcomes[index] = outcome
        return [outcomes[index] for index in range(len(passes))]

    def check_step(self, params: AdamParams) -> None:
        checks.check_adam(params)

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """See `adamw_step` for metrics and errors. Raises InvalidRequest for hyper-parameters out of range."""
        self.check_step(params)
        self._require(model_id)
        return self._call("optim_step", model_id, params)[0]

    def clear_gradient(self, model_id: str) -> None:
        self._require(model_id)
        self._call("clear_gradient", model_id)

    def close(self) -> None:
        self._group.close()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return results_of(self._group.call(method, *arguments))

    @abstractmethod
    def _require(self, model_id: str) -> None:
        """Raise InvalidRequest unless there is such a model."""

    @abstractmethod
    def _run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        """Run checked passes."""


def outcome_of(
    training_pass: TrainingPass,
    loss: Loss,
    number: int,
    plan: Plan,
    results: Sequence[Mapping[int, Sequence[ShareResult]]],
) -> PassResult | Exception:
    """A pass's outcome from the pieces that the ranks ran, added rank by rank in the order of the plan."""
    if number in plan.failed:
        return plan.failed[number]
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
    return result_of(loss, logprobs, tally)
