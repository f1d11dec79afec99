"""The judgement of a sampler's logprobs: what rounding may do, and what it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from skyrl.engine.trainer_probes import compare_base, compare_change

TOKENS = 63


def drawn(seed: int, size: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, size, TOKENS).astype(np.float32)


BASE, CHANGE = -6 + drawn(0, 1.5), drawn(1, 1.0)


@pytest.mark.parametrize("rounding", [1e-6, 0.03, 0.2])
def test_rounding_is_no_disagreement(rounding: float) -> None:
    sampler = BASE + drawn(2, rounding)
    assert compare_base(BASE, sampler).agrees
    change = compare_change(BASE, BASE + CHANGE, sampler, BASE + CHANGE + drawn(3, rounding))
    assert change.agrees
    assert change.decides
    assert change.part > 0.6


def test_a_few_positions_with_other_experts_are_no_disagreement() -> None:
    flips = np.where(np.arange(TOKENS) % 5 == 0, drawn(4, 3.0), np.float32(0))
    sampler = BASE + flips + drawn(2, 0.02)
    assert compare_base(BASE, sampler).agrees
    assert compare_change(BASE, BASE + CHANGE, sampler, BASE + CHANGE + flips[::-1]).agrees


@pytest.mark.parametrize("rounding", [0.0, 0.03, 0.2])
def test_an_ignored_adapter_is_found(rounding: float) -> None:
    sampler = BASE + drawn(2, rounding)
    change = compare_change(BASE, BASE + CHANGE, sampler, sampler)
    assert not change.agrees
    assert change.decides
    assert change.is_ignored
    assert change.part == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "other",
    [0.5 * CHANGE, 2 * CHANGE, -CHANGE, drawn(5, 1.0), np.full(TOKENS, np.nan, np.float32)],
    ids=["half of the layers", "another scale", "the other sign", "something unrelated", "nan"],
)
def test_another_change_is_found_and_not_called_ignored(other: np.ndarray) -> None:
    sampler = BASE + drawn(2, 0.03)
    change = compare_change(BASE, BASE + CHANGE, sampler, sampler + other)
    assert not change.agrees
    assert change.decides
    assert not change.is_ignored


def test_a_change_that_rounding_hides_decides_nothing() -> None:
    sampler = BASE + drawn(2, 0.1)
    assert not compare_change(BASE, BASE + np.float32(0.1) * CHANGE, sampler, sampler).decides


@pytest.mark.parametrize("spread", [0.2, 1.5, 4.0])
def test_other_weights_are_found_however_flat_the_model_is(spread: float) -> None:
    trainer, other = -6 + drawn(0, spread), -6 + drawn(6, spread)
    assert not compare_base(trainer, other).agrees
    assert not compare_base(trainer, np.full(TOKENS, np.nan, np.float32)).agrees


def test_a_model_with_one_logprob_for_all_tokens_agrees_with_itself() -> None:
    flat = np.full(TOKENS, -np.log(512), np.float32)
    assert compare_base(flat, flat + np.float32(1e-6)).agrees
