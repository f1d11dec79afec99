"""Tensors in JSON and protobuf bodies: read in the layout in which they came (dense or CSR), or as dense arrays.

Knows layouts and dtypes. Does not know the meaning of a tensor; an unlisted cell of a CSR tensor becomes 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.errors import RequestError

Array = npt.NDArray[np.int64] | npt.NDArray[np.float32]
_PROTO_DTYPES: dict[int, Any] = {pb.FLOAT32: np.float32, pb.INT64: np.int64, pb.INT32: np.int32}
MAX_DENSE_ELEMENTS = 2**28
"""Elements of one tensor. A few bytes can declare a huge CSR tensor, so larger tensors are refused before memory is
allocated for them."""
MAX_FILLED_ELEMENTS = 2**27
"""Cells of all CSR tensors of one body, listed or not. Made dense, they take at most 1 GiB."""


class JsonTensor(msgspec.Struct):
    """`data` holds all elements in row-major order, or with `sparse_*` the values of a CSR tensor."""

    data: list[int | float]
    dtype: Literal["int64", "float32"] = "float32"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


@dataclass(frozen=True, eq=False)
class WireTensor:
    """A tensor in the layout in which it came. `values` (1-D, int64 or float32) holds all elements in row-major order,
    or, with `crow` and `col` (int64), the listed elements of a two-dimensional CSR tensor."""

    values: Array
    shape: tuple[int, ...]
    crow: npt.NDArray[np.int64] | None = None
    col: npt.NDArray[np.int64] | None = None

    def row_of_value(self) -> npt.NDArray[np.int64]:
        """The row of each value. The tensor must have two dimensions."""
        rows, columns = self.shape
        if self.crow is None:
            return np.repeat(np.arange(rows), columns)
        return np.repeat(np.arange(rows), np.diff(self.crow))

    def dense(self, field: str) -> Array:
        """All cells as an array; unlisted cells are 0. Raises RequestError naming `field` if the array is too large."""
        _bounded(self.shape, field)
        if self.crow is None or self.col is None:
            return self.values.reshape(self.shape)
        filled: npt.NDArray[Any] = np.zeros(self.shape, dtype=self.values.dtype)
        filled[self.row_of_value(), self.col] = self.values
        return filled

    def with_values(self, values: Array) -> WireTensor:
        """A tensor of the same shape and layout with other values."""
        return replace(self, values=values)


def _bounded(shape: Sequence[int], field: str) -> None:
    if any(side < 0 for side in shape) or math.prod(shape) > MAX_DENSE_ELEMENTS:
        raise RequestError(f"shape {list(shape)} is out of bounds", field=field)


def _dense_tensor(values: Array, shape: Sequence[int], field: str) -> WireTensor:
    """A tensor without a shape is a vector."""
    if not shape:
        return WireTensor(values, (len(values),))
    _bounded(shape, field)
    if math.prod(shape) != len(values):
        raise RequestError(f"shape {list(shape)} does not fit {len(values)} elements", field=field)
    return WireTensor(values, tuple(shape))


def _csr_tensor(
    values: Array, crow: npt.NDArray[np.int64], col: npt.NDArray[np.int64], shape: Sequence[int], field: str
) -> WireTensor:
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
    return WireTensor(values, (rows, columns), crow, col)


def _widen(array: npt.NDArray[Any]) -> Array:
    return array.astype(np.int64) if array.dtype == np.int32 else array


def to_dense(tensors: dict[str, WireTensor], filled: int, field: str) -> tuple[dict[str, Array], int]:
    """The tensors as dense arrays, by name, and the number of cells of all CSR tensors of the body so far. `filled` is
    that number before this call.

    Raises RequestError naming `field` and the tensor."""
    arrays: dict[str, Array] = {}
    for name, tensor in tensors.items():
        if tensor.crow is not None:
            filled += math.prod(tensor.shape)
        if filled > MAX_FILLED_ELEMENTS:
            raise RequestError(
                f"the sparse tensors of one request may have {MAX_FILLED_ELEMENTS} cells together, listed or not",
                field=f"{field}.{name}",
            )
        arrays[name] = tensor.dense(f"{field}.{name}")
    return arrays, filled


def tensor_from_proto(tensor: pb.Tensor, field: str) -> WireTensor:
    """The tensor in its own layout, int64 or float32. Raises RequestError naming `field`."""
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
        return _csr_tensor(values, crow, col, shape, field)
    return _dense_tensor(values, shape, field)


def tensor_from_json(tensor: JsonTensor, field: str) -> WireTensor:
    """The tensor in its own layout, int64 or float32. Raises RequestError naming `field`."""
    values = _to_array(tensor.data, np.int64 if tensor.dtype == "int64" else np.float32, "data", field)
    shape = tensor.shape or []
    if tensor.sparse_crow_indices is None and tensor.sparse_col_indices is None:
        return _dense_tensor(values, shape, field)
    if not tensor.sparse_crow_indices or tensor.sparse_col_indices is None:
        raise RequestError(
            "a CSR tensor needs both sparse_crow_indices, which are never empty, and sparse_col_indices",
            field=field,
        )
    crow = _to_array(tensor.sparse_crow_indices, np.int64, "sparse_crow_indices", field)
    col = _to_array(tensor.sparse_col_indices, np.int64, "sparse_col_indices", field)
    return _csr_tensor(values, crow, col, shape, field)


def to_proto(tensor: WireTensor) -> pb.Tensor:
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


def _to_array(data: Sequence[int | float], dtype: Any, name: str, field: str) -> npt.NDArray[Any]:
    """`data` as an array of `dtype`. Raises RequestError unless every number keeps its value, but for the rounding to
    float32."""
    given = np.asarray(data)
    try:
        # As floats, larger integers may have been rounded.
        if dtype is np.int64 and given.dtype.kind in "uf" and ((given % 1 != 0) | (np.abs(given) >= 2**53)).any():
            raise ValueError("64 bit signed integers only")
        with np.errstate(over="raise"):
            return given.astype(dtype)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise RequestError(f"{name} does not fit {np.dtype(dtype).name}: {error}", field=field) from error
