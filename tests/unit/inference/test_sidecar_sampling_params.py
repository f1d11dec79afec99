"""SGLang's sampling parameters become vLLM's fields, or a refusal that names the parameter."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.inference.sidecar.errors import BadRequest
from skyrl.inference.sidecar.generate_request import read_sampling

DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
}


@pytest.mark.parametrize(
    "given",
    [None, {}, dict.fromkeys(["temperature", "top_p", "stop", "n", "max_new_tokens", "sampling_seed", "unknown"])],
)
def test_what_is_omitted_or_null_is_sent_as_sglangs_default(given: Any) -> None:
    read = read_sampling(given)
    assert read.fields == DEFAULTS
    assert (read.n, read.max_new_tokens, read.seed_of(3)) == (1, None, None)


@pytest.mark.parametrize(
    ("given", "field", "expected"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 1e-6}, "temperature", 0.0),
        ({"temperature": 2e-6}, "temperature", 2e-6),
        ({"temperature": 5}, "temperature", 5),
        ({"top_p": 0.9}, "top_p", 0.9),
        ({"top_k": 1 << 30}, "top_k", -1),
        ({"top_k": 5}, "top_k", 5),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"min_new_tokens": 3}, "min_tokens", 3),
        ({"stop": "a"}, "stop", ["a"]),
        ({"stop": ["a", "b", "a"]}, "stop", ["a", "b"]),
        ({"stop_token_ids": [1, None, 2]}, "stop_token_ids", [1, 2]),
        ({"no_stop_trim": True}, "include_stop_str_in_output", True),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", False),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"repetition_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"logit_bias": {"5": -1}}, "logit_bias", {"5": -1}),
        ({"stream_interval": 4}, "stream_interval", 4),
        ({"json_schema": "{}"}, "structured_outputs", {"json": "{}"}),
        ({"regex": "a+"}, "structured_outputs", {"regex": "a+"}),
        ({"ebnf": "root ::= x"}, "structured_outputs", {"grammar": "root ::= x"}),
        ({"structural_tag": "{}"}, "structured_outputs", {"structural_tag": "{}"}),
    ],
)
def test_parameters_become_vllms_fields(given: dict[str, Any], field: str, expected: Any) -> None:
    fields = read_sampling(given).fields
    assert fields == DEFAULTS | {field: expected}


def test_numbers_of_samples_and_tokens_and_seeds_are_apart() -> None:
    read = read_sampling({"n": 3, "max_new_tokens": 0, "sampling_seed": 7, "custom_params": {"x": 1}})
    assert (read.n, read.max_new_tokens, [read.seed_of(child) for child in range(3)]) == (3, 0, [7, 8, 9])
    assert read.fields == DEFAULTS


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -0.1},
        {"temperature": "1"},
        {"temperature": True},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": 2},
        {"frequency_penalty": 3},
        {"presence_penalty": -3},
        {"repetition_penalty": 0},
        {"max_new_tokens": -1},
        {"max_new_tokens": 1.5},
        {"min_new_tokens": 129},
        {"n": 0},
        {"n": 10**6},
        {"stop": 5},
        {"stop": [""]},
        {"stop": ""},
        {"stop": ["a", 5]},
        {"stop_token_ids": 5},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": [-1]},
        {"ignore_eos": 1},
        {"sampling_seed": 2**63},
        {"sampling_seed": 0.5},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"5": 101}},
        {"stop_regex": "a"},
        {"beam_width": 4},
        {"custom_logit_processor": "x"},
        {"stream_interval": 0},
        {"regex": 5},
        {"top_q": 1},
    ],
    ids=str,
)
def test_a_wrong_parameter_is_named(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(BadRequest, match=f"^sampling_params.{name}"):
        read_sampling(given)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [("stop_regex", r"\d+", "stop_token_ids"), ("stop_regex", ["a", "b"], "regex"), ("best_of", 4, "temperature")],
)
def test_a_refusal_names_what_to_use_instead(name: str, value: Any, instead: str) -> None:
    with pytest.raises(BadRequest, match=f"^sampling_params.{name}: is not supported by vLLM; .*{instead}"):
        read_sampling({name: value})
    if name == "stop_regex":
        assert read_sampling({name: []}) == read_sampling({})


@pytest.mark.parametrize(
    "given",
    [{"regex": "a", "ebnf": "b"}, {"min_new_tokens": 5, "max_new_tokens": 4}, {"n": 2, "sampling_seed": 2**63 - 1}],
)
def test_parameters_that_contradict_each_other_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="^sampling_params"):
        read_sampling(given)


def test_parameters_must_be_an_object() -> None:
    with pytest.raises(BadRequest, match="^sampling_params"):
        read_sampling([])
