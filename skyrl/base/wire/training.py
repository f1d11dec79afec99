"""Decodes the bodies of forward and forward_backward, protobuf (since SDK 0.25) or JSON (older), into NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from skyrl.base.wire import tensors
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.provenance import JsonSpan, check_provenance, span_of_proto
from skyrl.base.wire.requests import SequencedRequest
from skyrl.base.wire.sample_request import ImagePart, ModelInput, text_and_images

PROTOBUF = "application/x-protobuf"
_NEVER_SPARSE = ("routed_experts", "top_p_token_ids", "top_p_token_offsets")
"""Inputs in which an unlisted cell, read as 0, would have a meaning that nobody gave it: expert 0, or token 0."""


@dataclass(frozen=True)
class ForwardBackward:
    """One decoded command. `tokens[i]` is int64, the text of datum i, between which `images[i]` have their places;
    `loss_inputs[i]` has int64 or float32 arrays by name. `loss_id`: of a custom loss, from the configuration."""

    model_id: str
    seq_id: int | None
    forward_only: bool
    tokens: list[npt.NDArray[np.int64]]
    images: list[list[ImagePart]]
    loss_inputs: list[dict[str, tensors.Array]]
    loss_fn: str
    loss_config: dict[str, float]
    loss_id: str | None = None


class JsonDatum(msgspec.Struct):
    model_input: ModelInput
    loss_fn_inputs: dict[str, tensors.JsonTensor]
    model_input_spans: list[JsonSpan] | None = None
    loss_fn_input_spans: list[JsonSpan] | None = None


class _Tokens(msgspec.Struct):
    model_input: ModelInput


class _TokensOfData(msgspec.Struct):
    data: list[_Tokens]


class _TokensOfBody(msgspec.Struct):
    forward_backward_input: _TokensOfData | None = None
    forward_input: _TokensOfData | None = None


class JsonForwardBackwardInput(msgspec.Struct):
    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class JsonForwardBackward(msgspec.Struct):
    model_id: str
    seq_id: int | None = None
    forward_backward_input: JsonForwardBackwardInput | None = None
    forward_input: JsonForwardBackwardInput | None = None


def decode_header(body: bytes, body_format: str) -> SequencedRequest:
    """Only the model and the sequence number. Raises RequestError if the body cannot be decoded."""
    if body_format != "proto":
        return decode_json(SequencedRequest, body)
    try:
        header = pb.ForwardBackwardHeader.FromString(body)
    except DecodeError as error:
        raise RequestError(f"the body is not a ForwardBackwardRequest: {error}") from error
    if not header.model_id:
        raise RequestError("is missing", field="model_id")
    return SequencedRequest(header.model_id, header.seq_id)


def count_tokens(body: bytes, body_format: str) -> int:
    """The number of tokens of all data. Raises RequestError if the body cannot be decoded."""
    if body_format != "proto":
        request = decode_json(_TokensOfBody, body)
        inputs = [part for part in (request.forward_backward_input, request.forward_input) if part is not None]
        chunks = (chunk for part in inputs for datum in part.data for chunk in datum.model_input.chunks)
        return sum(len(chunk.tokens or ()) for chunk in chunks)
    try:
        message = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise RequestError(f"the body is not a ForwardBackwardRequest: {error}") from error
    return sum(len(chunk.encoded_text.tokens) // 4 for datum in message.data for chunk in datum.model_input)


def decode_forward_backward(body: bytes, body_format: str, *, forward_only: bool) -> ForwardBackward:
    """The whole command. `forward_only` is true on the route `forward`; a protobuf body may set it, too.

    Raises RequestError naming the field and the datum.
    """
    return _from_proto(body, forward_only) if body_format == "proto" else _from_json(body, forward_only)


def _from_proto(body: bytes, forward_only: bool) -> ForwardBackward:
    try:
        message = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise RequestError(f"the body is not a ForwardBackwardRequest: {error}") from error
    given: dict[str, float | str | None] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        given[name] = value.number if kind == "number" else value.text if kind == "text" else None
    config, loss_id = _config(message.loss_fn, given)
    tokens: list[npt.NDArray[np.int64]] = []
    images: list[list[ImagePart]] = []
    inputs: list[dict[str, tensors.WireTensor]] = []
    for index, datum in enumerate(message.data):
        of_datum = _proto_input(datum, f"data[{index}].model_input")
        tokens.append(of_datum[0])
        images.append(of_datum[1])
        inputs.append(
            {
                name: tensors.tensor_from_proto(tensor, f"data[{index}].loss_fn_inputs.{name}")
                for name, tensor in datum.loss_fn_inputs.items()
            }
        )
        if datum.model_input_spans or datum.loss_fn_input_spans:
            given_spans = (
                [*map(span_of_proto, datum.model_input_spans)],
                [*map(span_of_proto, datum.loss_fn_input_spans)],
            )
            check_provenance(*given_spans, *_extent(of_datum, inputs[-1]), f"data[{index}]")
    return ForwardBackward(
        message.model_id,
        message.seq_id,
        forward_only or message.forward_only,
        tokens,
        images,
        _to_dense(inputs),
        message.loss_fn,
        config,
        loss_id,
    )


def _config(loss_fn: str, given: Mapping[str, float | str | None]) -> tuple[dict[str, float], str | None]:
    """The numbers of a configuration, and the id of the custom loss that it names."""
    numbers: dict[str, float] = {}
    loss_id: str | None = None
    for name, value in given.items():
        if isinstance(value, int | float):
            numbers[name] = value
        elif isinstance(value, str) and (loss_fn, name) == ("custom", "loss_id"):
            loss_id = value
        else:
            raise RequestError("must be a number", field=f"loss_fn_config.{name}")
    if loss_fn == "custom" and loss_id is None:
        raise RequestError("must be the loss_id that create_custom_loss has given", field="loss_fn_config.loss_id")
    return numbers, loss_id


def _extent(
    of_datum: tuple[npt.NDArray[np.int64], list[ImagePart]], inputs: Mapping[str, tensors.WireTensor]
) -> tuple[int | None, int | None]:
    """How many tokens a datum has and how many rows its targets; None where the body does not say."""
    tokens, images = of_datum
    of_images = [image.expected_tokens for image in images]
    targets = inputs.get("target_tokens")
    return (
        None if None in of_images else len(tokens) + sum(count or 0 for count in of_images),
        None if targets is None or not targets.shape else targets.shape[0],
    )


def _proto_input(datum: pb.Datum, field: str) -> tuple[npt.NDArray[np.int64], list[ImagePart]]:
    parts: list[npt.NDArray[np.int32]] = []
    images: list[ImagePart] = []
    for index, chunk in enumerate(datum.model_input):
        kind = chunk.WhichOneof("chunk")
        if kind == "image":
            before = sum(len(part) for part in parts)
            images.append(_proto_image(chunk.image, before, f"{field}.chunks[{index}]"))
        elif kind != "encoded_text":
            raise RequestError(
                "is neither text nor an image, and other chunks are not served", field=f"{field}.chunks[{index}]"
            )
        elif len(chunk.encoded_text.tokens) % 4:
            raise RequestError("tokens are not int32", field=field)
        else:
            parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64), images


def _proto_image(image: pb.ImageChunk, before: int, name: str) -> ImagePart:
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    override = None
    if image.HasField("override_dimensions"):
        override = (image.override_dimensions.width, image.override_dimensions.height)
    return ImagePart(name, before, image.location, image.format, expected, override)


def _from_json(body: bytes, forward_only: bool) -> ForwardBackward:
    request = decode_json(JsonForwardBackward, body)
    command = request.forward_input if forward_only else request.forward_backward_input
    if command is None:
        raise RequestError("is missing", field="forward_input" if forward_only else "forward_backward_input")
    config, loss_id = _config(command.loss_fn, command.loss_fn_config or {})
    inputs = [_json_input(datum, f"data[{index}].model_input") for index, datum in enumerate(command.data)]
    given = [
        {
            name: tensors.tensor_from_json(tensor, f"data[{index}].loss_fn_inputs.{name}")
            for name, tensor in datum.loss_fn_inputs.items()
        }
        for index, datum in enumerate(command.data)
    ]
    for index, datum in enumerate(command.data):
        if datum.model_input_spans is not None or datum.loss_fn_input_spans is not None:
            spans = datum.model_input_spans or [], datum.loss_fn_input_spans or []
            check_provenance(*spans, *_extent(inputs[index], given[index]), f"data[{index}]")
    return ForwardBackward(
        request.model_id,
        request.seq_id,
        forward_only,
        [tokens for tokens, _ in inputs],
        [images for _, images in inputs],
        _to_dense(given),
        command.loss_fn,
        config,
        loss_id,
    )


def _json_input(datum: JsonDatum, field: str) -> tuple[npt.NDArray[np.int64], list[ImagePart]]:
    tokens, images = text_and_images(datum.model_input, field)
    if not tokens and not images:
        raise RequestError("must hold at least one token", field=field)
    try:
        return np.asarray(tokens, dtype=np.int64), images
    except OverflowError as error:
        raise RequestError("token ids must fit 64 bits", field=field) from error


def _to_dense(inputs: list[dict[str, tensors.WireTensor]]) -> list[dict[str, tensors.Array]]:
    dense: list[dict[str, tensors.Array]] = []
    filled = 0
    for index, datum_inputs in enumerate(inputs):
        for name in _NEVER_SPARSE:
            if name in datum_inputs and datum_inputs[name].crow is not None:
                raise RequestError("must be dense, not a CSR tensor", field=f"data[{index}].loss_fn_inputs.{name}")
        arrays, filled = tensors.to_dense(datum_inputs, filled, f"data[{index}].loss_fn_inputs")
        dense.append(arrays)
    return dense
