"""Bodies of requests, and the paths that they name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from tinker.types import CreateModelRequest as SdkCreateModelRequest
from tinker.types import DimuonParams
from tinker.types import LoraConfig as SdkLoraConfig
from tinker.types import OptimStepRequest as SdkOptimStepRequest

from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.errors import ErrorCategory, FailedRequest, NotFound, RequestError
from skyrl.base.wire.paths import TinkerPath, check_name, model_id_of, parse_path, sampling_session_id_of
from skyrl.base.wire.requests import (
    AdamParams,
    CreateModelRequest,
    CreateSessionRequest,
    FinishSessionRequest,
    LoadWeightsRequest,
    LoraConfig,
    OptimStepRequest,
    RetrieveFutureRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SequencedRequest,
)
from skyrl.base.wire.sample_request import ModelInput, SampleRequest, SamplingParams, tokens_of


def decoded(kind: type[msgspec.Struct], body: Any) -> Any:
    return decode_json(kind, json.dumps(body).encode())


# Bodies of old SDKs (0.16 and before): without `type` tags, with explicit nulls, without defaults


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (CreateSessionRequest, {"tags": [], "user_metadata": None, "sdk_version": "0.16.1"}, {"user_metadata": None}),
        (
            CreateModelRequest,
            {"session_id": "s1", "model_seq_id": 0, "base_model": "b", "user_metadata": None, "lora_config": {}},
            {"lora_config": LoraConfig(32, None, True, True, True), "optimizer_config": None},
        ),
        (
            CreateModelRequest,
            {"session_id": "s1", "model_seq_id": 0, "base_model": "b", "lora_config": {"rank": 8, "seed": None}},
            {"lora_config": LoraConfig(rank=8)},
        ),
        (OptimStepRequest, {"model_id": "m", "seq_id": 1, "adam_params": {}}, {"adam_params": AdamParams()}),
        (OptimStepRequest, {"model_id": "m", "seq_id": None, "adam_params": None}, {"seq_id": None}),
        (
            SampleRequest,
            {
                "prompt": {"chunks": [{"tokens": [1]}]},
                "sampling_params": {"max_tokens": 4},
                "base_model": None,
                "model_path": None,
                "sampling_session_id": "x",
                "seq_id": 0,
                "prompt_logprobs": None,
            },
            {"sampling_params": SamplingParams(max_tokens=4), "prompt_logprobs": None, "num_samples": 1},
        ),
        (
            SampleRequest,
            {
                "prompt": {"chunks": [{"tokens": [1]}]},
                "sampling_params": {"max_tokens": None, "seed": None, "stop": None},
                "target_prompt_logprobs": None,
            },
            {"sampling_params": SamplingParams(), "target_prompt_logprobs": None},
        ),
        (
            SaveWeightsRequest,
            {"model_id": "m", "seq_id": 2, "path": "ck", "ttl_seconds": None},
            {"path": "ck", "overwrite": False},
        ),
        (
            SaveWeightsForSamplerRequest,
            {"model_id": "m", "path": None, "sampling_session_seq_id": 3},
            {"path": None, "sampling_session_seq_id": 3},
        ),
        (LoadWeightsRequest, {"model_id": "m", "seq_id": 1, "path": "tinker://m/weights/a"}, {"optimizer": False}),
        (FinishSessionRequest, {"reason": None}, {"reason": None}),
        (RetrieveFutureRequest, {"request_id": "r"}, {"allow_metadata_only": None}),
    ],
)
def test_bodies_of_old_sdks_are_decoded(kind: type[msgspec.Struct], body: Any, expected: dict[str, Any]) -> None:
    request = decoded(kind, body)
    assert {name: getattr(request, name) for name in expected} == expected


def test_the_adam_defaults_equal_those_of_the_sdk() -> None:
    adam = AdamParams()
    assert (adam.learning_rate, adam.beta1, adam.beta2, adam.eps) == (1e-4, 0.9, 0.95, 1e-12)
    assert (adam.weight_decay, adam.grad_clip_norm) == (0.0, 0.0)


# Bodies of new SDKs: with `type` tags and with newer fields


def test_a_body_of_the_newest_sdk_is_decoded() -> None:
    request = SdkCreateModelRequest(
        session_id="s1", model_seq_id=2, base_model="b", lora_config=SdkLoraConfig(rank=16, train_mlp=False)
    )
    request_decoded = decode_json(CreateModelRequest, request.model_dump_json(exclude_none=True).encode())
    assert (request_decoded.session_id, request_decoded.model_seq_id, request_decoded.base_model) == ("s1", 2, "b")
    assert request_decoded.lora_config == LoraConfig(rank=16, train_mlp=False)
    assert request_decoded.optimizer_config is not None
    assert request_decoded.optimizer_config.type == "adamw"


def test_values_of_another_optimizer_than_adam_are_seen() -> None:
    given = SdkOptimStepRequest(optim_params=DimuonParams(learning_rate=0.5), model_id="m", seq_id=1)
    step = decode_json(OptimStepRequest, given.model_dump_json().encode())
    assert step.adam_params is None
    assert step.optimizer_params["learning_rate"] == 0.5


def test_types_and_unknown_fields_are_ignored() -> None:
    body = {"model_id": "m", "seq_id": 2**40, "type": "save_weights", "kind": "snapshot", "later": {"a": [1]}}
    assert decoded(SequencedRequest, body) == SequencedRequest("m", 2**40)


def test_the_reason_of_a_finished_session_is_decoded() -> None:
    request = decoded(FinishSessionRequest, {"reason": {"type": "error", "code": 1}, "detail": "x"})
    assert request.reason.type == "error"


# Refusals


@pytest.mark.parametrize(
    ("kind", "body", "field", "message"),
    [
        (RetrieveFutureRequest, {}, "request_id", "is missing"),
        (RetrieveFutureRequest, {"request_id": 7}, "request_id", "Expected `str`, got `int`"),
        (RetrieveFutureRequest, {"request_id": None}, "request_id", "got `null`"),
        (RetrieveFutureRequest, [], None, "Expected `object`, got `array`"),
        (RetrieveFutureRequest, None, None, "got `null`"),
        (SampleRequest, {}, "prompt", "is missing"),
        (SampleRequest, {"prompt": {}}, "prompt.chunks", "is missing"),
        (SampleRequest, {"prompt": [1, 2]}, "prompt", "got `array`"),
        (SampleRequest, {"prompt": {"chunks": [{"tokens": [1, "2"]}]}}, "prompt.chunks[0].tokens[1]", "got `str`"),
        (SampleRequest, {"prompt": {"chunks": [{"tokens": [1.5]}]}}, "prompt.chunks[0].tokens[0]", "got `float`"),
        (SampleRequest, {"prompt": {"chunks": [{"tokens": [True]}]}}, "prompt.chunks[0].tokens[0]", "got `bool`"),
        (
            SampleRequest,
            {"prompt": {"chunks": []}, "sampling_params": {"temperature": "hot"}},
            "sampling_params.temperature",
            "Expected `float`",
        ),
        (
            SampleRequest,
            {"prompt": {"chunks": []}, "sampling_params": {"stop": [None]}},
            "sampling_params.stop[0]",
            "Expected `int | str`",
        ),
        (
            CreateModelRequest,
            {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": {"train_mlp": 1}},
            "lora_config.train_mlp",
            "Expected `bool`",
        ),
        (CreateSessionRequest, {"user_metadata": [1]}, "user_metadata", "got `array`"),
        (FinishSessionRequest, {"reason": {}}, "reason.type", "is missing"),
    ],
)
def test_the_refusal_of_a_wrong_body_names_the_field(
    kind: type[msgspec.Struct], body: Any, field: str | None, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        decoded(kind, body)
    assert caught.value.field == field
    assert message in caught.value.message
    assert caught.value.message.startswith(f"{field}: ") is (field is not None)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"request_id": "a"} trailing',
        b"\x0a\x03abc",
        b'{"request_id": "\xff"}',
        b'{"request_id": "\\ud800"}',
        b'{"request_id": NaN}',
    ],
)
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="the body is not JSON") as caught:
        decode_json(RetrieveFutureRequest, body)
    assert caught.value.field is None


@pytest.mark.parametrize("body", [b'{"unknown": ', b'{"user_metadata": {"a": '])
def test_a_body_that_is_nested_too_deeply_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="nested too deeply"):
        decode_json(CreateSessionRequest, body + b"[" * 100_000)


# Prompts


def test_the_tokens_of_all_chunks_are_joined_in_order() -> None:
    assert tokens_of(decoded(ModelInput, {"chunks": [{"tokens": [3, 1]}]})) == [3, 1]
    mixed = {"chunks": [{"type": "encoded_text", "tokens": [3]}, {"tokens": []}, {"tokens": [1, 2]}]}
    assert tokens_of(decoded(ModelInput, mixed)) == [3, 1, 2]


@pytest.mark.parametrize(
    ("chunks", "field"),
    [
        ([], "data[4].model_input"),
        ([{"tokens": []}], "data[4].model_input"),
        ([{"tokens": [1]}, {"type": "image", "data": "", "format": "png"}], "data[4].model_input.chunks[1]"),
        ([{}], "data[4].model_input.chunks[0]"),
    ],
)
def test_inputs_without_tokens_or_with_images_are_refused(chunks: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        tokens_of(decoded(ModelInput, {"chunks": chunks}), "data[4].model_input")
    assert caught.value.field == field


# Errors


def test_errors_carry_field_status_and_category() -> None:
    assert RequestError("is bad", field="a.b").message == "a.b: is bad"
    assert RequestError("is bad").field is None
    assert NotFound("no x", field="x").status == 404
    assert FailedRequest("m").category is ErrorCategory.USER
    assert [category.value for category in ErrorCategory] == ["user", "server", "unknown"]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("tinker://s1:train:0/weights/ck-1", TinkerPath("s1:train:0", "weights", "ck-1")),
        ("tinker://s1:train:0/sampler_weights/0001", TinkerPath("s1:train:0", "sampler_weights", "0001")),
        ("tinker://s1:train:0/external_weights/download", TinkerPath("s1:train:0", "external_weights", "download")),
        ("tinker://m/weights/" + "a" * 255, TinkerPath("m", "weights", "a" * 255)),
        ("tinker://m/weights/.hidden_Name-2.0", TinkerPath("m", "weights", ".hidden_Name-2.0")),
    ],
)
def test_a_path_is_parsed_and_written_back(text: str, path: TinkerPath) -> None:
    assert parse_path(text) == path
    assert str(path) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tinker://",
        "ck-1",
        "/etc/passwd",
        "http://m/weights/a",
        "tinker:/m/weights/a",
        "tinker://m/weights",
        "tinker://m/weights/",
        "tinker:///weights/a",
        "tinker://m/optimizer/a",
        "tinker://m/weights/a/b",
        "tinker://m/weights/..",
        "tinker://m/weights/.",
        "tinker://m/weights/a b",
        "tinker://m/weights/a\n",
        "tinker://m/weights/a%2fb",
        "tinker://m/weights/é",
        "tinker://m/weights/" + "a" * 256,
        "tinker://../weights/../../a",
    ],
)
def test_an_invalid_path_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_path(text, "model_path")
    assert caught.value.field == "model_path"
    assert caught.value.status == 400


@pytest.mark.parametrize("name", ["", ".", "..", "...", "a/b", "a\0b", "a" * 256, "-\n"])
def test_an_unsafe_name_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_name(name)
    assert caught.value.field == "path"


def test_ids_equal_those_that_the_sdk_computes() -> None:
    assert model_id_of("s1", 3) == "s1:train:3"
    assert sampling_session_id_of("s1", 4) == "s1:sample:4"
