"""Quantized weights of a release's files, read by rows: as numbers, or as the stored tensors that make these.

Knows `quantization`, and slices of safetensors. Knows nothing of which weights a model needs, or of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from skyrl.training.backends.torch_lora.quantization import Format
from skyrl.training.backends.torch_lora.quantized_weights import Piece, QuantizedWeight

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
