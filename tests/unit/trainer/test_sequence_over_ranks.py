"""One long sequence whose rows are divided over ranks, against training without ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch_lora_support import (
    assert_close,
    assert_same,
    files_saved,
    grpo,
    make_backend,
    make_ranks,
    ok,
    rl,
    sft,
    spec,
    train,
    with_returns,
    with_rewards,
)
from trainer_kinds import EXPERTS, LORA, Run, assert_close_runs, assert_same_runs, closed_at_end

from skyrl.trainer.attention import recurrent, scans
from skyrl.trainer.protocol import AdamParams, PassResult, TrainingPass
from skyrl.trainer.ranks.lora_rank import AdapterFacts, LoraRank
from tests.families import FAMILIES, MIXTURES, make_family

STEP = AdamParams(learning_rate=1e-2, eps=10.0, grad_clip_norm=1e4)
"""With an `eps` above the rounding of these sequences' gradients, whose largest elements are about 50."""
DIVIDED = 48
"""Sequences of so many tokens are divided."""
Ranks = Callable[..., Any]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """One rank, or more; closed at the end."""
    with closed_at_end(LORA.backend) as make:
        yield make


class Recomputing(LoraRank):
    """Backward computes recurrent layers again however few rows they have, in blocks of 16 rows."""

    def load(self) -> AdapterFacts:
        recurrent.KEPT_ROWS = scans.KEPT_ROWS = 0
        scans.BLOCK_ROWS = 16
        return super().load()


def _passes() -> list[TrainingPass]:
    """Long sequences alone, beside short ones, and of a loss that needs the whole sequence at once."""
    of_sequence = rl(3, 70, 9)
    for datum in of_sequence:
        datum.loss_inputs["sequence_ratio_mask"] = (datum.loss_inputs["advantages"] != 0).astype("float32")
    return [
        train("m", sft(1, 101)),
        train("m", sft(2, 7, 90, 12, 60, 31)),
        train("m", of_sequence, "gspo", clip_low_threshold=0.01, clip_high_threshold=100.0),
        TrainingPass("m", sft(4, 55, 20), "cross_entropy", backward=False),
    ]


def _learn(backend: Any, directory: Path) -> Run:
    backend.create_model("m", spec(8, 1))
    results = ok(backend.run(_passes()))
    metrics = [backend.optim_step("m", STEP)]
    run = Run(results + ok(backend.run(_passes())), metrics, files_saved(backend, "m", directory))
    backend.delete_model("m")
    return run


@pytest.mark.parametrize(
    ("architecture", "count", "settings"),
    [("qwen3", 3, {"gradient_checkpointing": True}), ("qwen2-window", 2, {"merge_passes": True})],
)
def test_a_divided_sequence_trains_as_on_one_device(
    tmp_path: Path, ranks: Ranks, architecture: str, count: int, settings: dict[str, bool]
) -> None:
    expected = _learn(ranks(architecture=architecture), tmp_path / "one")
    backend = ranks(count, architecture=architecture, context_parallel_tokens=DIVIDED, **settings)
    run = _learn(backend, tmp_path / "ranks")
    assert_close_runs(run, expected)
    assert_same_runs(_learn(backend, tmp_path / "again"), run)


def test_a_loss_that_is_not_finite_fails_its_pass_and_no_other(tmp_path: Path, ranks: Ranks) -> None:
    bad, good = rl(1, 60, 20), train("m", sft(2, 70, 9))
    bad[0].loss_inputs["logprobs"] = np.full(60, -1e6, np.float32)
    backend = ranks(2, context_parallel_tokens=DIVIDED)
    states = []
    for name, passes in (("alone", [good]), ("beside", [train("m", bad, "importance_sampling"), good])):
        backend.create_model("m", spec(8, 1))
        outcomes = backend.run(passes)
        assert isinstance(outcomes[-1], PassResult)
        states.append(files_saved(backend, "m", tmp_path / name))
        backend.delete_model("m")
    assert "the sum of importance_sampling is " in str(outcomes[0])
    assert_same(*states)


IN_CI = ("qwen3.5",)


@pytest.mark.parametrize(
    "family", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.slow) for name in (*FAMILIES, *MIXTURES)]
)
def test_every_family_hands_on_keys_and_states(tmp_path: Path, ranks: Ranks, family: str) -> None:
    """Gradients within 1e-4 of a tensor's largest element: those of a delta rule's decays are small sums of large
    numbers, as in test_families_packed."""
    path = make_family(family, tmp_path)
    divided = {"context_parallel_tokens": DIVIDED, "rank_class": Recomputing, "gradient_checkpointing": True}
    found = []
    for number, backend in enumerate((ranks(path=path, micro_batch_tokens=4096), ranks(3, path=path, **divided))):
        backend.create_model("m", spec(8, 1))
        results = ok(backend.run([train("m", sft(1, 70, 110, 9))]))
        backend.optim_step("m", STEP)  # from now on all matrices have a gradient
        results += ok(backend.run([train("m", sft(2, 110, 70))]))
        state = files_saved(backend, "m", tmp_path / str(number))
        found.append((results, {name: each for name, each in state.items() if name.startswith("gradient")}))
    (expected, of_one), (results, of_ranks) = found
    for result, of_expected in zip(results, expected, strict=True):
        for logprobs, other in zip(result.logprobs, of_expected.logprobs, strict=True):
            np.testing.assert_allclose(logprobs, other, rtol=1e-4, atol=1e-4)
    assert_close(of_ranks, of_one, 1e-4)


def _learn_with_critic(backend: Any, directory: Path) -> tuple[list[Any], dict[str, Tensor]]:
    backend.create_model("m", replace(spec(4, 11), value_head=True))
    passes = [
        train("m", with_returns([*grpo(1, 2, 2, 9), *rl(2, 70)]), "ppo", value_coef=0.7, value_clip=0.15),
        train("m", with_rewards(rl(3, 12, 20)), "ppo"),
        TrainingPass("m", sft(4, 60, 8), "cross_entropy", backward=False),
    ]
    results = ok(backend.run(passes))
    backend.optim_step("m", AdamParams(learning_rate=3e-3, eps=1.0))
    return results + ok(backend.run(passes)), files_saved(backend, "m", directory)


@pytest.mark.parametrize(
    "settings",
    [{}, {"context_parallel_tokens": 50}, pytest.param({"merge": True}, marks=pytest.mark.slow)],
    ids=["data", "context", "merged"],
)
def test_two_ranks_give_a_critic_the_results_of_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    alone, saved = _learn_with_critic(make_backend(micro_batch_tokens=48), tmp_path / "alone")
    with closed_at_end(make_ranks) as make:
        results, of_ranks = _learn_with_critic(make(2, **settings), tmp_path / "ranks")
    _assert_close_results(results, alone)
    assert_close(of_ranks, saved, 1e-4)


@pytest.mark.slow
def test_ranks_that_divide_experts_give_a_critic_the_results_of_one(tmp_path: Path) -> None:
    with closed_at_end(EXPERTS.backend) as make:
        alone, saved = _learn_with_critic(make(1), tmp_path / "alone")
        results, of_ranks = _learn_with_critic(make(2), tmp_path / "ranks")
    _assert_close_results(results, alone)
    assert_close(of_ranks, saved, 1e-4)


def _assert_close_results(ours: Sequence[Any], expected: Sequence[Any]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert one.metrics.keys() == other.metrics.keys()
        for name in one.metrics.keys() & {"loss:sum", "value_loss:sum", "value_tokens:sum", "value_clipped:sum"}:
            assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-4)
        for own, values in zip(one.values, other.values, strict=True):
            np.testing.assert_allclose(own, values, atol=1e-4)
