"""SGLang's fields of a request for samples, and its sampling parameters, as vLLM's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyrl.inference.sidecar.errors import BadRequest
from skyrl.inference.sidecar.generate_request import GenerateRequest, Logprobs, read_generate, read_sampling


def read(**body: Any) -> GenerateRequest:
    return read_generate(json.dumps(body).encode())


def test_text_wins_over_ids() -> None:
    request = read(text="a", input_ids=[1])
    assert [prompt.tokens for prompt in request.prompts] == ["a"]
    assert request.single


@pytest.mark.parametrize(
    ("body", "single", "samples"),
    [
        ({"input_ids": [1]}, True, 1),
        ({"input_ids": [[1]]}, False, 1),
        ({"text": ["a", "b"]}, False, 2),
        ({"input_ids": [1], "sampling_params": {"n": 3}}, False, 3),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 2}, {"n": 2}]}, False, 4),
    ],
)
def test_several_samples_are_answered_by_a_list(body: dict[str, Any], single: bool, samples: int) -> None:
    request = read(**body)
    assert (request.single, request.samples) == (single, samples)


def test_request_ids() -> None:
    assert read(input_ids=[1], rid="a").prompts[0].sample_ids() == ["a"]
    assert [prompt.rid for prompt in read(input_ids=[[1], [2]], rid="a").prompts] == ["a_0", "a_1"]
    assert [prompt.rid for prompt in read(input_ids=[[1], [2]], rid=["a", "b"]).prompts] == ["a", "b"]
    several = read(input_ids=[1], rid="a", sampling_params={"n": 2}).prompts[0]
    assert several.rid == "a"
    assert len({*several.sample_ids(), "a"}) == 3
    assert read(input_ids=[1]).prompts[0].rid != read(input_ids=[1]).prompts[0].rid


def test_values_for_each_prompt() -> None:
    request = read(
        input_ids=[[1], [2]],
        return_logprob=[True, False],
        logprob_start_len=[0, -1],
        top_logprobs_num=[2, None],
        lora_path=["a", None],
        sampling_params=[{"temperature": 0}, {"temperature": 1}],
    )
    first, second = request.prompts
    assert (first.logprobs, second.logprobs) == (Logprobs(0, 2), None)
    assert (first.adapter, second.adapter) == ("a", None)
    assert (first.sampling.fields["temperature"], second.sampling.fields["temperature"]) == (0, 1)


def test_named_tokens() -> None:
    assert read(input_ids=[1], return_logprob=True, token_ids_logprob=[4, 5]).prompts[0].logprobs == Logprobs(
        ids=(4, 5)
    )
    both = read(input_ids=[[1], [2]], return_logprob=True, token_ids_logprob=[[4], None])
    assert [prompt.logprobs for prompt in both.prompts] == [Logprobs(ids=(4,)), Logprobs()]


def test_fields_that_vllm_has_too() -> None:
    request = read(
        input_ids=[1],
        session_id="s",
        extra_key="k",
        priority=3,
        return_routed_experts=True,
        routed_experts_start_len=4,
    )
    extra = {"session_id": "s", "cache_salt": "k", "priority": -3, "routed_experts_prompt_start": 4}
    assert request.prompts[0].extra == extra
    assert request.routed_experts_start == 4
    assert read(input_ids=[1]).routed_experts_start is None


def test_what_clients_and_gateways_add_is_accepted() -> None:
    added = {
        "model": None,
        "image_data": None,
        "input_embeds": None,
        "video_data": [],
        "log_metrics": True,
        "return_hidden_states": False,
        "return_entropy": False,
        "background": False,
        "no_logs": False,
        "return_bytes": False,
        "input_tokens": [1],
        "unknown": {"a": 1},
    }
    assert read(input_ids=[1], **added).single


@pytest.mark.parametrize(
    ("body", "pictures"),
    [
        ({"input_ids": [1], "image_data": "a"}, [("a",)]),
        ({"text": "x", "image_data": ["a", "b"]}, [("a", "b")]),
        ({"input_ids": [1], "image_data": "a", "top_logprobs_num": 1}, [("a",)]),
        ({"input_ids": [[1], [2], [3]], "image_data": ["a", None, ["b", "c"]]}, [("a",), (), ("b", "c")]),
        ({"input_ids": [[1], [2]], "image_data": []}, [(), ()]),
        ({"input_ids": [1], "image_data": False}, [()]),
    ],
)
def test_each_prompt_has_its_pictures(body: dict[str, Any], pictures: list[tuple[str, ...]]) -> None:
    assert [prompt.pictures for prompt in read(**body).prompts] == pictures


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("text, input_ids", {}),
        ("text, input_ids", {"text": None, "input_ids": None}),
        ("input_ids", {"input_ids": []}),
        ("input_ids", {"input_ids": [[1], []]}),
        ("input_ids", {"input_ids": [1, "a"]}),
        ("input_ids", {"input_ids": [1, -1]}),
        ("input_ids", {"input_ids": [1, 1.5]}),
        ("input_ids", {"input_ids": [1, True]}),
        ("input_ids", {"input_ids": "1"}),
        ("text", {"text": ""}),
        ("text", {"text": []}),
        ("text", {"text": ["a", 1]}),
        ("input_embeds", {"input_ids": [1], "input_embeds": [[0.5]]}),
        ("image_data: image 2", {"input_ids": [1], "image_data": ["data:", {"url": "x"}]}),
        ("image_data", {"input_ids": [1], "image_data": 5}),
        ("image_data", {"input_ids": [1], "image_data": ["a"] * 65}),
        ("image_data", {"input_ids": [[1], [2]], "image_data": ["a"]}),
        ("image_data", {"input_ids": [[1], [2]], "image_data": "a"}),
        ("top_logprobs_num", {"input_ids": [1], "image_data": "a", "return_logprob": True, "top_logprobs_num": 1}),
        ("token_ids_logprob", {"input_ids": [1], "image_data": "a", "return_logprob": True, "token_ids_logprob": [1]}),
        ("session_params", {"input_ids": [1], "session_params": {"id": "x"}}),
        ("return_hidden_states", {"input_ids": [1], "return_hidden_states": True}),
        ("stream", {"input_ids": [1], "stream": "yes"}),
        ("return_logprob", {"input_ids": [1], "return_logprob": 1}),
        ("return_logprob", {"input_ids": [1], "return_logprob": [True]}),
        ("return_logprob", {"input_ids": [[1], [2]], "return_logprob": [True]}),
        ("logprob_start_len", {"input_ids": [1], "logprob_start_len": -2}),
        ("top_logprobs_num", {"input_ids": [1], "top_logprobs_num": -1}),
        ("token_ids_logprob", {"input_ids": [1], "token_ids_logprob": [1], "top_logprobs_num": 1}),
        ("token_ids_logprob", {"input_ids": [1], "token_ids_logprob": [1], "logprob_start_len": 0}),
        ("token_ids_logprob", {"input_ids": [1], "token_ids_logprob": [[1]]}),
        ("sampling_params", {"input_ids": [1], "sampling_params": []}),
        ("sampling_params", {"input_ids": [[1]], "sampling_params": []}),
        ("sampling_params", {"input_ids": [[1], [2]], "sampling_params": [{"n": 1}, {"n": 2}]}),
        (r"sampling_params\[1\].top_p", {"input_ids": [[1], [2]], "sampling_params": [{}, {"top_p": 2}]}),
        ("rid", {"input_ids": [1], "rid": 5}),
        ("rid", {"input_ids": [1], "rid": ["a"]}),
        ("rid", {"input_ids": [[1], [2]], "rid": ["a", "a"]}),
        ("rid", {"input_ids": [[1], [2]], "rid": ["a"]}),
        ("lora_path", {"input_ids": [1], "lora_path": 5}),
        ("routed_experts_start_len", {"input_ids": [1], "routed_experts_start_len": -1}),
        ("priority", {"input_ids": [1], "priority": "high"}),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(field: str, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=f"^{field}"):
        read(**body)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"input_ids": [NaN]}', b"\xff"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="^body"):
        read_generate(body)


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


ASKS = {"custom_params": {"return_top_p_token_ids": True}}


def test_kept_tokens_are_asked_for_as_alternatives_where_any_are_cut() -> None:
    assert read_sampling({"top_k": 20, "top_p": 0.9, **ASKS}).kept == 35
    assert read_sampling({"top_k": 20, "top_p": 0.9, "custom_params": {"return_top_p_token_ids": False}}).kept == 0
    assert read_sampling({"top_k": 20, "temperature": 0, **ASKS}).kept == 0, "greedy logprobs are those of all tokens"
    assert read_sampling(ASKS).kept == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"sampling_params": {"top_p": 0.9, **ASKS}}, "return_top_p_token_ids: needs top_k from 1 to 1024"),
        ({"sampling_params": {"top_k": 1025, **ASKS}}, "got 1025"),
        ({"sampling_params": {"top_k": 9, "regex": "a", **ASKS}}, "cannot be combined with a grammar"),
        ({"sampling_params": {"top_k": 9, "custom_params": {"return_top_p_token_ids": 1}}}, "return_top_p_token_ids"),
        ({"sampling_params": {"top_k": 9, **ASKS}, "return_logprob": False}, "needs return_logprob"),
        ({"sampling_params": {"top_k": 9, **ASKS}, "token_ids_logprob": [3]}, "with token_ids_logprob"),
        ({"sampling_params": {"top_k": 9, **ASKS}, "image_data": "data:image/png;base64,AA=="}, "with image_data"),
    ],
)
def test_kept_tokens_that_vllm_cannot_tell_are_refused(body: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        read_generate(json.dumps({"input_ids": [1], "return_logprob": True} | body).encode())


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
        {"min_p": 10**400},
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
