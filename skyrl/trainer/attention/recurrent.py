"""Layers whose state runs along a sequence, over packed rows: which rows run together, and where a state begins.

transformers' layers call functions of their modules for a convolution and for a scan. `install` puts functions in their
place that compute packed rows where the layout of the rows is given, and call transformers' own otherwise. Decoder
layers do not pass the layout on to a short convolution: it is kept for their functions while a layer computes.

Each segment begins with the state that its parent ends with, and the gradients of all that continue a segment meet in
its last state. Each slice is computed alone, so that its result does not depend on others.
Knows the names of transformers' functions, and layouts. Knows nothing of adapters; `scans` computes.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skyrl.trainer.attention.scans import KEPT_ROWS, causal_convolution, delta_rule, mamba2
from skyrl.trainer.collectives import after_rows_before, pass_on, state_before
from skyrl.trainer.device import uploaded
from skyrl.trainer.rows.packing import PackedItem
from skyrl.trainer.rows.prefixes import SHORTEST_IN_GROUP, RowRange
from skyrl.trainer.shares import SequencePart

ROWS = "packed_rows"
"""The argument by which a model's layers get a `PackedRows`."""


@dataclass(frozen=True)
class Wave:
    """`count` segments of similar length that run together, right-padded to `longest`, longest first. All continue
    segments of the wave's depth less one. cells: int64 [count * longest], for each place of the grid a row of the wave;
    None if the rows fill the grid in order. real: bool [count, longest]; None: all. places: int64 [rows], the place of
    each row in the grid; None like `cells`. parents: int64 [count], among the states that the depth before has left;
    None at depth 0. continued: int64, those of the segments that others continue."""

    count: int
    longest: int
    rows: int
    cells: Tensor | None
    real: Tensor | None
    places: Tensor | None
    parents: Tensor | None
    continued: Tensor | None


@dataclass(frozen=True)
class ItemRows:
    """The rows of one slice. order: int64 [rows], the rows in the order of the waves, and `back`, its inverse; None if
    that is their own order. `depths`: the waves of each depth of the tree of segments."""

    rows: int
    order: Tensor | None
    back: Tensor | None
    depths: tuple[tuple[Wave, ...], ...]


@dataclass(frozen=True)
class PackedRows:
    """The rows of a micro-batch. before: int64 [firsts, reach], the rows before each of the `firsts`, the nearest
    first, -1 for none. `firsts`: int64, the rows whose `reach` rows before are not all those that lie before them.
    positions: int64 [rows], in the rows' sequences. `recomputed`: whether backward computes the decoder layers again.
    `part`: the rows are this rank's part of one sequence, of which other ranks have the other rows."""

    slices: tuple[ItemRows, ...]
    firsts: Tensor
    before: Tensor
    positions: Tensor
    recomputed: bool
    part: SequencePart | None = None

    @property
    def rows(self) -> int:
        """Of a part, as many as the rank with the most has."""
        if self.part is not None:
            return self.part.most_rows
        return sum(of_slice.rows for of_slice in self.slices)

    @staticmethod
    def of(slices: Sequence[PackedItem], reach: int, *, recomputed: bool) -> PackedRows:
        """`reach`: how many rows before it a convolution reads."""
        device = slices[0].tokens.device
        made = tuple(_slice_rows(packed.layout.segments, device) for packed in slices)
        found = [pair for packed in slices for pair in _rows_before(packed, reach)]
        rows, earlier = np.array([row for row, _ in found]), np.array([rows for _, rows in found])
        firsts, before = uploaded([rows, earlier.reshape(len(found), reach)], device)
        positions = torch.cat([packed.positions for packed in slices])
        return PackedRows(made, firsts, before, positions, recomputed, slices[0].part)


def _rows_before(packed: PackedItem, reach: int) -> Iterator[tuple[int, list[int]]]:
    """The first `reach` rows of each segment with the rows before them in their sequences, counted from the
    micro-batch's first row."""
    segments = packed.layout.segments
    for segment in segments:
        earlier: list[int] = []
        above = segment
        while len(earlier) < reach and above.parent >= 0:
            above = segments[above.parent]
            last = above.first + above.rows
            earlier += range(last - 1, max(above.first, last - reach + len(earlier)) - 1, -1)
        for row in range(min(reach, segment.rows)):
            own = range(segment.first + row - 1, segment.first - 1, -1)
            rows = [packed.start + each for each in [*own, *earlier][:reach]]
            yield packed.start + segment.first + row, rows + [-1] * (reach - len(rows))


def _slice_rows(segments: Sequence[RowRange], device: torch.device) -> ItemRows:
    continued = {segment.parent for segment in segments}
    depth_of: list[int] = []
    for segment in segments:
        depth_of.append(depth_of[segment.parent] + 1 if segment.parent >= 0 else 0)
    depths: list[tuple[Wave, ...]] = []
    order: list[int] = []
    left: dict[int, int] = {}
    """The place of each continued segment among the states that its depth leaves."""
    for depth in range(max(depth_of) + 1):
        members = [number for number, of_segment in enumerate(depth_of) if of_segment == depth]
        waves = list(_similar(segments, members))
        before, left = left, {}
        depths.append(tuple(_wave(segments, wave, before, left, continued, device) for wave in waves))
        order += [number for wave in waves for number in wave]
    rows = np.concatenate([segments[n].first + np.arange(segments[n].rows) for n in order])
    if bool((rows == np.arange(len(rows))).all()):
        return ItemRows(len(rows), None, None, tuple(depths))
    on_device, back = uploaded([rows, np.argsort(rows)], device)
    return ItemRows(len(rows), on_device, back, tuple(depths))


def _similar(segments: Sequence[RowRange], members: Sequence[int]) -> Iterator[list[int]]:
    wave: list[int] = []
    for number in sorted(members, key=lambda number: -segments[number].rows):
        if wave and segments[number].rows < SHORTEST_IN_GROUP * segments[wave[0]].rows:
            yield wave
            wave = []
        wave.append(number)
    yield wave


def _wave(
    segments: Sequence[RowRange],
    members: Sequence[int],
    before: dict[int, int],
    left: dict[int, int],
    continued: set[int],
    device: torch.device,
) -> Wave:
    """`before`: the places of the states that the depth before has left; those that the wave leaves go to `left`."""
    lengths = np.array([segments[number].rows for number in members])
    longest = int(lengths[0])
    parents = [before[segments[number].parent] for number in members if segments[number].parent >= 0]
    kept = [place for place, number in enumerate(members) if number in continued]
    for place in kept:
        left[members[place]] = len(left)
    cells = real = places = None
    if lengths[-1] < longest:
        place_of = np.arange(longest)
        filled = place_of < lengths[:, None]
        ends = lengths.cumsum()
        # Places after a segment's end hold its last row: no number of another segment comes into its grid.
        of_place = (ends - lengths)[:, None] + np.minimum(place_of, lengths[:, None] - 1)
        cells, real, places = uploaded([of_place.reshape(-1), filled, np.flatnonzero(filled.reshape(-1))], device)
    chosen = iter(uploaded([np.array(each) for each in (parents, kept) if each], device))
    return Wave(
        len(members),
        longest,
        int(lengths.sum()),
        cells,
        real,
        places,
        next(chosen) if parents else None,
        next(chosen) if kept else None,
    )


Scan = Callable[[Sequence[Tensor], Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
"""Gets grids [count, longest, ...], which of their places are rows (bool [count, longest]; None: all), and the states
that the segments begin with (None: zero). Returns a grid, and the states after the last rows [count, ...]."""


def over_segments(scan: Scan, tensors: Sequence[Tensor], packed: PackedRows) -> Tensor:
    """tensors: each [1, rows, ...], with the rows of the micro-batch; the second and third are keys and values. Returns
    [1, rows, ...]."""
    if packed.part is not None:
        return _scan_part(scan, tensors, packed.part)
    sizes = [of_slice.rows for of_slice in packed.slices]
    parts = zip(*(tensor[0].split(sizes) for tensor in tensors), strict=True)
    made = [_scan_slice(scan, part, of_slice) for part, of_slice in zip(parts, packed.slices, strict=True)]
    return torch.cat(made)[None]


def _scan_part(scan: Scan, tensors: Sequence[Tensor], part: SequencePart) -> Tensor:
    """The rank before has the state that the rows begin with, and the rank after waits for the one that they leave."""
    _, key, value, *_ = tensors
    shape = (1, value.shape[2], key.shape[3], value.shape[3])
    state = state_before(value.new_empty(shape, dtype=torch.float32), part, value)
    output, end = scan(tensors, None, state)
    return pass_on(output, end, part)


def _scan_slice(scan: Scan, tensors: Sequence[Tensor], of_slice: ItemRows) -> Tensor:
    if of_slice.order is not None:
        tensors = [tensor.index_select(0, of_slice.order) for tensor in tensors]
    sizes = [wave.rows for waves in of_slice.depths for wave in waves]
    pieces = iter(zip(*(tensor.split(sizes) for tensor in tensors), strict=True))
    outputs: list[Tensor] = []
    states: Tensor | None = None
    for waves in of_slice.depths:
        left: list[Tensor] = []
        for wave in waves:
            grids = [_grid(rows, wave) for rows in next(pieces)]
            begin = None if wave.parents is None or states is None else states.index_select(0, wave.parents)
            output, end = scan(grids, wave.real, begin)
            output = output.flatten(0, 1)
            outputs.append(output if wave.places is None else output.index_select(0, wave.places))
            if wave.continued is not None:
                left.append(end.index_select(0, wave.continued))
        states = torch.cat(left) if left else None
    output = torch.cat(outputs)
    return output if of_slice.back is None else output.index_select(0, of_slice.back)


def _grid(rows: Tensor, wave: Wave) -> Tensor:
    if wave.cells is not None:
        rows = rows.index_select(0, wave.cells)
    return rows.view(wave.count, wave.longest, *rows.shape[1:])


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    packed: PackedRows,
    **kwargs: Any,
) -> Tensor:
    """A causal convolution of each channel along its sequence. x: [1, channels, rows]; weight: [channels, width], whose
    last column is that of the row itself. Returns [1, channels, rows]."""
    if activation is not None and activation not in _SILU:
        raise ValueError(f"a convolution with {activation} is not supported")
    rows, before = x[0].T, 0
    if packed.part is not None:
        before = packed.before.shape[1]
        rows = after_rows_before(rows, before, packed.part)
    made = causal_convolution(rows, weight, bias, packed.firsts, packed.before, silu=activation in _SILU)
    return made[before:].T[None]


def _gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, packed: PackedRows, **kwargs: Any
) -> tuple[Tensor, None]:
    """query, key, value: [1, rows, heads, dim]; g: [1, rows, heads] or, for a decay of each channel, [1, rows, heads,
    dim]; beta: [1, rows, heads]. Returns [1, rows, heads, value_dim] in the query's dtype."""
    return over_segments(delta_rule, (query, key, value, g, beta), packed).to(query.dtype), None


def _mamba2(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # transformers' names
    B: Tensor,
    C: Tensor,
    *,
    packed: PackedRows,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> Tensor:
    """x: [1, rows, heads, dim]; dt: [1, rows, heads]; A, D, dt_bias: [heads]; B, C: [1, rows, groups, states]. Returns
    float32 [1, rows, heads, dim]."""
    steps = nn.functional.softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit).float()
    x = x.float()
    return over_segments(mamba2, (C, B, x * steps[..., None], steps * A), packed) + x * D[:, None]


_SILU = ("silu", "swish")
_SHORT = re.compile(r"ShortConv(olution)?$")
"""Modules in which nothing but a convolution reads earlier rows: those of LFM2 and Inkling."""


class _Current(threading.local):
    """Of the decoder layer that this thread computes."""

    packed: PackedRows | None = None


_current = _Current()
_keeping: WeakSet[nn.Module] = WeakSet()
"""Decoder layers that say which rows they compute."""

_OWN: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2,
}
"""By the names of transformers' functions. All of them normalize queries and keys, or have no such argument."""


def install(layers: Iterable[nn.Module]) -> int:
    """Make recurrent layers among the decoder layers take packed rows. Returns how many rows before it a convolution of
    theirs reads; 0 if there are none.

    Raises ValueError for recurrent layers that call other functions."""
    reach = 0
    for layer in layers:
        for module in layer.modules():
            convolution = next((child for child in module.children() if isinstance(child, nn.Conv1d)), None)
            if convolution is None:
                continue
            reach = max(reach, convolution.kernel_size[0] - 1)
            namespace = vars(sys.modules[type(module).__module__])
            found = [name for name in _OWN if name in namespace]
            alone = _SHORT.search(type(module).__name__) is not None
            if "causal_conv1d_fn" not in found or (len(found) < 2 and not alone):
                raise ValueError(f"{type(module).__name__} keeps a state along a sequence in a way that is not known")
            for name in found:
                namespace[name] = _either(namespace[name], _OWN[name])
            if alone:
                _keep_rows_of(layer)
            else:
                _recompute_alone(module)
    return reach


def _keep_rows_of(layer: nn.Module) -> None:
    """While the decoder layer computes, also when a backward computes it again, its functions find the packed rows that
    it got: it does not pass them on to its convolutions."""
    if layer in _keeping:
        return
    _keeping.add(layer)

    def begin(module: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        _current.packed = kwargs.get(ROWS)

    def end(*_: object) -> None:
        _current.packed = None

    layer.register_forward_pre_hook(begin, with_kwargs=True)
    layer.register_forward_hook(end, always_call=True)


def _recompute_alone(module: Any) -> None:
    """Where layers are recomputed, and have many rows, backward computes the module once more: so what it keeps, and
    what the rest of its layer keeps, are not in memory at the same time."""
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        packed: PackedRows | None = kwargs.get(ROWS)
        if packed is None or not packed.recomputed or packed.rows <= KEPT_ROWS:
            return stock(*args, **kwargs)
        return checkpoint(stock, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    module.forward = forward


def _either(stock: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """`own` where packed rows are given, else `stock`."""
    if getattr(stock, "takes_packed_rows", False):
        return stock

    @functools.wraps(stock)
    def either(*args: Any, **kwargs: Any) -> Any:
        packed = kwargs.pop(ROWS, None) or _current.packed
        return stock(*args, **kwargs) if packed is None else own(*args, packed=packed, **kwargs)

    either.takes_packed_rows = True  # type: ignore[attr-defined]
    return either
