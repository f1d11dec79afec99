"""The kinds of training, and what the tests of their contract share: backends with one rank or several, the same
commands for all of them, and comparisons."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kept_support import release
from torch import Tensor
from torch_lora_support import (
    assert_close,
    assert_same,
    base_path,
    files_saved,
    grpo,
    ok,
    rl,
    sft,
    spec,
    train,
    with_experts,
)

from skyrl.base.config.loading import load_config
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.collectives import on_all_or_none
from skyrl.trainer.losses import Loss, LossInputs, LossValue
from skyrl.trainer.protocol import AdamParams, PassResult, TrainingPass
from skyrl.trainer.ranks import full_rank, lora_rank
from skyrl.trainer.ranks import rank as rank_module
from skyrl.trainer.ranks.full_backend import FullBackend
from skyrl.trainer.ranks.full_rank import FullRank
from skyrl.trainer.ranks.lora_backend import InThisProcess, LoraBackend
from skyrl.trainer.ranks.lora_rank import ExpertRank, LoraRank
from skyrl.trainer.ranks.rank import RankSettings
from tests.local_ranks import LocalRanks

WHOLE = LoraSpec(rank=0, alpha=32.0, seed=0)
TOLERANCE = 1e-5
STEP = AdamParams(learning_rate=1e-2, eps=0.1, grad_clip_norm=100.0, weight_decay=0.01)
"""With an `eps` above the rounding of gradients. With a smaller one, a weight whose gradient is 0 but for rounding
would make a whole step in the direction of the rounding."""
_directory = tempfile.TemporaryDirectory(prefix="skyrl-kinds-")


def _raising(lp: Tensor, inputs: LossInputs, config: object) -> LossValue:
    raise RuntimeError("this loss fails on the last rank")


class Faults:
    """On the last rank the loss dro cannot be computed, and memory lacks when the rank is told so. Each rank counts the
    calls of decoder layers in backwards."""

    _modules: tuple[Any, ...] = (rank_module, lora_rank, full_rank)

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        super().__init__(rank, ranks, settings)  # type: ignore[call-arg]
        self._left: int | None = None
        if rank == ranks - 1:
            losses: dict[str, Loss] = self._losses  # type: ignore[attr-defined]
            losses["dro"] = Loss(_raising, ("logprobs", "advantages"))
            for module in self._modules:
                module.on_all_or_none = self._all_or_none

    def lack_memory(self, after: int | None) -> bool:
        """Of what all ranks do or none, the action after `after` others finds no memory on the last rank; None: each
        finds some. Returns whether an action that lacks memory was still to come."""
        was, self._left = self._left, after
        return was is not None

    def load(self) -> Any:
        facts = super().load()  # type: ignore[misc]
        self._recomputed = 0
        packed: Any = self.base.packed  # type: ignore[attr-defined]
        for layer in packed.decoder_layers:
            layer.register_forward_pre_hook(self._count)
        return facts

    def _count(self, *_: Any) -> None:
        self._recomputed += torch._C._current_graph_task_id() != -1  # that of the backward that runs

    def recomputed(self) -> int:
        return self._recomputed

    def leave(self) -> None:
        super().leave()  # type: ignore[misc]
        for module in self._modules:
            module.on_all_or_none = on_all_or_none

    def _all_or_none(self, action: Callable[[], Any], device: torch.device) -> Any:
        def without_memory() -> Any:
            action()
            raise torch.OutOfMemoryError("no memory left")

        if self._left is None or self._left > 0:
            self._left = self._left and self._left - 1
            return on_all_or_none(action, device)
        self._left = None
        return on_all_or_none(without_memory, device)


class FaultyLoraRank(Faults, LoraRank):
    pass


class FaultyExpertRank(Faults, ExpertRank):
    pass


class FaultyFullRank(Faults, FullRank):
    pass


@dataclass(frozen=True)
class Kind:
    """What is trained, of which model. `over_ranks`: settings where there are several ranks. `path`: of the base model
    in place of `architecture`. `tolerance`: of what is saved, between numbers of ranks."""

    name: str
    architecture: str
    model: LoraSpec
    settings: Mapping[str, Any] = field(default_factory=dict)
    over_ranks: Mapping[str, Any] = field(default_factory=dict)
    path: Callable[[], str] | None = None
    tolerance: float = TOLERANCE

    def __str__(self) -> str:
        return self.name

    @property
    def is_full(self) -> bool:
        return self.model.is_full

    def base(self, architecture: str | None = None) -> str:
        """The path of the base model."""
        return self.path() if self.path and architecture is None else base_path(architecture or self.architecture)

    def backend(
        self,
        ranks: int = 1,
        *,
        architecture: str | None = None,
        path: str | None = None,
        faulty: bool = False,
        rank_class: Any = None,
        **trainer: Any,
    ) -> Any:
        """One rank is in this process; several are processes of this machine. `faulty`: ranks with `Faults`."""
        of_several = self.over_ranks if ranks > 1 else {}
        settings = {"micro_batch_tokens": 48, "rank_timeout_s": 60.0, **self.settings, **of_several, **trainer}
        divides = bool(settings.get("placement.expert_parallel"))
        if divides:
            settings["placement.policy_num_cpu_ranks"] = ranks
        flat = {f"trainer.{key}": value for key, value in settings.items()}
        config = load_config({"base_model": path or self.base(architecture), "backend_config": flat})
        backend, plain, with_faults = (LoraBackend, LoraRank, FaultyLoraRank)
        if self.is_full:
            backend, plain, with_faults = (FullBackend, FullRank, FaultyFullRank)
        elif divides:
            plain, with_faults = ExpertRank, FaultyExpertRank
        chosen = rank_class or (with_faults if faulty else plain)
        of_ranks = RankSettings.of(config)
        return backend(
            config, InThisProcess(chosen(0, 1, of_ranks)) if ranks == 1 else LocalRanks(ranks, of_ranks, chosen)
        )


@functools.cache
def _quantized() -> str:
    return release("dense-int4", Path(_directory.name))


OF_ADAPTERS = 5 * TOLERANCE
"""After one step lora_B is small, so its rounding is a larger part of it. How large depends on the kind of CPU."""
LORA = Kind("lora", "qwen3-tied", spec(8, 1), tolerance=OF_ADAPTERS)
FULL = Kind("full", "qwen3-tied", WHOLE, {"full_finetuning": True})
EXPERTS = Kind("experts", "mixture", spec(4, 1), over_ranks={"placement.expert_parallel": True}, tolerance=OF_ADAPTERS)
KEPT = Kind("kept", "", spec(4, 1), {"keep_quantized": True}, path=_quantized, tolerance=OF_ADAPTERS)
KINDS = (LORA, FULL, EXPERTS, KEPT)
BY_NAME = {kind.name: kind for kind in KINDS}


def slow(*parameters: Any) -> Any:
    """A case that `make test` leaves out."""
    return pytest.param(*parameters, marks=pytest.mark.slow)


def passes_of(kind: Kind, model_id: str, step: int) -> list[TrainingPass]:
    """Passes of uneven sequences, one with shared prompts, a forward, for a mixture one with recorded experts; the last
    has one sequence, fewer than there are ranks."""
    seed = 100 * step
    passes = [
        train(model_id, sft(seed, 3, 17, 1, 40)),
        train(model_id, rl(seed + 10, 12, 5, 30, 2), "ppo"),
        train(model_id, grpo(seed + 15, 2, 3, 20), "importance_sampling"),
        TrainingPass(model_id, sft(seed + 20, 8, 20), "cross_entropy", backward=False),
        train(model_id, sft(seed + 30, 11)),
    ]
    if kind.architecture.startswith("mixture"):
        passes.insert(1, train(model_id, with_experts(sft(seed + 40, 20, 9), seed)))
    return passes


class Run(NamedTuple):
    """The results of passes, the metrics of steps, and all that is saved: weights, moments and gradients."""

    results: list[PassResult]
    metrics: list[dict[str, float]]
    state: dict[str, Tensor]


def learn(
    kind: Kind,
    backend: Any,
    directory: Path,
    *,
    steps: int = 2,
    run: Callable[[Any, list[TrainingPass]], list[PassResult]] = lambda backend, passes: ok(backend.run(passes)),
) -> Run:
    """Train the model "m" for some steps, and then run passes whose gradient waits. The state is in `directory`."""
    backend.create_model("m", kind.model)
    results: list[PassResult] = []
    metrics: list[dict[str, float]] = []
    for step in range(steps):
        results += run(backend, passes_of(kind, "m", step))
        metrics.append(backend.optim_step("m", STEP))
    results += run(backend, passes_of(kind, "m", steps))
    return Run(results, metrics, files_saved(backend, "m", directory))


def assert_close_runs(one: Run, other: Run, tolerance: float = TOLERANCE) -> None:
    """Equal up to rounding. `tolerance`: of each saved tensor's largest value."""
    assert_close_results(one, other)
    assert {"exp_avg", "exp_avg_sq", "gradient"} < {name.split(".")[0] for name in one.state}
    assert_close(one.state, other.state, tolerance)


def assert_close_results(one: Run, other: Run, tolerance: float = TOLERANCE) -> None:
    for result, expected in zip(one.results, other.results, strict=True):
        for logprobs, expected_logprobs in zip(result.logprobs, expected.logprobs, strict=True):
            assert logprobs.dtype == np.float32
            np.testing.assert_allclose(logprobs, expected_logprobs, rtol=tolerance, atol=tolerance)
        other_rows = {"computed_tokens:sum": result.metrics["computed_tokens:sum"]}  # prompts are on several ranks
        assert result.metrics == pytest.approx(expected.metrics | other_rows, rel=tolerance, abs=5 * tolerance)
    for metrics, of_other in zip(one.metrics, other.metrics, strict=True):
        assert metrics == pytest.approx(of_other, rel=tolerance)


def assert_same_runs(one: Run, other: Run) -> None:
    """The same bits."""
    assert_same_results(one.results, other.results)
    assert one.metrics == other.metrics
    assert_same(one.state, other.state)


def assert_same_results(one: Sequence[PassResult], other: Sequence[PassResult]) -> None:
    for result, expected in zip(one, other, strict=True):
        assert result.metrics == expected.metrics
        for logprobs, expected_logprobs in zip(result.logprobs, expected.logprobs, strict=True):
            assert np.array_equal(logprobs, expected_logprobs)


@contextmanager
def closed_at_end(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`make`, whose backends are closed when the block ends."""
    made: list[Any] = []

    def kept(*arguments: Any, **options: Any) -> Any:
        made.append(make(*arguments, **options))
        return made[-1]

    yield kept
    for backend in made:
        backend.close()
