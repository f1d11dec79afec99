"""References to weights: their text form, and the parts of an adapter version's name."""

from __future__ import annotations

import pytest

from skyrl.base.types.weights import AdapterVersion, BaseWeights, FullWeights, WeightsRef, next_version, parse_weights


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("base", BaseWeights()),
        ("adapter:s1:train:3@5", AdapterVersion.of("s1:train:3", 5)),
        ("adapter:base", AdapterVersion("base")),
        ("full:step-7", FullWeights("step-7")),
    ],
)
def test_a_reference_is_written_as_text_and_read_back(text: str, weights: WeightsRef) -> None:
    assert str(weights) == text
    assert parse_weights(text) == weights


@pytest.mark.parametrize("text", ["", "Base", "base:", "adapter", "adapter:", "full:", "lora:a@1", "s1:train:3@5"])
def test_any_other_text_is_refused_as_a_reference(text: str) -> None:
    with pytest.raises(ValueError, match="is no reference to weights"):
        parse_weights(text)


def test_an_adapter_version_is_named_by_its_model_and_its_number() -> None:
    version = AdapterVersion.of("s1:train:3", 5)
    assert version.name == "s1:train:3@5"
    assert (version.model_id, version.number) == ("s1:train:3", 5)
    assert AdapterVersion.of("a@b", 1).model_id == "a@b"
    with pytest.raises(ValueError, match="invalid literal"):
        _ = AdapterVersion("s1:train:3").number


@pytest.mark.parametrize(
    ("version", "following"),
    [
        ("default", "1"),
        ("1", "2"),
        ("099", "100"),
        ("step-7", "step-7+1"),
        ("step-7+1", "step-7+2"),
        ("a+9", "a+10"),
        ("m@3", "m@3+1"),
        ("-1", "-1+1"),
        ("1.5", "1.5+1"),
        ("+", "++1"),
        ("\n", "\n+1"),
        ("9" * 19, "9" * 19 + "+1"),
    ],
)
def test_a_version_that_nobody_names_is_told_from_the_one_before(version: str, following: str) -> None:
    assert next_version(version) == following
