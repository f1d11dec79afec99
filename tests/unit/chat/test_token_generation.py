"""Requests of vLLM's route for token ids: what goes on, what is refused by its name, and the room for an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai.errors import OpenAIError
from skyrl.chat.openai.exchanges import with_token_names
from skyrl.chat.openai.fields import REFUSED_OF_GENERATE, REFUSED_OF_SAMPLING
from skyrl.chat.openai.generation import GENERATE, Generation, generate
from skyrl.sampling.job import MAX_NUM_SAMPLES, MAX_SEED

LIMITS = ContextLimits(vocab_size=1000, max_context=100)
UNKNOWN = ContextLimits()


def asked(limits: ContextLimits = LIMITS, /, *, params: dict[str, Any] | None = None, **changes: Any) -> Generation:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4} | (params or {})} | changes
    return generate(json.dumps(body).encode(), limits)


def sent(request: Generation) -> dict[str, Any]:
    return json.loads(request.body("run@3", 4))


def refused(call: Any) -> str | None:
    with pytest.raises(RequestError) as error:
        call()
    assert error.value.status == 400
    return error.value.field


def test_what_verifiers_sends_goes_on_as_it_is() -> None:
    """verifiers 0.4.0, verifiers/v1/clients/train.py, and renderers 0.1.12, renderers/client.py."""
    params = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 6, "stop_token_ids": [2], "logprobs": 1}
    params |= {"skip_special_tokens": False, "routed_experts_prompt_start": 2}
    body = {"model": "tinker://x", "token_ids": [5, 6, 7], "sampling_params": params}
    request = generate(json.dumps(body).encode(), LIMITS)
    assert request.path == GENERATE
    assert sent(request) == body | {"model": "run@3", "stream": False, "priority": 4}


def test_a_stream_asks_for_usage_in_every_event() -> None:
    request = asked(stream=True, stream_options={"include_usage": True})
    assert sent(request)["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert request.include_usage
    assert refused(lambda: asked(stream_options={})) == "stream_options"


@pytest.mark.parametrize("name", sorted(REFUSED_OF_GENERATE))
def test_refused_fields_are_named_unless_their_value_changes_nothing(name: str) -> None:
    given: dict[str, Any] = {name: ["anything"]}
    assert refused(lambda: asked(**given)) == name
    for harmless in (None, *REFUSED_OF_GENERATE[name][0]):
        assert sent(asked(**{name: harmless})).get(name, 4) == 4  # the server's own priority


@pytest.mark.parametrize("name", sorted(REFUSED_OF_SAMPLING))
def test_refused_sampling_parameters_are_named_unless_their_value_changes_nothing(name: str) -> None:
    assert refused(lambda: asked(params={name: ["anything"]})) == f"sampling_params.{name}"
    for harmless in (None, *REFUSED_OF_SAMPLING[name][0]):
        assert name not in sent(asked(params={name: harmless}))["sampling_params"]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("token_ids", {"token_ids": []}),
        ("token_ids", {"token_ids": [1000]}),
        ("token_ids", {"token_ids": "text"}),
        ("token_ids[0]", {"token_ids": [[1]]}),
        ("sampling_params", {"sampling_params": None}),
        ("sampling_params", {"sampling_params": 7}),
        ("temprature", {"temprature": 1}),
        ("output_mode", {"output_mode": "words"}),
        ("sampling_params.temprature", {"params": {"temprature": 1}}),
        ("sampling_params.max_tokens", {"params": {"max_tokens": "many"}}),
        ("sampling_params.max_tokens", {"params": {"max_tokens": -1}}),
        ("sampling_params.n", {"params": {"n": MAX_NUM_SAMPLES + 1}}),
        ("sampling_params.logprobs", {"params": {"logprobs": -1}}),
        ("sampling_params.prompt_logprobs", {"params": {"prompt_logprobs": 65}}),
        ("sampling_params.prompt_logprobs", {"params": {"prompt_logprobs": 0}, "stream": True}),
        ("sampling_params.stop", {"params": {"stop": [""]}}),
        ("sampling_params.stop_token_ids", {"params": {"stop_token_ids": [-1]}}),
        ("sampling_params.seed", {"params": {"seed": 2**64}}),
        ("sampling_params.structured_outputs.regex", {"params": {"structured_outputs": {"regex": "a"}}}),
        ("sampling_params._all_stop_token_ids", {"params": {"_all_stop_token_ids": [1]}}),
    ],
)
def test_what_cannot_be_honoured_is_named(field: str, changes: dict[str, Any]) -> None:
    assert refused(lambda: asked(**changes)) == field


def test_an_answer_ends_where_the_context_does_and_a_prompt_must_leave_room() -> None:
    for params, expected in (({}, 4), ({"max_tokens": None}, 97), ({"max_tokens": 98}, 97)):
        request = asked(params=params)
        assert sent(request)["sampling_params"]["max_tokens"] == request.size.max_tokens == expected
    with pytest.raises(OpenAIError) as full:
        asked(token_ids=[5] * 100)
    assert (full.value.field, full.value.code) == ("token_ids", "context_length_exceeded")
    assert "your prompt contains 100 input tokens" in full.value.message
    assert "max_tokens" not in sent(asked(UNKNOWN, params={"max_tokens": None}))["sampling_params"], "vLLM fills it"


def test_the_size_is_that_of_a_completion() -> None:
    size = asked(params={"n": 3, "logprobs": 2, "prompt_logprobs": 1}).size
    assert (size.sequences, size.most_prompt, size.max_tokens, size.topk, size.prompt_topk) == (3, 3, 4, 2, 1)
    assert asked(params={"prompt_logprobs": 0}).scores_prompt
    assert asked(params={"structured_outputs": {"choice": ["a"]}}).shape == "sampling_params.structured_outputs"
    assert sent(asked(params={"seed": -1}))["sampling_params"]["seed"] == MAX_SEED - 1


def test_logprobs_also_have_the_names_of_their_tokens() -> None:
    entry = {"token_id": 7, "logprob": -0.5, "rank": 1, "top_logprobs": [{"token_id": 8, "logprob": -0.7, "rank": 2}]}
    choice = {"index": 0, "stop_reason": '{"token_id":9,', "token_ids": [7], "logprobs": {"content": [entry]}}
    for separators in ((",", ":"), (", ", ": ")):
        found = json.loads(with_token_names(json.dumps({"choices": [choice]}, separators=separators).encode()))
        (named,) = found["choices"][0]["logprobs"]["content"]
        top = [{"token": "token_id:8", "token_id": 8, "logprob": -0.7, "rank": 2}]
        assert named == entry | {"token": "token_id:7", "top_logprobs": top}
        assert found["choices"][0]["stop_reason"] == '{"token_id":9,'
