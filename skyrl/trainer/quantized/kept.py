"""Quantized weights over ranks: their stored tensors are parameters of the modules, which FSDP2 divides and gathers as
all others. So packed bytes travel, and each operation computes the numbers that it needs from what was gathered.

A module that keeps a weight has the parameters `<weight>_numbers<piece>` and `<weight>_factors<piece>` in its place,
and the weight itself as a plain attribute (`attach`). Knows `quantized_weights`. Knows nothing of files' names, of
models' layers, or of how FSDP2 divides rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skyrl.trainer.quantized.format import Format
from skyrl.trainer.quantized.weights import PieceOfModule, QuantizedWeight, StoredForm, StoredTensor, held_dtype

_KEPT = "kept_weights"
"""The attribute of a module that lists its `KeptWeight`s."""
Fill = Callable[[Tensor, StoredTensor], None]
"""Copies what this rank holds of a stored tensor into a parameter."""


@dataclass(frozen=True)
class _KeptPiece:
    """Of a weight of `shape`. Its stored tensors are the parameters of these names; `numel`: of the numbers'."""

    format: Format
    shape: tuple[int, ...]
    numbers: str
    factors: str
    numel: int


@dataclass(frozen=True)
class KeptWeight:
    """A quantized weight of `module`, its attribute `leaf`. It was a parameter of `dtype`. `name`: in the files of a
    release that is not quantized."""

    module: nn.Module
    leaf: str
    name: str
    dtype: torch.dtype
    pieces: tuple[_KeptPiece, ...]
    exchanged: bool

    @property
    def leaves(self) -> list[str]:
        """The names of the stored tensors in the module."""
        return [leaf for piece in self.pieces for leaf in (piece.numbers, piece.factors)]

    def numel(self, part: Callable[[Tensor], Tensor]) -> int:
        """How many of the weight's elements this rank holds. `part`: what it has of a parameter."""
        return sum(
            math.prod(piece.shape) * part(getattr(self.module, piece.numbers)).numel() // piece.numel
            for piece in self.pieces
        )

    def fill(self, form: StoredForm, copy: Fill) -> None:
        """Read this rank's part of the stored tensors, and make the weight usable."""
        stored = [tensor for piece in form.pieces for tensor in (piece.numbers, piece.factors)]
        for leaf, tensor in zip(self.leaves, stored, strict=True):
            copy(getattr(self.module, leaf), tensor)
        self.attach()

    def attach(self) -> None:
        """Make the attribute, of as many experts as the parameters have now. Not a parameter: FSDP2 has these
        already."""
        pieces: list[PieceOfModule] = []
        for piece in self.pieces:
            shape = (len(getattr(self.module, piece.numbers)), *piece.shape[1:])
            pieces.append(PieceOfModule(piece.format, self.module, piece.numbers, piece.factors, shape))
        weight = QuantizedWeight(pieces, self.dtype, exchanged=self.exchanged)
        vars(self.module)[self.leaf] = nn.Parameter(weight, requires_grad=False)


def keep(module: nn.Module, leaf: str, name: str, form: StoredForm) -> None:
    """Put parameters without memory for the stored tensors in the place of the module's parameter `leaf`. `name`: as
    in `KeptWeight`."""
    parameter: Any = module._parameters.pop(leaf)
    pieces: list[_KeptPiece] = []
    for place, piece in enumerate(form.pieces):
        shape = piece.numbers.get_shape()
        made = _KeptPiece(
            piece.format, piece.shape, f"{leaf}_numbers{place}", f"{leaf}_factors{place}", math.prod(shape)
        )
        pieces.append(made)
        for stored, each in ((piece.numbers, made.numbers), (piece.factors, made.factors)):
            empty = torch.empty(stored.get_shape(), dtype=held_dtype(stored), device="meta")
            module.register_parameter(each, nn.Parameter(empty, requires_grad=False))
    weight = KeptWeight(module, leaf, name, parameter.dtype, tuple(pieces), form.exchanged)
    vars(module).setdefault(_KEPT, []).append(weight)


def kept_in(module: nn.Module) -> Iterator[KeptWeight]:
    """Of the module and those inside."""
    for each in module.modules():
        yield from vars(each).get(_KEPT, ())


def attach(module: nn.Module) -> None:
    """Make the weights of the module and those inside anew, because their parameters have become others."""
    for weight in kept_in(module):
        weight.attach()


def stored_leaves(model: nn.Module) -> set[str]:
    """The names of all parameters of `model` that are stored tensors of kept weights."""
    return {
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        for weight in vars(module).get(_KEPT, ())
        for leaf in weight.leaves
    }


def weights_of(module: nn.Module) -> Iterator[Tensor]:
    """The module's parameters, and kept weights in the place of their stored tensors."""
    stored = stored_leaves(module)
    yield from (parameter for name, parameter in module.named_parameters() if name not in stored)
    yield from (vars(weight.module)[weight.leaf] for weight in kept_in(module))
