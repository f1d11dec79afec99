"""Requests and answers of `/generate`: what is sent, what is read, and which answers are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from skyrl.rollout.errors import BadAnswer
from skyrl.rollout.messages import RolloutRequest, SamplingParams, read_answer

REQUEST = RolloutRequest(input_ids=[1, 2], params=SamplingParams(max_new_tokens=8))
GOOD: dict[str, Any] = {
    "text": "ab",
    "output_ids": [7, 8],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 8},
        "output_token_logprobs": [[-0.5, 7, None], [-1, 8, None]],
        "weight_version": "3",
        "cached_tokens": 1,
        "completion_tokens": 2,
        "routed_experts": "AAAA",
    },
}


def test_a_request_sends_every_default_explicitly() -> None:
    request = RolloutRequest(
        text="hi",
        params=SamplingParams(stop=["x"], extra={"json_schema": "{}"}),
        return_routed_experts=True,
        lora_path="one",
        extra={"rid": "r"},
    )
    assert request.to_json() == {
        "text": "hi",
        "return_logprob": True,
        "return_routed_experts": True,
        "lora_path": "one",
        "rid": "r",
        "sampling_params": {
            "max_new_tokens": 128,
            "min_new_tokens": 0,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop": ["x"],
            "ignore_eos": False,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "no_stop_trim": False,
            "json_schema": "{}",
        },
    }


@pytest.mark.parametrize("given", [{}, {"text": "a", "input_ids": [1]}, {"text": ""}, {"input_ids": []}])
def test_a_request_has_exactly_one_prompt(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="text, input_ids"):
        RolloutRequest(**given)


@pytest.mark.parametrize(("name", "value"), [("n", 2), ("temperature", 0)])
def test_extra_parameters_do_not_replace_fields(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}: not allowed in extra"):
        SamplingParams(extra={name: value})


def test_an_answer_is_read() -> None:
    answer = read_answer(REQUEST, GOOD)
    assert (answer.tokens, answer.logprobs, answer.text) == ((7, 8), (-0.5, -1.0), "ab")
    assert (answer.finish_reason, answer.weight_version, answer.weight_versions) == ("stop", "3", ("3", "3"))
    assert (answer.cached_tokens, answer.routed_experts, answer.parts) == (1, "AAAA", (GOOD,))


def test_a_stop_by_a_token_is_a_stop() -> None:
    given = copy.deepcopy(GOOD)
    given["meta_info"]["finish_reason"]["type"] = "stop_token"
    assert read_answer(REQUEST, given).finish_reason == "stop"


def test_a_version_that_is_a_number_is_its_text() -> None:
    given = copy.deepcopy(GOOD)
    given["meta_info"]["weight_version"] = 3
    assert read_answer(REQUEST, given).weight_versions == ("3", "3")


def test_what_a_server_does_not_report_is_none() -> None:
    given = copy.deepcopy(GOOD)
    for name in ("weight_version", "cached_tokens", "completion_tokens", "routed_experts"):
        del given["meta_info"][name]
    answer = read_answer(REQUEST, given)
    assert (answer.weight_version, answer.cached_tokens, answer.routed_experts) == (None, None, None)
    assert answer.weight_versions == (None, None)


def test_a_request_aborted_while_it_waited_has_no_tokens_and_perhaps_no_list() -> None:
    meta = {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    answer = read_answer(REQUEST, {"text": "", "output_ids": [], "meta_info": meta})
    assert (answer.tokens, answer.logprobs, answer.finish_reason) == ((), (), "abort")


MISSING = object()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_token_logprobs", MISSING),
        ("output_token_logprobs", None),
        ("output_token_logprobs", [[-0.5, 7, None]]),
        ("output_token_logprobs", [[-0.5, 7, None], [None, 8, None]]),
        ("output_token_logprobs", [[-0.5, 7, None], [float("nan"), 8, None]]),
        ("output_token_logprobs", [[-0.5, 7, None], [True, 8, None]]),
        ("output_token_logprobs", [[-0.5, 8, None], [-1.0, 7, None]]),
        ("output_token_logprobs", [[-0.5], [-1.0]]),
        ("output_ids", MISSING),
        ("output_ids", [7, "8"]),
        ("output_ids", list(range(9))),
        ("text", None),
        ("finish_reason", MISSING),
        ("finish_reason", None),
        ("finish_reason", {"type": "content_filter"}),
        ("completion_tokens", 3),
        ("weight_version", 1.5),
        ("cached_tokens", "1"),
    ],
)
def test_an_answer_that_lacks_something_or_contradicts_itself_is_refused(name: str, value: object) -> None:
    given = copy.deepcopy(GOOD)
    place = given if name in given else given["meta_info"]
    if value is MISSING:
        del place[name]
    else:
        place[name] = value
    with pytest.raises(BadAnswer, match=name):
        read_answer(REQUEST, given)


@pytest.mark.parametrize("given", [None, [GOOD], {"text": "a"}])
def test_an_answer_without_meta_info_is_refused(given: object) -> None:
    with pytest.raises(BadAnswer, match="meta_info"):
        read_answer(REQUEST, given)


def test_routed_experts_that_were_asked_for_must_be_there() -> None:
    given = copy.deepcopy(GOOD)
    del given["meta_info"]["routed_experts"]
    request = RolloutRequest(input_ids=[1], return_routed_experts=True)
    with pytest.raises(BadAnswer, match="routed_experts"):
        read_answer(request, given)
    given["meta_info"]["finish_reason"] = {"type": "abort"}  # the part that continues this one has them
    assert read_answer(request, given).routed_experts is None
