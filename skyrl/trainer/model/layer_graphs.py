"""The pieces of plain decoder layers as graphs: each of a layer's four functions, two forward and two backward.

A micro-batch runs with graphs if its rows have one segment: one adapter, or a stack. Attention, embeddings and logprobs
stay outside, because their shapes depend on the lengths of sequences. Autograd has the original matrices as leaves; the
functions compute with copies of them, which lie at fixed addresses. Knows what the functions of `layer_functions` take
and keep. Knows nothing of modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skyrl.base.config.backend import ConfigError
from skyrl.trainer.graphs.pieces import GraphedRows, Graphs, Piece, Results
from skyrl.trainer.graphs.recorder import CudaRecorder
from skyrl.trainer.graphs.row_classes import LearnedClasses
from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.lora.products import Frozen, Joined
from skyrl.trainer.model import layer_functions
from skyrl.trainer.model.layer_functions import AFTER_KEEPS, BEFORE_KEEPS, Constants, Parameters

Parts = tuple[tuple[Joined, ...], ...]


@dataclass(frozen=True)
class Numbers:
    """What a piece computes with beside tensors. of_heads, biases: which of `Parameters` are there. `parts`: updates
    without rows and ends; `stacked`: they are a stack's. `of_input`: the backward goes to what the layer, or for the
    piece after the attention, the attention gives."""

    constants: Constants
    of_heads: tuple[bool, ...]
    biases: tuple[bool, ...]
    parts: Parts
    stacked: bool
    of_input: bool = True


@dataclass(frozen=True)
class _Given:
    """Of one piece in one micro-batch. `fixed`: as `_unpacked` reads it."""

    rows: GraphedRows
    index: int
    numbers: Numbers
    fixed: Sequence[Tensor]


class GraphedLayers:
    """The layers of one micro-batch. `copies`: the matrices at fixed addresses, by the original's `id`."""

    def __init__(self, rows: GraphedRows, leaves: Sequence[Tensor]) -> None:
        self._rows = rows
        self._copies = {id(leaf): copy for leaf, copy in zip(leaves, rows.leaves, strict=True)}

    def before(
        self,
        index: int,
        constants: Constants,
        parameters: Parameters,
        hidden: Tensor,
        joined: Sequence[Joined],
        matrices: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `layer_functions.before`, with hidden as the fourth result. `index`: of the layer."""
        given = self._given(index, constants, parameters, [joined], matrices)
        return _Before.apply(hidden, *self._rows.of_rows, given, *matrices)

    def after(
        self,
        index: int,
        constants: Constants,
        parameters: Parameters,
        inputs: tuple[Tensor, Tensor],
        joined: Sequence[Sequence[Joined]],
        matrices: Sequence[Tensor],
    ) -> Tensor:
        """As `layer_functions.after`."""
        return _After.apply(*inputs, self._given(index, constants, parameters, joined, matrices), *matrices)

    def _given(
        self,
        index: int,
        constants: Constants,
        parameters: Parameters,
        joined: Sequence[Sequence[Joined]],
        matrices: Sequence[Tensor],
    ) -> _Given:
        of_heads, linears, ends = parameters.of_heads, parameters.linears, self._rows.ends
        parts = tuple(tuple(replace(each, stop=0, ends=None) for each in part) for part in joined)
        there = tuple(each is not None for each in of_heads)
        biases = tuple(each.bias is not None for each in linears)
        numbers = Numbers(constants, there, biases, parts, ends is not None)
        frozen = [parameters.norm, *of_heads, *(tensor for each in linears for tensor in each), ends]
        fixed = [each for each in frozen if each is not None]
        return _Given(self._rows, index, numbers, fixed + [self._copies[id(each)] for each in matrices])


class LayerGraphs:
    """The graphs of all decoder layers of a model, and which micro-batch they run."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self._next: tuple[int, LoraSegment] | None = None
        self._layers: GraphedLayers | None = None
        self._position_embeddings: tuple[Tensor, Tensor] | None = None

    def expect(self, rows: int, segments: Sequence[LoraSegment]) -> None:
        """The next micro-batch, before its first layer. Without segments it runs without graphs."""
        self._layers = self._position_embeddings = self.graphs.current = None
        covered = len(segments) == 1 and (segments[0].start, segments[0].stop) == (0, rows)
        self._next = (rows, segments[0]) if covered else None

    def of_micro_batch(self, cos: Tensor, sin: Tensor) -> GraphedLayers | None:
        """Its layers; None if they run without graphs. cos and sin [1, R, n]: the same tensors for each layer, else
        the layers with others run without graphs."""
        if self._next is not None:
            (rows, segment), self._next = self._next, None
            self._layers, self._position_embeddings = self._begun(rows, segment, cos, sin), (cos, sin)
        own = self._position_embeddings
        return self._layers if own is not None and own[0] is cos and own[1] is sin else None

    def make_room(self) -> bool:
        """Memory has run out: graphs give theirs back, and micro-batches as large as the last one get none again.
        Returns whether there was anything to give."""
        held = self.graphs.held_bytes
        if (last := self.graphs.current) is not None:
            self.graphs.refuse(last.size)
        self._layers = self._position_embeddings = None
        self.graphs.drop()
        return held > 0

    def _begun(self, rows: int, segment: LoraSegment, cos: Tensor, sin: Tensor) -> GraphedLayers | None:
        leaves = [leaf for pair in segment.pairs.values() for leaf in pair]
        begun = self.graphs.micro_batch(rows, leaves, segment.ends, [cos[0], sin[0]])
        return None if begun is None else GraphedLayers(begun, leaves)


MOST_ROWS = 8192
"""Operations of larger micro-batches keep a GPU busy without graphs."""
SHARE = 0.25
"""Of the memory that is free after loading, graphs hold at most so much."""


def check_graphs(device: torch.device, *, alone: bool) -> None:
    """Raises ConfigError where there can be no graphs. alone: this rank has no others."""
    if device.type != "cuda":
        raise ConfigError(f"trainer.cuda_graphs: true needs a GPU, and the trainer computes on {device.type}")
    if not alone:
        raise ConfigError("trainer.cuda_graphs: over several ranks there are no graphs: give false, or one rank")


def graphs_on(device: torch.device) -> Graphs:
    """Without any graph yet. To be called when the model is on the device."""
    most_bytes = SHARE * torch.cuda.mem_get_info(device)[0]
    return Graphs(CudaRecorder(device), LearnedClasses(most=MOST_ROWS), device, most_bytes=most_bytes)


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, cos: Tensor, sin: Tensor, given: _Given, *matrices: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        piece = Piece(("before", given.index), _before)
        query, key, value, *kept = given.rows.run(piece, given.numbers, given.fixed, (hidden, cos, sin)).of_rows
        ctx.save_for_backward(hidden, cos, sin, *kept)
        ctx.given = given
        return query, key, value, hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        given, of_input = ctx.given, ctx.needs_input_grad[0]
        piece = Piece(("before backward", given.index), _before_backward, "of before")
        numbers = replace(given.numbers, of_input=of_input)
        found = given.rows.run(piece, numbers, given.fixed, (*grads, *ctx.saved_tensors))
        return found.of_rows[0] if of_input else None, None, None, None, *found.whole


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attended: Tensor, residual: Tensor, given: _Given, *matrices: Tensor) -> Tensor:
        piece = Piece(("after", given.index), _after)
        result, *kept = given.rows.run(piece, given.numbers, given.fixed, (attended, residual)).of_rows
        ctx.save_for_backward(*([attended] if given.numbers.parts[0] else []), *kept)
        ctx.given = given
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        given, (of_input, of_residual) = ctx.given, ctx.needs_input_grad[:2]
        piece = Piece(("after backward", given.index), _after_backward, "of after")
        numbers = replace(given.numbers, of_input=of_input)
        found = given.rows.run(piece, numbers, given.fixed, (*grads, *ctx.saved_tensors))
        *of_attended, of_total = found.of_rows
        return of_attended[0] if of_input else None, of_total if of_residual else None, None, *found.whole


def _before(numbers: Any, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
    """Of hidden, cos and sin. Kept matrices are fixed tensors."""
    parameters, (joined,), matrices = _unpacked(numbers, fixed, of_rows[0])
    results, kept = layer_functions.before(numbers.constants, parameters, joined, matrices, of_rows)
    return Results([*results, *_with_rows(kept, BEFORE_KEEPS, [joined])])


def _before_backward(numbers: Any, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
    """Of four gradients, of hidden, cos and sin, and of what `_before` keeps."""
    parameters, parts, matrices = _unpacked(numbers, fixed, of_rows[0])
    rows = iter(of_rows[7:])
    first = [next(rows)]
    for there in numbers.of_heads:
        first += [next(rows), next(rows)] if there else [None, None]
    kept = [*first, *_with_matrices([*rows], parts, matrices)]
    of_input, whole = layer_functions.before_backward(
        numbers.constants, parameters, parts[0], of_rows[:4], of_rows[4:7], kept, of_input=numbers.of_input
    )
    return Results([] if of_input is None else [of_input], whole)


def _after(numbers: Any, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
    """Of the attention's result and the layer's rows."""
    parameters, parts, matrices = _unpacked(numbers, fixed, of_rows[0])
    result, kept = layer_functions.after(numbers.constants, parameters, parts, matrices, of_rows)
    return Results([result, *_with_rows(kept, AFTER_KEEPS, parts)])


def _after_backward(numbers: Any, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
    """Of the result's gradient, of the attention's result if the output projection has updates, and of what `_after`
    keeps. The function writes into gate and up, and a graph leaves its inputs as they are."""
    parameters, parts, matrices = _unpacked(numbers, fixed, of_rows[0])
    of_result, *rest = of_rows
    attended = rest.pop(0) if parts[0] else None
    total, rstd, gate, up, *low_ranks = rest
    kept = [total, rstd, gate.clone(), up.clone(), *_with_matrices(low_ranks, parts, matrices)]
    of_attended, of_total, whole = layer_functions.after_backward(
        numbers.constants, parameters, parts, of_result, attended, kept, of_input=numbers.of_input
    )
    return Results([of_total] if of_attended is None else [of_attended, of_total], whole)


def _unpacked(
    numbers: Numbers, fixed: Sequence[Tensor], like: Tensor
) -> tuple[Parameters, list[list[Joined]], list[Tensor]]:
    """Parameters, updates and matrices for rows and the dtype of `like` [R, ...]."""
    each = iter(fixed)
    norm = next(each)
    of_heads = [next(each) if there else None for there in numbers.of_heads]
    linears = [Frozen(next(each), next(each) if has_bias else None) for has_bias in numbers.biases]
    ends = next(each) if numbers.stacked else None
    parts = [[replace(joined, stop=len(like), ends=ends) for joined in part] for part in numbers.parts]
    return Parameters(norm, linears, of_heads), parts, [matrix.to(like.dtype) for matrix in each]


def _with_rows(kept: Sequence[Tensor | None], first: int, parts: Sequence[Sequence[Joined]]) -> list[Tensor]:
    """Of what a function keeps the tensors with rows: the first ones, and for each segment x lora_a^T."""
    found, place = [*kept[:first]], first
    for segment in (each for part in parts for each in part):
        found.append(kept[place])
        place += 1 + 2 * len(segment.layers)
    return [each for each in found if each is not None]


def _with_matrices(
    low_ranks: Sequence[Tensor], parts: Sequence[Sequence[Joined]], matrices: Sequence[Tensor]
) -> list[Tensor]:
    """What `products` keeps, from the part of it that has rows."""
    found: list[Tensor] = []
    place = 0
    for low_rank, segment in zip(low_ranks, (each for part in parts for each in part), strict=True):
        stop = place + 2 * len(segment.layers)
        found += [low_rank, *matrices[place:stop]]
        place = stop
    return found
