"""The pieces of a plain decoder layer (`model.layer_pieces`) as graphs, emulated on the CPU, beside the same pieces
without graphs: other rows, tenants and contents in each micro-batch, one adapter or a stack of two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from skyrl.trainer.graphs.pieces import Graphs, Piece, Results
from skyrl.trainer.graphs.row_classes import RowClasses
from skyrl.trainer.kernels.between import IN_TORCH
from skyrl.trainer.lora.products import Joined
from skyrl.trainer.model.layer_pieces import _After, _Before
from tests.graph_emulator import EmulatedGraphs
from tests.graphed_layers import plainly

HIDDEN, INNER, SIZE, RANK = 32, 48, 8, 8
LINEARS = {
    "q": (HIDDEN, 32),
    "k": (HIDDEN, 16),
    "v": (HIDDEN, 16),
    "o": (32, HIDDEN),
    "gate": (HIDDEN, INNER),
    "up": (HIDDEN, INNER),
    "down": (INNER, HIDDEN),
}
CLASSES = RowClasses((17, 40))
"""No class is a size of a matrix, so tensors with rows are told by their first size."""
Parts = tuple[tuple[Joined, ...], ...]


class Context(SimpleNamespace):
    """That of an operation of autograd: what its forward keeps."""

    needs_input_grad = (True,) * 3
    saved_tensors: Sequence[Any] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def layer_of(frozen: Sequence[Tensor]) -> Any:
    """What the pieces read of a `PlainLayer`, with these tensors."""
    norms = [SimpleNamespace(weight=each, variance_epsilon=1e-6) for each in frozen[:4]]
    weights = zip(LINEARS, frozen[4:11], strict=True)
    linears = {name: SimpleNamespace(base=SimpleNamespace(weight=weight, bias=None)) for name, weight in weights}
    return SimpleNamespace(between=IN_TORCH, head_dim=SIZE, norms=norms[:2], of_heads=norms[2:], **linears)


class Kept:
    """Where a forward finds what it saves: among its fixed tensors, its rows, or its own results."""

    def __init__(self) -> None:
        self.places: list[tuple[str, int] | None] = []

    def split(self, saved: Sequence[Any], fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
        """The saved tensors that are neither fixed nor inputs."""
        self.places = []
        new: dict[str, list[Tensor]] = {"own": [], "whole": []}
        for each in saved:
            given = [("fixed", n) for n, t in enumerate(fixed) if t is each]
            given += [("rows", n) for n, t in enumerate(of_rows) if t is each]
            if each is None or given:
                self.places.append(given[0] if given else None)
                continue
            kind = "own" if len(each) == len(of_rows[0]) else "whole"
            self.places.append((kind, len(new[kind])))
            new[kind].append(each)
        return Results(new["own"], new["whole"])

    def joined(self, **tensors: Sequence[Tensor]) -> list[Tensor | None]:
        return [None if place is None else tensors[place[0]][place[1]] for place in self.places]


class GraphedLayer:
    """A layer of Qwen3's form, whose attention is the identity of its queries."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        settings = {"hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": SIZE, "num_key_value_heads": 2}
        config: Any = AutoConfig.for_model("qwen3", num_attention_heads=4, num_hidden_layers=1, **settings)
        layer: Any = Qwen3DecoderLayer(config, 0).requires_grad_(False).to(dtype)
        attention, mlp = layer.self_attn, layer.mlp
        norms = layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm
        linears = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        self.frozen: list[Tensor] = [each.weight for each in (*norms, *linears, mlp.gate_proj, mlp.up_proj)]
        self.frozen.append(mlp.down_proj.weight)
        self.kept = {"before": Kept(), "after": Kept()}
        functions = (self._before, self._of_before, self._after, self._of_after)
        names = ("before", "of before", "after", "of after")
        self.pieces = {name: Piece(name, function) for name, function in zip(names, functions, strict=True)}

    def _forward(self, name: str, parts: Parts, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
        context, layer, own = Context(), layer_of(fixed), _with_ends(parts, fixed, len(of_rows[0]))
        if name == "before":
            hidden, cos, sin = of_rows
            *results, _ = _Before.forward(context, hidden, cos, sin, layer, own[0], *_matrices(fixed))
        else:
            attended, residual = of_rows
            results = [_After.forward(context, attended, residual, layer, own, *_matrices(fixed))]
        found = self.kept[name].split(context.saved_tensors, fixed, of_rows)
        return Results([*results, *found.of_rows], found.whole)

    def _backward(self, name: str, parts: Parts, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
        gradients, inputs = (4, 3) if name == "before" else (1, 2)
        own = _with_ends(parts, fixed, len(of_rows[0]))
        context = Context(layer=layer_of(fixed), joined=own[0] if name == "before" else own)
        count = 11 + 2 * sum(len(each.layers) for part in parts for each in part) + _stacked(parts)
        given, rest = of_rows[gradients : gradients + inputs], of_rows[gradients + inputs :]
        context.saved_tensors = self.kept[name].joined(fixed=fixed, rows=given, own=rest, whole=fixed[count:])
        function = _Before if name == "before" else _After
        found = [each for each in function.backward(context, *of_rows[:gradients]) if each is not None]
        of_inputs = 1 if name == "before" else 2
        return Results(found[:of_inputs], found[of_inputs:])

    def _before(self, numbers: Any, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
        return self._forward("before", numbers, fixed, of_rows)

    def _of_before(self, numbers: Any, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
        return self._backward("before", numbers, fixed, of_rows)

    def _after(self, numbers: Any, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
        return self._forward("after", numbers, fixed, of_rows)

    def _of_after(self, numbers: Any, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
        return self._backward("after", numbers, fixed, of_rows)

    def whole(
        self, run: Any, leaves: Sequence[Tensor], ends: Tensor | None, of_rows: Sequence[Tensor], gradient: Tensor
    ) -> list[Tensor]:
        """The result, and the gradients of hidden and of all matrices. of_rows: hidden, cos and sin."""
        hidden, cos, sin = of_rows
        parts = _parts(ends is not None)
        own = [leaves[:6], leaves[6:]], [parts[:1], parts[1:]]
        of_ends = [] if ends is None else [ends]
        before, after = ([*self.frozen, *matrices, *of_ends] for matrices in own[0])
        of_before, of_after = own[1]
        first = run(self.pieces["before"], of_before, before, (hidden, cos, sin))
        query, key, value, *kept = first.of_rows
        attended = query.flatten(1)
        second = run(self.pieces["after"], of_after, after, (attended, hidden))
        result, *kept_after = second.of_rows
        given = (gradient, attended, hidden, *kept_after)
        of_after_all = run(self.pieces["of after"], of_after, [*after, *second.whole], given)
        of_attended, of_residual = of_after_all.of_rows
        given = (of_attended.view_as(query), key, value, of_residual, hidden, cos, sin, *kept)
        of_before_all = run(self.pieces["of before"], of_before, [*before, *first.whole], given)
        found = result, *of_before_all.of_rows, *of_before_all.whole, *of_after_all.whole
        return [each.clone() for each in found]


def _parts(stacked: bool) -> Parts:
    """Of q, k and v; of o; of gate and up; of down. Without rows and ends, so they are the same for all rows. A stack's
    may lack rows."""
    scale = 1.0 if stacked else 0.5
    return tuple(
        (Joined(0, 0, tuple(range(count)), (scale,) * count, (RANK,) * count, None, stacked),) for count in (3, 1, 2, 1)
    )


def _stacked(parts: Parts) -> bool:
    return parts[0][0].may_lack_rows


def _matrices(fixed: Sequence[Tensor]) -> Iterator[Tensor]:
    return (each for each in fixed[11:] if each.dtype.is_floating_point)


def _with_ends(parts: Parts, fixed: Sequence[Tensor], rows: int) -> list[list[Joined]]:
    """The parts as a micro-batch of so many rows has them."""
    ends = next((each for each in fixed if each.dtype is torch.int32), None)
    return [[replace(each, stop=rows, ends=ends) for each in part] for part in parts]


def _adapters(seed: int, count: int | None, dtype: torch.dtype) -> list[Tensor]:
    """lora_A and lora_B of all linear layers, views of one buffer; of `count` adapters, stacked."""
    torch.manual_seed(seed)
    first = () if count is None else (count,)
    shapes = [s for ins, outs in LINEARS.values() for s in ((*first, RANK, ins), (*first, outs, RANK))]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = (torch.randn(sum(sizes)) / 4).to(dtype)
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


@pytest.mark.parametrize("stacked", [False, True])
def test_a_plain_layers_pieces_give_the_same_with_graphs(stacked: bool) -> None:
    dtype = torch.bfloat16 if stacked else torch.float32  # grouped products of the meta device take no float32
    layer = GraphedLayer(dtype)
    graphs = Graphs(EmulatedGraphs(), CLASSES, torch.device("cpu"), most_bytes=1e9, warm_up=0)
    for seed, rows in enumerate((40, 11, 17, 31, 9)):
        leaves = _adapters(seed, 2 if stacked else None, dtype)
        ends = torch.tensor([rows // 3, rows], dtype=torch.int32) if stacked else None
        torch.manual_seed(100 + seed)
        angles = torch.randn(rows, SIZE // 2).repeat(1, 2).to(dtype)
        hidden, gradient = torch.randn(2, rows, HIDDEN).to(dtype)
        of_rows = [hidden, angles.cos(), angles.sin()]
        micro_batch = graphs.micro_batch(rows, leaves, ends, of_rows)
        assert micro_batch is not None
        found = layer.whole(micro_batch.run, micro_batch.leaves, micro_batch.ends, micro_batch.of_rows, gradient)
        expected = layer.whole(plainly, leaves, ends, of_rows, gradient)
        assert len(found) == 2 + 14
        if rows in CLASSES.sizes:
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        for one, other in zip(found, expected, strict=True):
            assert (one.float() - other.float()).norm() <= (0.02 if stacked else 1e-5) * other.float().norm()
    assert (graphs.counts.captured, graphs.counts.replayed, graphs.counts.plain) == (2 * 4, 5 * 4, 0)
