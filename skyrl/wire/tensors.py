"""Tensors of the wire, JSON and protobuf: as dense NumPy arrays (CSR filled with zeros), or as they were stored.

Knows layouts and dtypes. Deliberately does not know what a tensor means, so not what an unlisted cell stands for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from skyrl.wire import tinker_pb2 as pb
from skyrl.wire.errors import RequestError

Array = npt.NDArray[np.int64] | npt.NDArray[np.float32]
_PROTO_DTYPES: dict[int, Any] = {pb.FLOAT32: np.float32, pb.INT64: np.int64, pb.INT32: np.int32}
MAX_DENSE_ELEMENTS = 2**28
"""A CSR tensor names its dense size in a few bytes; larger ones are refused before memory is taken for them."""
MAX_FILLED_ELEMENTS = 2**27
"""Cells of all CSR tensors of one body, whose memory is taken: 1 GiB at most."""


class JsonTensor(msgspec.Struct):
    """`data` in row-major order; with `sparse_*` it holds the CSR values."""

    data: list[int | float]
    dtype: Literal["int64", "float32"] = "float32"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor as it travels: `values` (1-D, int64 or float32) are all of its elements, row-major, or with `crow` and
    `col` (int64) the listed ones of a two-dimensional CSR tensor."""

    values: Array
    shape: tuple[int, ...]
    crow: npt.NDArray[np.int64] | None = None
    col: npt.NDArray[np.int64] | None = None

    def row_of_value(self) -> npt.NDArray[np.int64]:
        """The row of each value; for tensors of two dimensions."""
        rows, columns = self.shape
        if self.crow is None:
            return np.repeat(np.arange(rows), columns)
        return np.repeat(np.arange(rows), np.diff(self.crow))

    def dense(self, field: str) -> Array:
        """Unlisted cells are 0. Raises RequestError naming `field` where that would take too much memory."""
        _bounded(self.shape, field)
        if self.crow is None or self.col is None:
            return self.values.reshape(self.shape)
        filled: npt.NDArray[Any] = np.zeros(self.shape, dtype=self.values.dtype)
        filled[self.row_of_value(), self.col] = self.values
        return filled

    def with_values(self, values: Array) -> Stored:
        """Another tensor of the same shape and layout."""
        return replace(self, values=values)


def _bounded(shape: Sequence[int], field: str) -> None:
    if any(side < 0 for side in shape) or math.prod(shape) > MAX_DENSE_ELEMENTS:
        raise RequestError(f"shape {list(shape)} is out of bounds", field=field)


def _stored_dense(values: Array, shape: Sequence[int], field: str) -> Stored:
    """Without a shape it is a vector."""
    if not shape:
        return Stored(values, (len(values),))
    _bounded(shape, field)
    if math.prod(shape) != len(values):
        raise RequestError(f"shape {list(shape)} does not fit {len(values)} elements", field=field)
    return Stored(values, tuple(shape))


def _stored_csr(
    values: Array, crow: npt.NDArray[np.int64], col: npt.NDArray[np.int64], shape: Sequence[int], field: str
) -> Stored:
    if len(shape) != 2:
        raise RequestError(f"a CSR tensor needs a 2-D shape, got {list(shape)}", field=field)
    rows, columns = shape
    if not (0 <= rows <= MAX_DENSE_ELEMENTS and 0 <= columns <= MAX_DENSE_ELEMENTS):
        raise RequestError(f"shape {list(shape)} is out of bounds", field=field)
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
    return Stored(values, (rows, columns), crow, col)


def _widen(array: npt.NDArray[Any]) -> Array:
    return array.astype(np.int64) if array.dtype == np.int32 else array


def dense(stored: dict[str, Stored], filled: int, field: str) -> tuple[dict[str, Array], int]:
    """Tensors by name, dense, and how many cells are filled in now; `filled` were before, for the same body.

    Raises RequestError naming `field` and the tensor."""
    arrays: dict[str, Array] = {}
    for name, tensor in stored.items():
        if tensor.crow is not None:
            filled += math.prod(tensor.shape)
        if filled > MAX_FILLED_ELEMENTS:
            raise RequestError(
                f"the sparse tensors of one request may have {MAX_FILLED_ELEMENTS} cells together, listed or not",
                field=f"{field}.{name}",
            )
        arrays[name] = tensor.dense(f"{field}.{name}")
    return arrays, filled


def stored_from_proto(tensor: pb.Tensor, field: str) -> Stored:
    """The tensor in the layout it came in, int64 or float32. Raises RequestError naming `field`."""
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
        crow, col = np.frombuffer(csr.crow_indices, np.int64), np.frombuffer(csr.col_indices, np.int64)
        return _stored_csr(values, crow, col, shape, field)
    return _stored_dense(values, shape, field)


def stored_from_json(tensor: JsonTensor, field: str) -> Stored:
    """The tensor in the layout it came in. Raises RequestError naming `field`."""
    values = _numbers(tensor.data, np.int64 if tensor.dtype == "int64" else np.float32, "data", field)
    shape = tensor.shape or []
    if tensor.sparse_crow_indices is None and tensor.sparse_col_indices is None:
        return _stored_dense(values, shape, field)
    if not tensor.sparse_crow_indices or tensor.sparse_col_indices is None:
        raise RequestError(
            "a CSR tensor needs both sparse_crow_indices, which are never empty, and sparse_col_indices",
            field=field,
        )
    crow = _numbers(tensor.sparse_crow_indices, np.int64, "sparse_crow_indices", field)
    col = _numbers(tensor.sparse_col_indices, np.int64, "sparse_col_indices", field)
    return _stored_csr(values, crow, col, shape, field)


def to_proto(tensor: Stored) -> pb.Tensor:
    message = pb.Tensor(dtype=pb.INT64 if tensor.values.dtype == np.int64 else pb.FLOAT32, shape=tensor.shape)
    if tensor.crow is None or tensor.col is None:
        message.dense = tensor.values.tobytes()
    else:
        message.sparse_csr.values = tensor.values.tobytes()
        message.sparse_csr.crow_indices = tensor.crow.tobytes()
        message.sparse_csr.col_indices = tensor.col.tobytes()
    return message


def proto_to_json(message: pb.Tensor) -> dict[str, Any]:
    """The JSON form of a tensor that `to_proto` made."""
    dtype = _PROTO_DTYPES[message.dtype]
    sparse = message.WhichOneof("layout") == "sparse_csr"
    raw = message.sparse_csr.values if sparse else message.dense
    encoded: dict[str, Any] = {
        "data": np.frombuffer(raw, dtype).tolist(),
        "dtype": np.dtype(dtype).name,
        "shape": list(message.shape),
    }
    if sparse:
        encoded["sparse_crow_indices"] = np.frombuffer(message.sparse_csr.crow_indices, np.int64).tolist()
        encoded["sparse_col_indices"] = np.frombuffer(message.sparse_csr.col_indices, np.int64).tolist()
    return encoded


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
