"""Encodes results: protobuf for samples and training passes, and JSON for clients that do not read protobuf."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from skyrl.base.wire import tensors
from skyrl.base.wire import tinker_pb2 as pb

TOPK_EMPTY_LOGPROB = -99999.0
"""The logprob of an empty top-k cell, whose token is 0. Clients read a row as None if its first cell is empty."""

TopkRow = list[tuple[int, float]]


class TopkTable(msgspec.Struct, frozen=True):
    """Best tokens by position: `ids` int32 and `logprobs` float32, both [positions, k], each row the best first."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    @classmethod
    def empty(cls, positions: int, k: int) -> TopkTable:
        return cls(np.zeros((positions, k), np.int32), np.full((positions, k), TOPK_EMPTY_LOGPROB, np.float32))

    def put(self, first: int, ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
        """Fill the rows from `first` on with the k best of 1 + k cells, [rows, 1 + k], of which the first is that of
        the prompt's own token. A token that occurs again counts once. Of equal ones the earlier is better."""
        keys = -logprobs
        keys[:, 1:][ids[:, 1:] == ids[:, :1]] = np.inf
        best = keys.argsort(axis=1, kind="stable")[:, : self.ids.shape[1]]
        self.ids[first:] = np.take_along_axis(ids, best, axis=1)
        self.logprobs[first:] = np.take_along_axis(logprobs, best, axis=1)


# Every sample makes one. As a frozen dataclass that would take three times as long.
class SampledSequence(msgspec.Struct, frozen=True):
    """One sampled sequence: `tokens`, with the stop token that ended it, and one logprob per token. `weight_versions`:
    which version of the weights sampled the tokens [start, end), as (version, start, end); None if it is not told."""

    stop_reason: Literal["stop", "length"]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    topk: list[TopkRow] | None = None
    weight_versions: Sequence[tuple[str, int, int]] | None = None


@dataclass(frozen=True)
class Alternatives:
    """Tokens drawn in place of each prompt token but the first: `tokens` int64 and `logprobs` float32, both
    [len(prompt) - 1, k]."""

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]


# Every sample makes one, too.
class SampleResult(msgspec.Struct, frozen=True):
    """`prompt_logprobs` and `prompt_topk` have one entry per prompt token, None (NaN) where there is no value.
    `target_logprobs` (float32) has the layout of the request's `target_prompt_logprobs`."""

    sequences: list[SampledSequence]
    prompt_logprobs: Sequence[float | None] | npt.NDArray[np.float32] | None = None
    prompt_topk: list[TopkRow | None] | TopkTable | None = None
    cached_tokens: int = 0
    target_logprobs: tensors.WireTensor | None = None
    alternatives: Alternatives | None = None


def _topk(rows: Sequence[TopkRow | None] | TopkTable, k: int) -> pb.TopkLogprobs:
    """The k best cells of each row, whose cells come in any order."""
    table = rows if isinstance(rows, TopkTable) else TopkTable.empty(len(rows), k)
    for index, row in () if isinstance(rows, TopkTable) else enumerate(rows):
        if row:
            best = sorted(row, key=lambda cell: -cell[1])[:k]
            table.ids[index, : len(best)] = [cell[0] for cell in best]
            table.logprobs[index, : len(best)] = [cell[1] for cell in best]
    ids, logprobs = table.ids.tobytes(), table.logprobs.tobytes()
    return pb.TopkLogprobs(token_ids=ids, logprobs=logprobs, k=k, length=len(table.ids))


def _dense_tensor(array: tensors.Array) -> pb.Tensor:
    return tensors.to_proto(tensors.WireTensor(array.ravel(), array.shape))


def encode_sample(result: SampleResult, *, topk_sample: int = 0, topk_prompt: int = 0) -> bytes:
    """A SampleResponse. Missing prompt logprobs are NaN; empty top-k cells are TOPK_EMPTY_LOGPROB."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=result.cached_tokens)
    for sequence in result.sequences:
        added = message.sequences.add(
            stop_reason=pb.STOP if sequence.stop_reason == "stop" else pb.LENGTH,
            tokens=array("i", sequence.tokens).tobytes(),  # several times cheaper than NumPy for lists this short
            logprobs=array("f", sequence.logprobs).tobytes(),
        )
        if topk_sample and sequence.topk is not None:
            added.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk, topk_sample))
        for version, start, end in sequence.weight_versions or ():
            added.weight_versions.add(version=version, start=start, end=end)
    if result.prompt_logprobs is not None:
        given = result.prompt_logprobs
        if not isinstance(given, np.ndarray):
            given = np.asarray([math.nan if value is None else value for value in given], np.float32)
        message.prompt_logprobs = given.tobytes()
    if topk_prompt and result.prompt_topk is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(result.prompt_topk, topk_prompt))
    if result.target_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(tensors.to_proto(result.target_logprobs))
    if result.alternatives is not None:
        message.prompt_alt_tokens.tokens.CopyFrom(_dense_tensor(result.alternatives.tokens))
        message.prompt_alt_tokens.logprobs.CopyFrom(_dense_tensor(result.alternatives.logprobs))
    return message.SerializeToString()


def add_prompt(sequences: bytes, prompt: bytes) -> bytes:
    """Merge two SampleResponses: the sequences of the first, and the prompt's logprobs and cache hits of the second."""
    merged, prompt_part = pb.SampleResponse.FromString(sequences), pb.SampleResponse.FromString(prompt)
    prompt_part.ClearField("sequences")
    merged.ClearField("prompt_cache_hit_tokens")
    merged.MergeFrom(prompt_part)
    return merged.SerializeToString()


def encode_forward_backward(
    logprobs: list[npt.NDArray[np.float32]],
    metrics: dict[str, float],
    values: list[npt.NDArray[np.float32]] | None = None,
) -> bytes:
    """A ForwardBackwardOutput. `logprobs` holds [N] or [N, K] per datum; neighbours of equal width K share a record.
    `values` holds [N] per datum."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    start = 0
    while start < len(logprobs):
        trailing = logprobs[start].shape[1:]
        end = start
        while end < len(logprobs) and logprobs[end].shape[1:] == trailing:
            end += 1
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=end - start)
        _batch(record.fields["logprobs"], logprobs[start:end], trailing)
        if values is not None:
            _batch(record.fields["values"], values[start:end], ())
        start = end
    return message.SerializeToString()


def _batch(field: pb.BatchedTensor, arrays: list[npt.NDArray[np.float32]], trailing: tuple[int, ...]) -> None:
    field.data = b"".join(np.ascontiguousarray(array, np.float32).tobytes() for array in arrays)
    field.offsets = np.cumsum([0, *(array.size * 4 for array in arrays)], dtype=np.int64).tobytes()
    field.dtype = pb.FLOAT32
    field.trailing_shape.extend(trailing)


def encode_json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _topk_json(topk: pb.TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    ids = np.frombuffer(topk.token_ids, np.int32).reshape(topk.length, topk.k).tolist()
    logprobs = np.frombuffer(topk.logprobs, np.float32).reshape(topk.length, topk.k).tolist()
    rows: list[list[tuple[int, float]] | None] = []
    for row_ids, row_logprobs in zip(ids, logprobs, strict=True):
        cells = [
            (token, value) for token, value in zip(row_ids, row_logprobs, strict=True) if value != TOPK_EMPTY_LOGPROB
        ]
        rows.append(cells or None)
    return rows


def _sample_to_json(body: bytes) -> dict[str, Any]:
    message = pb.SampleResponse.FromString(body)
    sequences = []
    for sequence in message.sequences:
        encoded: dict[str, Any] = {
            "stop_reason": "stop" if sequence.stop_reason == pb.STOP else "length",
            "tokens": np.frombuffer(sequence.tokens, np.int32).tolist(),
            "logprobs": np.frombuffer(sequence.logprobs, np.float32).tolist(),
        }
        if sequence.HasField("topk_sampled_logprobs"):
            encoded["topk_logprobs"] = _topk_json(sequence.topk_sampled_logprobs)
        if sequence.weight_versions:
            encoded["weight_versions"] = [
                {"version": span.version, "start": span.start, "end": span.end} for span in sequence.weight_versions
            ]
        sequences.append(encoded)
    result: dict[str, Any] = {"type": "sample", "sequences": sequences}
    if message.HasField("prompt_logprobs"):
        values = np.frombuffer(message.prompt_logprobs, np.float32).tolist()
        result["prompt_logprobs"] = [None if math.isnan(value) else value for value in values]
    if message.HasField("topk_prompt_logprobs"):
        result["topk_prompt_logprobs"] = _topk_json(message.topk_prompt_logprobs)
    if message.HasField("target_prompt_logprobs"):
        result["target_prompt_logprobs"] = tensors.proto_to_json(message.target_prompt_logprobs)
    if message.HasField("prompt_alt_tokens"):
        result["prompt_alt_tokens"] = {
            "tokens": tensors.proto_to_json(message.prompt_alt_tokens.tokens),
            "logprobs": tensors.proto_to_json(message.prompt_alt_tokens.logprobs),
        }
    return result


def _forward_backward_to_json(body: bytes) -> dict[str, Any]:
    message = pb.ForwardBackwardOutput.FromString(body)
    outputs = []
    for record in message.loss_fn_outputs:
        outputs += [
            {name: _datum_json(field, index) for name, field in record.fields.items()}
            for index in range(record.num_datums)
        ]
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": dict(message.metrics),
    }


def _datum_json(field: pb.BatchedTensor, index: int) -> dict[str, Any]:
    start, stop = np.frombuffer(field.offsets, np.int64)[index : index + 2].tolist()
    array = np.frombuffer(field.data[start:stop], np.float32)
    shape = array.reshape([-1, *field.trailing_shape]).shape
    return {"data": array.tolist(), "dtype": "float32", "shape": list(shape)}


def to_json(body: bytes, result_format: str) -> bytes:
    """A protobuf result as JSON, for SDKs before 0.25. A JSON result is returned unchanged."""
    if result_format == "proto:sample":
        return encode_json(_sample_to_json(body))
    if result_format == "proto:forward_backward":
        return encode_json(_forward_backward_to_json(body))
    return body
