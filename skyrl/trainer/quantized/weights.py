"""Weights that stay quantized in memory: each operation computes the numbers that it needs (as in "QLoRA: Efficient
Finetuning of Quantized LLMs", arXiv 2305.14314). Its values are those that loading without it would give, bit by bit.

A quantized weight is made of slices of stored tensors, which files or ranks hold. Knows formats. Knows nothing of
models' layers or adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from skyrl.trainer.quantized.format import Format

_aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """Stored numbers and factors of a weight of `shape`: [rows, columns], or [experts, rows, columns]."""

    format: Format
    numbers: Tensor
    factors: Tensor
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.factors.nbytes

    def whole(self, dtype: torch.dtype) -> Tensor:
        return self.format.compute(self.numbers, self.factors, self.shape, range(self.shape[0]), dtype)

    def to(self, device: torch.device) -> Piece:
        return Piece(self.format, self.numbers.to(device), self.factors.to(device), self.shape)


@dataclass(frozen=True)
class PieceOfModule:
    """As `Piece`; numbers and factors are parameters of `module`, named so. They are looked up whenever the piece is
    used: FSDP2 exchanges the parameters of a module when it gathers them, and when it frees what was gathered."""

    format: Format
    module: nn.Module
    numbers_name: str
    factors_name: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> Tensor:
        return getattr(self.module, self.numbers_name)

    @property
    def factors(self) -> Tensor:
        return getattr(self.module, self.factors_name)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.factors.nbytes

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Raises RuntimeError while the parameters are divided over ranks."""
        if isinstance(self.numbers, DTensor):
            raise RuntimeError(f"{self.numbers_name} is used where its layer is not gathered")
        return self._now().whole(dtype)

    def to(self, device: torch.device) -> Piece:
        return self._now().to(device)

    def _now(self) -> Piece:
        return Piece(self.format, self.numbers.detach(), self.factors.detach(), self.shape)


AnyPiece = Piece | PieceOfModule


class QuantizedWeight(Tensor):
    """A tensor [..., rows, columns] of `dtype` whose numbers are in `pieces`, the rows of one after those of another.
    With `exchanged`, rows and columns have changed places.

    Every operation on it gets its numbers as an ordinary tensor, except those that only rename, move or join packed
    weights. Raises RuntimeError for an operation that would change it."""

    @staticmethod
    def __new__(
        cls: type[QuantizedWeight], pieces: Sequence[AnyPiece], dtype: torch.dtype, *, exchanged: bool = False
    ) -> QuantizedWeight:
        """A tensor without memory: its shape, strides, dtype and device are what operations see."""
        first = pieces[0].shape
        rows, columns = sum(piece.shape[-2] for piece in pieces), first[-1]
        shape, strides = [*first[:-2], rows, columns], [rows * columns] * (len(first) - 2) + [columns, 1]
        if exchanged:
            shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, strides=strides, dtype=dtype, device=pieces[0].numbers.device
        )

    def __init__(self, pieces: Sequence[AnyPiece], dtype: torch.dtype, *, exchanged: bool = False) -> None:
        self.pieces = tuple(pieces)
        self.exchanged = exchanged

    @property
    def held_bytes(self) -> int:
        """The memory that it takes, where `nbytes` is what its numbers would take."""
        return sum(piece.nbytes for piece in self.pieces)

    def whole(self) -> Tensor:
        """Its numbers."""
        made = [piece.whole(self.dtype) for piece in self.pieces]
        joined = made[0] if len(made) == 1 else torch.cat(made, dim=-2)
        return joined.transpose(-2, -1) if self.exchanged else joined

    def __repr__(self, *, tensor_contents: object = None) -> str:
        kinds = {type(piece.format).__name__ for piece in self.pieces}
        return f"QuantizedWeight({list(self.shape)}, {self.dtype}, {', '.join(sorted(kinds))})"

    def _with(self, pieces: Sequence[AnyPiece] | None = None, *, exchanged: bool | None = None) -> QuantizedWeight:
        return QuantizedWeight(
            self.pieces if pieces is None else pieces,
            self.dtype,
            exchanged=self.exchanged if exchanged is None else exchanged,
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (own := _OWN.get(func)) is not None and (made := own(*args, **kwargs)) is not None:
            return made
        if func._schema.is_mutable and isinstance(args[0], QuantizedWeight):
            raise RuntimeError(f"{func} would change a quantized weight, which is frozen")
        return func(
            *tree_map_only(QuantizedWeight, QuantizedWeight.whole, args),
            **tree_map_only(QuantizedWeight, QuantizedWeight.whole, kwargs),
        )


def _same(weight: QuantizedWeight) -> QuantizedWeight:
    return weight._with()


def _transposed(weight: QuantizedWeight, one: int = 0, other: int = 1) -> QuantizedWeight | None:
    if {one % weight.ndim, other % weight.ndim} != {weight.ndim - 2, weight.ndim - 1}:
        return None
    return weight._with(exchanged=not weight.exchanged)


def _moved(weight: QuantizedWeight, **options: Any) -> QuantizedWeight | None:
    if options.get("dtype") not in (None, weight.dtype):
        return None
    return weight._with([piece.to(options.get("device") or weight.device) for piece in weight.pieces])


def _stacked(weights: Sequence[Any], dim: int = 0) -> QuantizedWeight | None:
    """Matrices as one weight [weights, rows, columns]; None unless all are packed in the same way."""
    if dim != 0 or not _fit(weights) or weights[0].ndim != 2:
        return None
    pieces = [
        Piece(
            of_all[0].format,
            torch.stack([piece.numbers for piece in of_all]),
            torch.stack([piece.factors for piece in of_all]),
            (len(of_all), *of_all[0].shape),
        )
        for of_all in zip(*(weight.pieces for weight in weights), strict=True)
    ]
    return weights[0]._with(pieces)


def _joined(weights: Sequence[Any], dim: int = 0) -> QuantizedWeight | None:
    """The rows of one weight after those of another; None unless all are packed, and rows are what is joined."""
    packed = all(isinstance(weight, QuantizedWeight) and not weight.exchanged for weight in weights)
    if not packed or dim % weights[0].ndim != weights[0].ndim - 2:
        return None
    return weights[0]._with([piece for weight in weights for piece in weight.pieces])


def _fit(weights: Sequence[Any]) -> bool:
    def form(weight: Any) -> object:
        return [(piece.format, piece.shape, piece.numbers.shape, piece.factors.dtype) for piece in weight.pieces]

    packed = all(isinstance(weight, QuantizedWeight) and not weight.exchanged for weight in weights)
    return packed and all(form(weight) == form(weights[0]) for weight in weights[1:])


_OWN: dict[Any, Callable[..., QuantizedWeight | None]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.t.default: _transposed,
    _aten.transpose.int: _transposed,
    _aten._to_copy.default: _moved,
    _aten.stack.default: _stacked,
    _aten.cat.default: _joined,
}
"""Operations that make a packed weight of quantized weights. Each returns None for arguments that it does not know."""


def held_bytes(parameters: Any) -> int:
    """The memory that parameters take, packed or not."""
    return sum(each.held_bytes if isinstance(each, QuantizedWeight) else each.nbytes for each in parameters)


_BYTES = ("F8_E4M3", "U8")
_DTYPES = {
    **dict.fromkeys(_BYTES, torch.uint8),
    "I32": torch.int32,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class StoredTensor(Protocol):
    """A tensor of the files, with the methods of safetensors' slices."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, rows: slice) -> Tensor: ...


@dataclass(frozen=True)
class _Stack:
    """Tensors of the files as one, [tensors, ...]. Its rows are whole tensors."""

    parts: Sequence[StoredTensor]

    def get_shape(self) -> list[int]:
        return [len(self.parts), *self.parts[0].get_shape()]

    def get_dtype(self) -> str:
        return self.parts[0].get_dtype()

    def __getitem__(self, rows: slice) -> Tensor:
        return torch.stack([part[:] for part in self.parts[rows]])


@dataclass(frozen=True)
class StoredPiece:
    """The stored tensors of a weight of `shape`, from which `Piece`s of it are read. The first dimension of `numbers`
    is that of the weight."""

    format: Format
    numbers: StoredTensor
    factors: StoredTensor
    shape: tuple[int, ...]

    def looks_like(self, other: StoredPiece) -> bool:
        """Whether both can be in one stack."""
        return self._form() == other._form()

    def _form(self) -> object:
        tensors = [(each.get_shape(), each.get_dtype()) for each in (self.numbers, self.factors)]
        return self.format, self.shape, tensors


@dataclass(frozen=True)
class StoredForm:
    """How the files hold a weight that is quantized: in pieces whose rows follow each other, or for experts, with the
    rows of each expert after each other. `exchanged`: rows and columns have changed places."""

    pieces: tuple[StoredPiece, ...]
    exchanged: bool = False


def stacked(forms: Sequence[StoredForm | None]) -> StoredPiece | None:
    """Matrices as one weight [matrices, rows, columns]; None unless all are quantized in the same way."""
    pieces = [form.pieces[0] for form in forms if form is not None and len(form.pieces) == 1 and not form.exchanged]
    if len(pieces) != len(forms) or not all(piece.looks_like(pieces[0]) for piece in pieces[1:]):
        return None
    shape = (len(pieces), *pieces[0].shape)
    numbers, factors = _Stack([piece.numbers for piece in pieces]), _Stack([piece.factors for piece in pieces])
    return StoredPiece(pieces[0].format, numbers, factors, shape)


def held_dtype(stored: StoredTensor) -> torch.dtype:
    """The dtype in which a rank holds the tensor. FP8 numbers are bytes: few operations of torch take FP8."""
    return _DTYPES[stored.get_dtype()]


def held_rows(stored: StoredTensor, rows: range) -> Tensor:
    """These rows, in `held_dtype`."""
    if not rows:
        return torch.empty(0, *stored.get_shape()[1:], dtype=held_dtype(stored))
    found = stored[rows.start : rows.stop]
    return found.view(torch.uint8) if stored.get_dtype() in _BYTES else found


@dataclass(frozen=True)
class QuantizedSlice:
    """A weight that is computed when it is read. Has the methods of safetensors' slices. `kept`: where all of it is
    read, it becomes a `QuantizedWeight`."""

    format: Format
    name: str
    parts: Sequence[Any]
    dtype: torch.dtype
    kept: bool

    @property
    def form(self) -> StoredForm:
        numbers, factors = self.parts[:2]
        return StoredForm((StoredPiece(self.format, numbers, factors, tuple(self.get_shape())),))

    def get_shape(self) -> list[int]:
        return self.format.shape(self.parts)

    def get_dtype(self) -> str:
        return "BF16" if self.dtype == torch.bfloat16 else "F32"

    def __getitem__(self, rows: Any) -> Tensor:
        """`rows`: a slice of the first dimension, or an ellipsis."""
        if self.kept and rows is ...:
            numbers, factors = (part[:] for part in self.parts[:2])
            return QuantizedWeight([Piece(self.format, numbers, factors, tuple(self.get_shape()))], self.dtype)
        chosen = slice(None) if rows is ... else rows
        return self.format.read(self.parts, range(self.get_shape()[0])[chosen], self.dtype)
