"""forward_backward bodies: protobuf of the SDK, JSON of older SDKs, and bodies that are refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)
from tinker.types.forward_backward_request import ForwardBackwardRequest

from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.requests import SequencedRequest
from skyrl.base.wire.training import ForwardBackward, decode_forward_backward, decode_header


def sdk_body(
    data: list[Datum], *, loss_fn: Any = "cross_entropy", config: dict[str, Any] | None = None, seq_id: int = 3
) -> bytes:
    """The body that the SDK posts."""
    request = ForwardBackwardRequest(ForwardBackwardInput(data, loss_fn, config), "s1:train:0", seq_id)
    return forward_backward_request_to_proto(request).SerializeToString()


def proto(data: list[Datum], **options: Any) -> ForwardBackward:
    return decode_forward_backward(sdk_body(data, **options), "proto", forward_only=False)


def datum(tokens: list[int], **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints(tokens), inputs)


def as_json(*data: dict[str, Any], key: str = "forward_backward_input", **more: Any) -> bytes:
    value = {"data": list(data), "loss_fn": "cross_entropy"} | more
    return json.dumps({"model_id": "s1:train:0", "seq_id": 3, key: value}).encode()


def json_datum(tokens: list[int], **inputs: Any) -> dict[str, Any]:
    return {"model_input": {"chunks": [{"tokens": tokens}]}, "loss_fn_inputs": inputs}


def refused(body: bytes, body_format: str = "json") -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode_forward_backward(body, body_format, forward_only=False)
    return caught.value


# Protobuf


def test_the_sdks_body_is_decoded_with_its_types() -> None:
    command = proto(
        [
            datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.0, 1.0, 0.5]),
            datum([7], target_tokens=np.array([8]), weights=torch.tensor([1.0])),
        ]
    )
    assert (command.model_id, command.seq_id, command.forward_only) == ("s1:train:0", 3, False)
    assert (command.loss_fn, command.loss_config) == ("cross_entropy", {})
    assert [tokens.tolist() for tokens in command.tokens] == [[1, 2, 3], [7]]
    assert [tokens.dtype for tokens in command.tokens] == [np.int64, np.int64]
    first, second = command.loss_inputs
    assert first["target_tokens"].tolist() == [2, 3, 4]
    assert first["target_tokens"].dtype == np.int64
    assert first["weights"].tolist() == [0.0, 1.0, 0.5]
    assert first["weights"].dtype == np.float32
    assert second["target_tokens"].tolist() == [8]


def test_the_chunks_of_an_input_are_joined() -> None:
    chunks: list[Any] = [EncodedTextChunk(tokens=[1, 2]), EncodedTextChunk(tokens=[]), EncodedTextChunk(tokens=[3])]
    command = proto([Datum(ModelInput(chunks=chunks), {}), Datum(ModelInput.empty(), {})])
    assert [tokens.tolist() for tokens in command.tokens] == [[1, 2, 3], []]


def test_sparse_two_dimensional_tensors_become_dense() -> None:
    """The SDK turns targets and weights into CSR separately, and drops the zeros of each."""
    targets = torch.zeros(6, 8, dtype=torch.int64)
    targets[0, 1], targets[3, 0], targets[5, 7] = 11, 12, 13
    weights = torch.zeros(6, 8)
    weights[0, 1], weights[4, 2] = 0.5, 0.25
    sparse_datum = datum([1, 2, 3, 4, 5, 6], target_tokens=targets, weights=weights)
    assert sparse_datum.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    assert sparse_datum.loss_fn_inputs["weights"].sparse_crow_indices is not None
    (inputs,) = proto([sparse_datum]).loss_inputs
    assert inputs["target_tokens"].tolist() == targets.tolist()
    assert inputs["target_tokens"].dtype == np.int64
    assert inputs["weights"].tolist() == weights.tolist()
    assert inputs["weights"].dtype == np.float32


@pytest.mark.parametrize("name", ["routed_experts", "top_p_token_ids"])
def test_recorded_numbers_are_refused_as_a_sparse_tensor(name: str) -> None:
    """A cell that is not listed would be expert 0, for one expert per token a choice like any other; or token 0."""
    sparse = TensorData([], "int64", [2, 1], sparse_crow_indices=[0, 0, 0], sparse_col_indices=[])
    dense = TensorData([0, 0], "int64", [2, 1])
    in_json = {
        "data": [],
        "dtype": "int64",
        "shape": [2, 1],
        "sparse_crow_indices": [0, 0, 0],
        "sparse_col_indices": [],
    }
    for error in (
        refused(sdk_body([datum([1, 2], **{name: dense}), datum([1, 2], **{name: sparse})]), "proto"),
        refused(as_json(json_datum([1, 2]), json_datum([1, 2], **{name: in_json}))),
    ):
        assert f"data[1].loss_fn_inputs.{name}: must be dense" in str(error)


def test_dense_two_dimensional_tensors_keep_their_shape() -> None:
    full = torch.arange(1, 7).reshape(2, 3)
    (inputs,) = proto([datum([1, 2], target_tokens=full, weights=full.float())]).loss_inputs
    assert inputs["target_tokens"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert inputs["weights"].shape == (2, 3)


def test_empty_tensors_keep_their_shape() -> None:
    (inputs,) = proto([datum([1], advantages=np.zeros(0, np.float32), weights=torch.zeros(0, 4))]).loss_inputs
    assert inputs["advantages"].shape == (0,)
    assert inputs["weights"].shape == (0, 4)


def test_old_and_new_loss_configs_are_read() -> None:
    assert proto([], config={"clip_low_threshold": 0.8}).loss_config == {"clip_low_threshold": 0.8}
    old = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo", loss_fn_config={"beta": 0.1})
    command = decode_forward_backward(old.SerializeToString(), "proto", forward_only=False)
    assert command.loss_config == {"beta": 0.1}


def test_the_route_or_the_body_makes_a_pass_forward_only() -> None:
    body = pb.ForwardBackwardRequest(model_id="m", seq_id=1, forward_only=True).SerializeToString()
    assert decode_forward_backward(body, "proto", forward_only=False).forward_only
    assert decode_forward_backward(sdk_body([]), "proto", forward_only=True).forward_only
    assert not proto([]).forward_only


def test_the_header_is_read_without_the_data() -> None:
    assert decode_header(sdk_body([datum([1], weights=[1.0])]), "proto") == SequencedRequest("s1:train:0", 3)
    assert decode_header(as_json(), "json") == SequencedRequest("s1:train:0", 3)
    assert decode_header(b'{"model_id": "m"}', "json") == SequencedRequest("m", None)


@pytest.mark.parametrize(
    ("body", "body_format", "field"),
    [
        (b"\xff\xff\xff", "proto", None),
        (b"", "proto", "model_id"),
        (pb.ForwardBackwardRequest(seq_id=1).SerializeToString(), "proto", "model_id"),
        (b"\x0a\x02\xff\xfe", "proto", None),
        (b"{}", "json", "model_id"),
        (b'{"model_id": 1}', "json", "model_id"),
        (b'{"model_id": "m", "seq_id": "1"}', "json", "seq_id"),
        (b"no json", "json", None),
    ],
)
def test_an_invalid_header_is_refused(body: bytes, body_format: str, field: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        decode_header(body, body_format)
    assert caught.value.field == field


def test_bytes_that_are_no_command_are_refused() -> None:
    assert "not a ForwardBackwardRequest" in refused(b"\xff\xff\xff", "proto").message


def test_a_string_in_the_loss_config_is_refused() -> None:
    assert refused(sdk_body([], config={"mode": "fast"}), "proto").field == "loss_fn_config.mode"


def test_an_image_carries_the_name_of_its_datum() -> None:
    image: list[Any] = [ImageChunk(data=b"x", format="png")]
    bad = Datum(ModelInput(chunks=image), {})
    (part,) = proto([datum([1]), bad]).images[1]
    assert part.name == "data[1].model_input.chunks[0]"


def tensor_refused(tensor: pb.Tensor) -> RequestError:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, data=[pb.Datum(), pb.Datum()])
    message.data[1].loss_fn_inputs["weights"].CopyFrom(tensor)
    error = refused(message.SerializeToString(), "proto")
    assert error.field == "data[1].loss_fn_inputs.weights"
    return error


def indices(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


def csr(crow: bytes, col: bytes, shape: list[int], values: int = 1) -> pb.Tensor:
    sparse = pb.SparseCsr(values=b"\0" * 4 * values, crow_indices=crow, col_indices=col)
    return pb.Tensor(sparse_csr=sparse, dtype=pb.FLOAT32, shape=shape)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (pb.Tensor(dense=b"1234"), "dtype"),
        (pb.Tensor(dense=b"12", dtype=pb.BFLOAT16), "dtype"),
        (pb.Tensor(dense=b"123", dtype=pb.FLOAT32), "3 bytes"),
        (pb.Tensor(dense=b"1234", dtype=pb.INT64), "4 bytes"),
        (pb.Tensor(dense=b"12345678", dtype=pb.FLOAT32, shape=[3]), "shape [3] does not fit 2"),
        (pb.Tensor(dense=b"12345678", dtype=pb.FLOAT32, shape=[-1, -2]), "out of bounds"),
        (pb.Tensor(dense=b"12345678", dtype=pb.FLOAT32, shape=[2**40, 2**40]), "out of bounds"),
        (csr(indices(0, 1), indices(0), []), "2-D"),
        (csr(indices(0, 1), indices(0), [1]), "2-D"),
        (csr(b"", indices(0), [1, 1]), "int64"),
        (csr(b"1234", indices(0), [1, 1]), "int64"),
        (csr(indices(0, 1), indices(0), [1, 2**40]), "out of bounds"),
        (csr(indices(0, 1), indices(0), [2, 1]), "do not describe"),
        (csr(indices(0, 1), indices(1), [1, 1]), "do not describe"),
        (csr(indices(0, 1), indices(-1), [1, 1]), "do not describe"),
        (csr(indices(0, 2), indices(0), [1, 1]), "do not describe"),
        (csr(indices(1, 1), indices(0), [1, 1]), "do not describe"),
        (csr(indices(0, 2, 1), indices(0), [2, 1]), "do not describe"),
        (csr(indices(0, 1), indices(0, 0), [1, 1]), "do not describe"),
    ],
)
def test_an_invalid_protobuf_tensor_is_refused(tensor: pb.Tensor, says: str) -> None:
    assert says in tensor_refused(tensor).message


def test_int32_tensors_become_int64() -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, data=[pb.Datum()])
    tensor = pb.Tensor(dense=np.array([1, -2], np.int32).tobytes(), dtype=pb.INT32)
    message.data[0].loss_fn_inputs["target_tokens"].CopyFrom(tensor)
    command = decode_forward_backward(message.SerializeToString(), "proto", forward_only=False)
    assert command.loss_inputs[0]["target_tokens"].tolist() == [1, -2]
    assert command.loss_inputs[0]["target_tokens"].dtype == np.int64


# JSON, before 0.25


def test_a_json_body_of_an_old_sdk_is_decoded() -> None:
    body = as_json(
        json_datum(
            [1, 2],
            target_tokens={"data": [2, 3], "dtype": "int64", "shape": [2]},
            weights={"data": [0.5, 1], "dtype": "float32", "shape": None},
        ),
        loss_fn_config=None,
    )
    command = decode_forward_backward(body, "json", forward_only=False)
    assert (command.model_id, command.seq_id, command.loss_fn, command.loss_config) == (
        "s1:train:0",
        3,
        "cross_entropy",
        {},
    )
    assert [tokens.tolist() for tokens in command.tokens] == [[1, 2]]
    (inputs,) = command.loss_inputs
    assert inputs["target_tokens"].tolist() == [2, 3]
    assert inputs["target_tokens"].dtype == np.int64
    assert inputs["weights"].tolist() == [0.5, 1.0]
    assert inputs["weights"].dtype == np.float32


def test_a_json_forward_body_has_its_own_key() -> None:
    body = as_json(json_datum([1]), key="forward_input")
    assert decode_forward_backward(body, "json", forward_only=True).forward_only
    assert refused(body).field == "forward_backward_input"
    with pytest.raises(RequestError) as caught:
        decode_forward_backward(as_json(json_datum([1])), "json", forward_only=True)
    assert caught.value.field == "forward_input"


def test_the_loss_config_of_a_json_body_is_read() -> None:
    command = decode_forward_backward(as_json(loss_fn_config={"beta": 1}), "json", forward_only=False)
    assert command.loss_config == {"beta": 1.0}


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_a_json_tensor_equals_the_protobuf_tensor(dtype: Any) -> None:
    """The JSON tensors are CSR, with whole numbers written as floats, and dense."""
    dense = np.array([[0, 5, 0, 0], [0, 0, 0, 0], [7, 0, 0, 9]])
    sparse = TensorData([5, 7, 9], dtype, [3, 4], sparse_crow_indices=[0, 1, 1, 3], sparse_col_indices=[1, 0, 3])
    (expected,) = proto([datum([1], x=sparse)]).loss_inputs
    assert expected["x"].tolist() == dense.tolist()
    tensors: list[dict[str, Any]] = [
        {
            "data": [5.0, 7.0, 9.0],
            "shape": [3, 4],
            "sparse_crow_indices": [0, 1, 1, 3],
            "sparse_col_indices": [1, 0, 3],
        },
        {"data": dense.flatten().tolist(), "shape": [3, 4]},
    ]
    for tensor in tensors:
        body = as_json(json_datum([1], x=tensor | {"dtype": dtype}))
        (inputs,) = decode_forward_backward(body, "json", forward_only=False).loss_inputs
        assert inputs["x"].tolist() == expected["x"].tolist()
        assert inputs["x"].dtype == expected["x"].dtype


def test_an_empty_json_tensor_keeps_its_type() -> None:
    body = as_json(json_datum([1], x={"data": [], "dtype": "int64"}))
    (inputs,) = decode_forward_backward(body, "json", forward_only=False).loss_inputs
    assert inputs["x"].shape == (0,)
    assert inputs["x"].dtype == np.int64


def test_whole_numbers_with_a_point_are_integers() -> None:
    body = as_json(json_datum([1], x={"data": [1.0, -2.0], "dtype": "int64"}))
    (inputs,) = decode_forward_backward(body, "json", forward_only=False).loss_inputs
    assert inputs["x"].tolist() == [1, -2]
    assert inputs["x"].dtype == np.int64


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ({"data": [1.5], "dtype": "int64"}, "data does not fit int64"),
        ({"data": [2**63], "dtype": "int64"}, "data does not fit int64"),
        ({"data": [2**70], "dtype": "int64"}, "data does not fit int64"),
        ({"data": [1e300], "dtype": "int64"}, "data does not fit int64"),
        ({"data": [float(2**63)], "dtype": "int64"}, "data does not fit int64"),
        ({"data": [2**63, -1], "dtype": "int64"}, "data does not fit int64"),
        ({"data": [2**53 + 1, 1.0], "dtype": "int64"}, "data does not fit int64"),
        ({"data": [1e39], "dtype": "float32"}, "data does not fit float32"),
        ({"data": [1, 2], "shape": [3]}, "does not fit 2 elements"),
        ({"data": [1, 2], "shape": [-2]}, "out of bounds"),
        ({"data": [1], "shape": [1, 1], "sparse_crow_indices": [0, 1]}, "both"),
        ({"data": [1], "shape": [1, 1], "sparse_col_indices": [0]}, "both"),
        ({"data": [1], "shape": [1, 1], "sparse_crow_indices": [], "sparse_col_indices": [0]}, "never empty"),
        ({"data": [1], "shape": [1, 1], "sparse_crow_indices": [0, 2**70], "sparse_col_indices": [0]}, "crow_indices"),
        ({"data": [1], "shape": [1, 1], "sparse_crow_indices": [0, 1], "sparse_col_indices": [2**63]}, "col_indices"),
        ({"data": [1], "shape": None, "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]}, "2-D"),
    ],
)
def test_an_invalid_json_tensor_is_refused(tensor: dict[str, Any], says: str) -> None:
    error = refused(as_json(json_datum([1]), json_datum([1], weights=tensor)))
    assert error.field == "data[1].loss_fn_inputs.weights"
    assert says in error.message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (as_json(json_datum([])), "data[0].model_input"),
        (as_json({"loss_fn_inputs": {}}), "forward_backward_input.data[0].model_input"),
        (as_json(json_datum([1], x={"data": ["a"]})), "forward_backward_input.data[0].loss_fn_inputs[...].data[0]"),
        (
            as_json(json_datum([1], x={"data": [1], "dtype": "int32"})),
            "forward_backward_input.data[0].loss_fn_inputs[...].dtype",
        ),
        (as_json(loss_fn=None), "forward_backward_input.loss_fn"),
        (as_json(loss_fn_config={"a": []}), "forward_backward_input.loss_fn_config[...]"),
        (as_json(loss_fn_config={"a": "b"}), "loss_fn_config.a"),
        (as_json(loss_fn="custom"), "loss_fn_config.loss_id"),
        (as_json(loss_fn="custom", loss_fn_config={"loss_id": 3}), "loss_fn_config.loss_id"),
        (as_json(loss_fn="custom", loss_fn_config={"loss_id": "s:loss:0", "a": "b"}), "loss_fn_config.a"),
    ],
)
def test_an_invalid_json_command_is_refused(body: bytes, field: str) -> None:
    assert refused(body).field == field


# Routed experts


def test_routed_experts_of_the_sdk_and_of_old_json_keep_their_three_dimensions() -> None:
    experts = np.arange(24).reshape(3, 4, 2)
    (inputs,) = proto([datum([1, 2, 3], routed_experts=TensorData.from_numpy(experts))]).loss_inputs
    tensor = {"data": experts.reshape(-1).tolist(), "dtype": "int64", "shape": [3, 4, 2]}
    body = as_json(json_datum([1, 2, 3], routed_experts=tensor))
    (old,) = decode_forward_backward(body, "json", forward_only=False).loss_inputs
    for found in (inputs["routed_experts"], old["routed_experts"]):
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, experts)


def test_routed_experts_may_come_as_int32() -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    one = message.data.add()
    one.model_input.add().encoded_text.tokens = np.array([5, 6], np.int32).tobytes()
    experts = np.array([[[3, 1]], [[-1, -1]]], np.int32)
    one.loss_fn_inputs["routed_experts"].CopyFrom(pb.Tensor(dtype=pb.INT32, shape=[2, 1, 2], dense=experts.tobytes()))
    (found,) = decode_forward_backward(message.SerializeToString(), "proto", forward_only=False).loss_inputs
    np.testing.assert_array_equal(found["routed_experts"], experts)


# Custom losses, and where tokens came from


def test_a_custom_loss_is_named_by_text() -> None:
    config = {"loss_id": "s1:loss:0"}
    sent = as_json(json_datum([1]), loss_fn="custom", loss_fn_config=config)
    in_json = decode_forward_backward(sent, "json", forward_only=False)
    for command in (proto([datum([1], target_tokens=[2])], loss_fn="custom", config=config), in_json):
        assert (command.loss_id, command.loss_config) == ("s1:loss:0", {})
    assert proto([datum([1], target_tokens=[2])]).loss_id is None


def _span(length: int, kind: str = "sampled_tokens", **more: Any) -> dict[str, Any]:
    return {kind: {"sequence_id": "q-0", "length": length} | more}


def test_the_spans_of_the_sdk_are_accepted_and_those_that_do_not_tile_are_refused() -> None:
    prompt, sampled = (kind(sequence_id="q-0", length=2) for kind in (PromptProvenanceSpan, SampledProvenanceSpan))
    given = datum([1, 2, 3, 4], target_tokens=[2, 3, 4, 5])
    whole = given.with_provenance([prompt, sampled], [sampled, sampled])
    assert proto([given, whole]).tokens[1].tolist() == [1, 2, 3, 4]
    short = Datum(given.model_input, given.loss_fn_inputs, [prompt, sampled], [sampled])
    error = refused(sdk_body([given, short]), "proto")
    assert error.field == "data[1].loss_fn_input_spans"
    assert "cover 2 positions, and must tile all 4" in str(error)


@pytest.mark.parametrize(
    ("tokens", "targets", "field"),
    [
        ([_span(1, "prompt_tokens"), _span(1)], [_span(2)], ""),
        ([_span(2)], None, "data[0].loss_fn_input_spans"),
        ([_span(3), _span(-1)], [_span(2)], "data[0].model_input_spans[1].length"),
        ([_span(2, offset=-1)], [_span(2)], "data[0].model_input_spans[0].offset"),
        ([_span(2, sequence_id="")], [_span(2)], "data[0].model_input_spans[0].sequence_id"),
        ([_span(2, sequence_id="q" * 201)], [_span(2)], "data[0].model_input_spans[0].sequence_id"),
        ([_span(2) | _span(2, "prompt_tokens")], [_span(2)], "data[0].model_input_spans[0]"),
        ([_span(2)], [_span(2), {}], "data[0].loss_fn_input_spans[1]"),
        ([_span(2), *[_span(0)] * 10_000], [_span(2)], "data[0].model_input_spans"),
    ],
)
def test_spans_in_json_are_checked(tokens: Any, targets: Any, field: str) -> None:
    given = json_datum([1, 2], target_tokens={"data": [2, 3], "dtype": "int64"})
    body = as_json(given | {"model_input_spans": tokens, "loss_fn_input_spans": targets})
    if field:
        assert refused(body).field == field
    else:
        assert len(decode_forward_backward(body, "json", forward_only=False).tokens) == 1
