"""Families whose layers keep a state along a row, or have projections or experts of their own, in the packed design:
shared prompts, several tenants in a micro-batch, recomputation, full fine-tuning and ranks change rounding at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_lora_support import (
    assert_close,
    assert_same,
    cut,
    files_saved,
    grpo,
    make_backend,
    make_full,
    make_ranks,
    ok,
    overflowing,
    rl,
    saved,
    sft,
    spec,
    train,
)
from trainer_kinds import STEP, WHOLE, closed_at_end

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.attention import recurrent, scans
from skyrl.trainer.protocol import Datum, PassResult
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.rows import prefixes
from tests.families import MIXTURES, make_family

PACKED = ("qwen3.5", "qwen3.5 that sees", "gemma-4", "lfm2", *(name for name in MIXTURES if name != "qwen3-moe"))


def _in_ci(*chosen: str) -> list[Any]:
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in PACKED]


ONE_IN_CI = _in_ci("qwen3.5", "nemotron-h")
TOLERANCE = 1e-3
"""Of a tensor's largest element. Gradients of a delta rule's decays are small sums of large numbers: 2e-4 was seen."""
ADAPTER = spec()


@pytest.fixture(scope="session")
def family_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def path(name: str) -> str:
        if name not in made:
            made[name] = make_family(name, tmp_path_factory.mktemp("families"))
        return made[name]

    return path


FamilyPath = Callable[[str], str]


def _turns() -> list[Datum]:
    """Each datum continues the one before by several chunks, by rows of one chunk, or by one row; one leaves early."""
    (whole,), (branch,) = rl(7, 120), rl(8, 100)
    branch.tokens[:70] = whole.tokens[:70]
    lengths = (20, 90, 91, 120)
    return [branch, *(cut(whole, length) for length in lengths)]


def _data() -> list[Datum]:
    return [*grpo(1, 2, 3, 75, answer=30), *_turns(), *rl(3, 2, 1, 17)]


def _learn(backend: Any, path: Path, whole: LoraSpec = ADAPTER, files: Callable[..., Any] = saved) -> Any:
    """A step, then a gradient that waits: results, and weights, moments and gradients."""
    backend.create_model("m", whole)
    results = ok(backend.run([train("m", _data(), "ppo")]))
    backend.optim_step("m", STEP)
    results += ok(backend.run([train("m", _data(), "ppo")]))
    return results, files(backend, "m", path)


def _assert_close(one: tuple[list[PassResult], Any], other: tuple[list[PassResult], Any]) -> None:
    for result, expected in zip(one[0], other[0], strict=True):
        for logprobs, of_other in zip(result.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(logprobs, of_other, atol=1e-4)
    assert_close(one[1], other[1], TOLERANCE)


@pytest.mark.parametrize("family", ONE_IN_CI)
def test_shared_prompts_hand_on_their_state_and_collect_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family_path: FamilyPath, family: str
) -> None:
    shared = _learn(make_backend(path=family_path(family)), tmp_path / "shared")
    assert shared[0][0].metrics["computed_tokens:sum"] < 0.6 * shared[0][0].metrics["num_tokens:sum"]
    monkeypatch.setattr(prefixes, "MIN_SAVED_ROWS", 10**9)
    _assert_close(shared, _learn(make_backend(path=family_path(family)), tmp_path / "apart"))


@pytest.mark.parametrize("family", ONE_IN_CI)
def test_other_passes_do_not_change_a_bit(tmp_path: Path, family_path: FamilyPath, family: str) -> None:
    states = []
    for number, others in enumerate(([], [train("a", _data()[::-1], "ppo"), train("b", sft(2, 30, 40))])):
        backend = make_backend(path=family_path(family))
        for model_id in "abc":
            backend.create_model(model_id, spec())
        ok(backend.run([*others, train("c", _data(), "ppo"), *others]))
        states.append(saved(backend, "c", tmp_path / str(number)))
    assert_same(*states)


@pytest.mark.parametrize("family", ONE_IN_CI)
def test_tenants_in_one_micro_batch_change_at_most_rounding_and_keep_their_overflow(
    tmp_path: Path, family_path: FamilyPath, family: str
) -> None:
    alone = make_backend(path=family_path(family))
    alone.create_model("m", spec(4, 1))
    ok(alone.run([train("m", _data(), "ppo")]))
    merged = make_backend(path=family_path(family), merge=True)
    for model_id, rank in (("first", 2), ("m", 4), ("last", 8)):
        merged.create_model(model_id, spec(rank, 1))
    passes = [train("first", overflowing(), "importance_sampling"), train("m", _data(), "ppo")]
    merged.run([*passes, train("last", sft(4, 60, 9))])
    assert_close(saved(merged, "m", tmp_path / "merged"), saved(alone, "m", tmp_path / "alone"), TOLERANCE)


@pytest.mark.parametrize("family", _in_ci("qwen3.5", "nemotron-h", "gemma-4"))  # its layers share keys and values
def test_recomputed_layers_and_blocks_give_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family_path: FamilyPath, family: str
) -> None:
    kept = _learn(make_backend(path=family_path(family), gradient_checkpointing=False), tmp_path / "kept")
    again = _learn(make_backend(path=family_path(family), gradient_checkpointing=True), tmp_path / "again")
    assert_same(again[1], kept[1])
    for module in (recurrent, scans):
        monkeypatch.setattr(module, "KEPT_ROWS", 0)
    monkeypatch.setattr(scans, "BLOCK_ROWS", 16)
    _assert_close(
        _learn(make_backend(path=family_path(family), gradient_checkpointing=True), tmp_path / "blocks"), kept
    )


@pytest.fixture
def ranks() -> Iterator[Callable[..., LoraBackend]]:
    with closed_at_end(make_ranks) as make:
        yield make


@pytest.mark.slow
@pytest.mark.parametrize("family", PACKED)
def test_ranks_train_as_one_device_does(
    tmp_path: Path, ranks: Callable[..., LoraBackend], family_path: FamilyPath, family: str
) -> None:
    expected = _learn(make_backend(path=family_path(family), micro_batch_tokens=200), tmp_path / "one")
    sharded = ranks(2, path=family_path(family), micro_batch_tokens=200)
    _assert_close(_learn(sharded, tmp_path / "ranks"), expected)


@pytest.mark.parametrize("family", ONE_IN_CI)
def test_a_whole_model_is_trained_with_shared_prompts_as_with_separate_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family_path: FamilyPath, family: str
) -> None:
    shared = _learn(make_full(path=family_path(family)), tmp_path / "shared", WHOLE, files_saved)
    monkeypatch.setattr(prefixes, "MIN_SAVED_ROWS", 10**9)
    _assert_close(shared, _learn(make_full(path=family_path(family)), tmp_path / "apart", WHOLE, files_saved))
