"""Frozen weights that stay in the bits of a quantized release, on the device.

A quantized weight is a tensor whose numbers are computed anew for each operation that needs them, and freed after it.
Autograd keeps it for the backward as it is, so the backward computes its numbers once more and nothing computed lives
between the two ("QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314). Its values are those that loading
without it would give, bit by bit.
Knows `quantization`. Knows nothing of files, models' layers or adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from skyrl.training.backends.torch_lora.quantization import Format

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
