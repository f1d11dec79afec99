"""A ratio far from 1 at the first pass on fresh samples is told, once in the log and in the metrics of that pass."""

from __future__ import annotations

import logging

import pytest

from skyrl.engine import ratios
from skyrl.engine.ratios import NOTICE, RatioCheck

FAR, NEAR = {"ratio:mean": 0.7, "kl:mean": 0.01}, {"ratio:mean": 1.05, "kl:mean": 0.01}


def test_the_first_pass_with_ratios_is_told_once_with_the_keys_to_send(caplog: pytest.LogCaptureFixture) -> None:
    check = RatioCheck()
    with caplog.at_level(logging.WARNING):
        assert check.notice("m", {"loss:sum": 1.0}, {}) == {}, "supervised"
        assert check.notice("m", FAR, {}) == {NOTICE: 1.0}
        assert check.notice("m", NEAR, {}) == {NOTICE: 1.0}, "perhaps the same request"
        check.updated("m")
        assert check.notice("m", FAR, {}) == {}, "told already"
        assert check.notice("other", {"ratio:mean": 1.0, "kl:mean": 0.06}, {"top_p": 0.9}) == {NOTICE: 1.0}
    first, second = (record.getMessage() for record in caplog.records)
    assert "model m: " in first
    assert "mean ratio of 0.7 (not 1)" in first
    assert "send sampling_temperature, top_p, top_k in loss_fn_config" in first
    assert "were not sampled with top_p 0.9" in second


def test_later_passes_on_the_same_samples_are_not_checked_until_the_sampler_has_new_weights() -> None:
    check = RatioCheck()
    assert check.notice("m", NEAR, {}) == {}
    assert check.notice("m", FAR, {}) == {}
    check.updated("m")
    assert check.notice("m", FAR, {}) == {NOTICE: 1.0}


def test_a_bounded_number_of_models_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratios, "MODELS", 2)
    check = RatioCheck()
    for name in ("a", "b", "a", "c"):
        check.notice(name, NEAR, {})
    assert check.notice("a", FAR, {}) == {}
    assert check.notice("b", FAR, {}) == {NOTICE: 1.0}, "forgotten, so new"
