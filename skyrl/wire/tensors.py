"""Tensors of the wire, JSON and protobuf, as dense NumPy arrays. CSR is densified with zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from skyrl.wire import tinker_pb2 as pb
from skyrl.wire.errors import RequestError

Array = npt.NDArray[np.int64] | npt.NDArray[np.float32]
_PROTO_DTYPES: dict[int, Any] = {pb.FLOAT32: np.float32, pb.INT64: np.int64, pb.INT32: np.int32}
MAX_DENSE_ELEMENTS = 2**28
"""A CSR tensor names its dense size in a few bytes; larger ones are refused before memory is."""


class JsonTensor(msgspec.Struct):
    """`data` in row-major order; with `sparse_*` it holds the CSR values."""

    data: list[int | float]
    dtype: Literal["int64", "float32"] = "float32"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


def _shape(shape: list[int], count: int | None, field: str) -> list[int]:
    """The given shape, or [count] where none was given."""
    if not shape:
        return [count or 0]
    if any(side < 0 for side in shape) or math.prod(shape) > MAX_DENSE_ELEMENTS:
        raise RequestError(f"shape {shape} is out of bounds", field=field)
    if count is not None and math.prod(shape) != count:
        raise RequestError(f"shape {shape} does not fit {count} elements", field=field)
    return shape


def _densify(
    values: Array, crow: npt.NDArray[np.int64], col: npt.NDArray[np.int64], shape: list[int], field: str
) -> Array:
    if len(shape) != 2:
        raise RequestError(f"a CSR tensor needs a 2-D shape, got {shape}", field=field)
    rows, columns = _shape(shape, None, field)
    bad = (
        len(crow) != rows + 1
        or len(col) != len(values)
        or crow[0] != 0
        or crow[-1] != len(values)
        or bool((np.diff(crow) < 0).any())
        or bool(((col < 0) | (col >= columns)).any())
    )
    if bad:
        raise RequestError("crow_indices and col_indices do not describe a CSR tensor of this shape", field=field)
    dense: npt.NDArray[Any] = np.zeros((rows, columns), dtype=values.dtype)
    dense[np.repeat(np.arange(rows), np.diff(crow)), col] = values
    return dense


def _widen(array: npt.NDArray[Any]) -> Array:
    return array.astype(np.int64) if array.dtype == np.int32 else array


def from_proto(tensor: pb.Tensor, field: str) -> Array:
    """int64 or float32, the tensor's shape. Raises RequestError naming `field`."""
    dtype = _PROTO_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise RequestError("dtype must be float32 or int64", field=field)
    itemsize = np.dtype(dtype).itemsize
    shape = list(tensor.shape)
    raw = tensor.sparse_csr.values if tensor.WhichOneof("layout") == "sparse_csr" else tensor.dense
    if len(raw) % itemsize:
        raise RequestError(f"{len(raw)} bytes are no whole number of {np.dtype(dtype).name} values", field=field)
    values = _widen(np.frombuffer(raw, dtype=dtype))
    if tensor.WhichOneof("layout") == "sparse_csr":
        csr = tensor.sparse_csr
        if len(csr.crow_indices) % 8 or len(csr.col_indices) % 8 or not csr.crow_indices:
            raise RequestError("CSR indices must be int64", field=field)
        return _densify(
            values,
            np.frombuffer(csr.crow_indices, np.int64),
            np.frombuffer(csr.col_indices, np.int64),
            shape,
            field,
        )
    return values.reshape(_shape(shape, len(values), field))


def from_json(tensor: JsonTensor, field: str) -> Array:
    """int64 or float32, the tensor's shape. Raises RequestError naming `field`."""
    values = _numbers(tensor.data, np.int64 if tensor.dtype == "int64" else np.float32, "data", field)
    shape = tensor.shape or []
    if tensor.sparse_crow_indices is None and tensor.sparse_col_indices is None:
        return values.reshape(_shape(shape, len(values), field))
    if not tensor.sparse_crow_indices or tensor.sparse_col_indices is None:
        raise RequestError(
            "a CSR tensor needs both sparse_crow_indices, which are never empty, and sparse_col_indices",
            field=field,
        )
    crow = _numbers(tensor.sparse_crow_indices, np.int64, "sparse_crow_indices", field)
    col = _numbers(tensor.sparse_col_indices, np.int64, "sparse_col_indices", field)
    return _densify(values, crow, col, shape, field)


def _numbers(data: Sequence[int | float], dtype: Any, name: str, field: str) -> npt.NDArray[Any]:
    """All of `data`, none of it changed by the conversion but for float32's rounding."""
    given = np.asarray(data)
    try:
        if dtype is np.int64 and (given.dtype.kind == "u" or (given.dtype.kind == "f" and (given % 1).any())):
            raise ValueError("64 bit signed integers only")
        with np.errstate(over="raise"):
            return given.astype(dtype)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise RequestError(f"{name} does not fit {np.dtype(dtype).name}: {error}", field=field) from error
