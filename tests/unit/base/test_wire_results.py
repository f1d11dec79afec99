"""Results in protobuf, read with the SDK's own decoders, and in JSON for older SDKs."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from skyrl.base.wire import tensors
from skyrl.base.wire.results import (
    Alternatives,
    SampledSequence,
    SampleResult,
    encode_forward_backward,
    encode_json,
    encode_sample,
    to_json,
)
from skyrl.base.wire.tensors import JsonTensor, WireTensor

F32 = np.float32


def array(*shape: int, start: float = 0.0) -> npt.NDArray[np.float32]:
    return (np.arange(np.prod(shape), dtype=F32) + start).reshape(shape)


# Samples


def test_a_sample_with_every_field_is_read_by_the_sdk() -> None:
    result = SampleResult(
        [
            SampledSequence("stop", [5, 2**31 - 1], [-0.5, -1.25], topk=[[(3, -2.0), (5, -0.5)], []]),
            SampledSequence("length", [], [], topk=[]),
        ],
        prompt_logprobs=[None, -0.5, 0.0],
        prompt_topk=[None, [(1, -1.0), (2, -3.0), (9, -2.0)], [(4, 0.0)]],
        cached_tokens=7,
    )
    body = encode_sample(result, topk_sample=2, topk_prompt=2)
    read = deserialize_sample_response(body)
    first, second = read.sequences
    assert (first.stop_reason, first.tokens, first.logprobs) == ("stop", [5, 2**31 - 1], [-0.5, -1.25])
    assert first.topk_logprobs == [[(5, -0.5), (3, -2.0)], None]
    assert (second.stop_reason, second.tokens, second.topk_logprobs) == ("length", [], None)
    assert read.prompt_logprobs == [None, -0.5, 0.0]
    assert read.topk_prompt_logprobs == [None, [(1, -1.0), (9, -2.0)], [(4, 0.0)]]
    assert read.prompt_cache_hit_tokens == 7
    assert json.loads(to_json(body, "proto:sample")) == {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "stop",
                "tokens": [5, 2**31 - 1],
                "logprobs": [-0.5, -1.25],
                "topk_logprobs": [[[5, -0.5], [3, -2.0]], None],
            },
            {"stop_reason": "length", "tokens": [], "logprobs": [], "topk_logprobs": []},
        ],
        "prompt_logprobs": [None, -0.5, 0.0],
        "topk_prompt_logprobs": [None, [[1, -1.0], [9, -2.0]], [[4, 0.0]]],
    }


@pytest.mark.parametrize("indices", [(None, None), (np.asarray([0, 2, 2, 3]), np.asarray([0, 6, 1]))])
def test_dense_and_sparse_target_logprobs_are_read_by_the_sdk(indices: Any) -> None:
    crow, col = indices
    values = array(21 if crow is None else 3, start=-9.0)
    target = WireTensor(values, (3, 7), crow, col)
    body = encode_sample(SampleResult([], target_logprobs=target))
    read = deserialize_sample_response(body).target_prompt_logprobs
    assert read is not None
    assert (read.dtype, read.shape) == ("float32", [3, 7])
    expected = target.dense("x")
    np.testing.assert_array_equal(read.to_numpy(), expected)
    in_json = json.loads(to_json(body, "proto:sample"))["target_prompt_logprobs"]
    np.testing.assert_array_equal(
        tensors.tensor_from_json(msgspec.convert(in_json, JsonTensor), "x").dense("x"), expected
    )
    assert ("sparse_crow_indices" in in_json) == (crow is not None)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_alternative_tokens_are_read_by_the_sdk(shape: tuple[int, int]) -> None:
    tokens = np.arange(6, dtype=np.int64).reshape(2, 3)[: shape[0]]
    body = encode_sample(SampleResult([], alternatives=Alternatives(tokens, array(*shape))))
    read = deserialize_sample_response(body).prompt_alt_tokens
    assert read is not None
    assert (read.tokens.dtype, read.logprobs.dtype) == ("int64", "float32")
    np.testing.assert_array_equal(read.tokens.to_numpy(), tokens)
    np.testing.assert_array_equal(read.logprobs.to_numpy(), array(*shape))
    in_json = json.loads(to_json(body, "proto:sample"))["prompt_alt_tokens"]
    assert in_json["tokens"] == {"data": tokens.ravel().tolist(), "dtype": "int64", "shape": list(shape)}


def test_a_sample_without_optional_fields_has_none_of_them() -> None:
    body = encode_sample(SampleResult([SampledSequence("length", [1], [-1.0])]))
    read = deserialize_sample_response(body)
    assert read.prompt_logprobs is None
    assert read.topk_prompt_logprobs is None
    assert read.target_prompt_logprobs is None
    assert read.prompt_alt_tokens is None
    assert read.sequences[0].topk_logprobs is None
    assert json.loads(to_json(body, "proto:sample")) == {
        "type": "sample",
        "sequences": [{"stop_reason": "length", "tokens": [1], "logprobs": [-1.0]}],
    }


def test_tokens_and_logprobs_keep_their_types() -> None:
    read = deserialize_sample_response(encode_sample(SampleResult([SampledSequence("stop", [1], [-1 / 3])])))
    (sequence,) = read.sequences
    assert sequence.tokens_np is not None
    assert sequence.logprobs_np is not None
    assert (sequence.tokens_np.dtype, sequence.logprobs_np.dtype) == (np.int32, F32)
    assert sequence.logprobs_np[0] == F32(-1 / 3)


# Training passes


@pytest.mark.parametrize(
    "outputs",
    [
        [array(3), array(1, start=9.0)],
        [array(2, 3), array(4, 3)],
        [array(3), array(2, 2), array(1, 2), array(2), array(5)],
        [array(2, 2), array(2, 3), array(2, 2)],
        [array(0), array(2)],
        [array(0, 4), array(2, 4)],
        [np.asfortranarray(array(3, 2))],
        [array(6)[::2]],
    ],
    ids=["1-D", "2-D", "mixed", "widths", "empty", "empty 2-D", "column order", "strided"],
)
def test_logprobs_of_every_shape_are_read_back_unchanged(outputs: list[npt.NDArray[np.float32]]) -> None:
    metrics = {"loss:sum": 1.5, "tokens:sum": 7.0}
    body = encode_forward_backward(outputs, metrics)
    read = deserialize_forward_backward_output(body)
    assert read.loss_fn_output_type == "ArrayRecord"
    assert read.metrics == metrics
    in_json = json.loads(to_json(body, "proto:forward_backward"))
    assert in_json["metrics"] == metrics
    assert in_json["loss_fn_output_type"] == "ArrayRecord"
    assert len(read.loss_fn_outputs) == len(in_json["loss_fn_outputs"]) == len(outputs)
    for sent, output, json_output in zip(outputs, read.loss_fn_outputs, in_json["loss_fn_outputs"], strict=True):
        assert output["logprobs"].dtype == "float32"
        assert output["logprobs"].tolist() == sent.tolist()
        assert output["logprobs"].shape == list(sent.shape)
        assert json_output["logprobs"] == {
            "data": sent.flatten().tolist(),
            "dtype": "float32",
            "shape": list(sent.shape),
        }


def test_values_are_read_back_beside_logprobs_of_every_shape() -> None:
    values = [array(3, start=1.0), array(2, start=5.0), array(2, start=7.0)]
    body = encode_forward_backward([array(3), array(2, 4), array(2, 4)], {}, values)
    read = deserialize_forward_backward_output(body).loss_fn_outputs
    in_json = json.loads(to_json(body, "proto:forward_backward"))["loss_fn_outputs"]
    for sent, output, json_output in zip(values, read, in_json, strict=True):
        assert output["values"].tolist() == sent.tolist()
        assert output["values"].shape == list(sent.shape)
        assert json_output["values"] == {"data": sent.tolist(), "dtype": "float32", "shape": list(sent.shape)}


def test_a_pass_without_data_has_no_outputs() -> None:
    body = encode_forward_backward([], {})
    assert deserialize_forward_backward_output(body).loss_fn_outputs == []
    assert json.loads(to_json(body, "proto:forward_backward"))["loss_fn_outputs"] == []


def test_results_in_json_are_not_changed() -> None:
    body = encode_json({"path": "tinker://m/weights/a"})
    assert to_json(body, "json") is body
