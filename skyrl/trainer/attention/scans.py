"""What recurrent layers compute along rows: linear recurrences (the gated delta rule and Mamba-2) on grids of rows, and
a causal convolution of each channel.

Within a chunk of a recurrence all rows are computed together by matrix products; the state goes from chunk to chunk.
Everything is float32. A large grid is cut into blocks of chunks, and backward computes each block again: so the memory
for inner numbers does not grow with its rows. In a convolution each row is a weighted sum of itself and a few rows
before it, of which those that begin a sequence have fewer; only its input is kept for the backward. Knows nothing of
segments or modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

CHUNK = 64
"""Rows of a chunk, at most."""
KEPT_ROWS = 4096
"""A grid of at most so many rows, in all its segments together, keeps its inner numbers for the backward."""
BLOCK_ROWS = 1024
"""Rows of a block of a larger grid, in all segments together; at least one chunk of each."""
_MULTIPLE = 8
_SUB = 16
"""Rows of a part of a chunk, where each channel has a decay of its own."""


def delta_rule(grids: Sequence[Tensor], real: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} decayed by exp(g_t), plus beta_t k_t (v_t - k_t^T S_{t-1})^T; the output is q_t^T S_t, with queries
    and keys of length 1 and the queries scaled by dim^-0.5 (Gated Delta Networks, arXiv 2412.06464, section 3; with a
    decay of each channel: Kimi Linear, arXiv 2510.26692, section 3).

    grids: query, key [count, rows, heads, dim], value [count, rows, heads, value_dim], g (at most 0) [count, rows,
    heads] or [count, rows, heads, dim], beta [count, rows, heads]. real: bool [count, rows]; None: all. state: float32
    [count, heads, dim, value_dim]; None: zero. Returns float32 [count, rows, heads, value_dim], and the state after the
    last real row."""
    query, key, value, decay, beta = grids
    if real is not None:  # a row that changes nothing
        beta, decay = _with_zeros(beta, real), _with_zeros(decay, real)
    return _in_blocks((query, key, value, decay, beta), state)


def mamba2(grids: Sequence[Tensor], real: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} exp(a_t) + b_t x_t^T; the output is c_t^T S_t (Mamba-2, arXiv 2405.21060, section 6). Heads of
    one group, which follow each other, share b and c.

    grids: c, b [count, rows, groups, states], x [count, rows, heads, dim], a (at most 0) [count, rows, heads]. real:
    bool [count, rows]; None: all. state: float32 [count, heads, states, dim]; None: zero. Returns float32 [count, rows,
    heads, dim], and the state after the last real row."""
    read, write, x, decay = grids
    if real is not None:
        x, decay = _with_zeros(x, real), _with_zeros(decay, real)
    return _in_blocks((read, write, x, decay), state)


def _with_zeros(grid: Tensor, real: Tensor) -> Tensor:
    return grid.masked_fill(~real.view(*real.shape, *[1] * (grid.ndim - 2)), 0.0)


def _in_blocks(grids: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
    """grids: query, key, value, decay and perhaps beta, [count, rows, heads, ...]; queries and keys may have fewer
    heads. Returns float32 [count, rows, heads, value_dim] and the state."""
    _, key, value, *_ = grids
    count, rows, heads, value_dim = value.shape
    size = -(-rows // -(-rows // CHUNK))
    size += -size % _MULTIPLE
    current = state
    if current is None:
        current = value.new_zeros(count, heads, key.shape[-1], value_dim, dtype=torch.float32)
    if count * rows <= KEPT_ROWS or not torch.is_grad_enabled():
        return _block(current, size, *grids)
    step = size * max(1, BLOCK_ROWS // (count * size))
    outputs: list[Tensor] = []
    for block in zip(*(grid.split(step, dim=1) for grid in grids), strict=True):
        made: Any = checkpoint(_block, current, size, *block, use_reentrant=False, preserve_rng_state=False)
        output, current = made
        outputs.append(output)
    return torch.cat(outputs, dim=1), current


def _chunks(grid: Tensor, size: int) -> Tensor:
    """[count, rows, heads, ...] as float32 [count, heads, chunks, size, ...], with zeros after the last row."""
    grid = grid.float().transpose(1, 2)
    lacking = -grid.shape[2] % size
    if lacking:
        grid = pad(grid, (*[0] * (2 * (grid.ndim - 3)), 0, lacking))
    return grid.unflatten(2, (-1, size))


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _block(state: Tensor, size: int, *grids: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows, as `_in_blocks` has them, in chunks of `size` rows. With beta, queries and keys are normalized."""
    rows = grids[0].shape[1]
    query, key, value, decay, *rest = (_chunks(grid, size) for grid in grids)
    beta = rest[0] if rest else None
    if beta is not None:
        query, key = _normalized(query) * query.shape[-1] ** -0.5, _normalized(key)
    output, state = _scan(state, query, key, value, decay, beta)
    return output.flatten(2, 3)[:, :, :rows].transpose(1, 2), state


def _scan(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """query, key: [count, key_heads, chunks, size, dim]; value: [count, heads, chunks, size, value_dim]; decay [count,
    heads, chunks, size] or with a last dimension dim; beta [count, heads, chunks, size]. Returns [count, heads, chunks,
    size, value_dim] and the state after them."""
    total = decay.cumsum(dim=3)
    of_channels = decay.ndim == 5
    heads = value.shape[1] // key.shape[1]
    if of_channels:
        scores, similar = _products_of_channels(query, key, total)
        decayed = total.exp()
        last = total[:, :, :, -1:]
        ending, ended = (last - total).exp(), last[:, :, :, 0, :, None].exp()
    else:
        later = torch.ones(total.shape[3], total.shape[3], dtype=torch.bool, device=total.device).triu(1)
        between = (total[..., None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
        scores = _for_heads(query @ key.transpose(3, 4), heads) * between
        similar = _for_heads(key @ key.transpose(3, 4), heads) * between if beta is not None else None
        decayed = total.exp()[..., None]
        last = total[..., -1:]
        ending, ended = (last - total).exp()[..., None], last[..., None].exp()
    query, key = _for_heads(query, heads), _for_heads(key, heads)
    written, read = key * ending, query * decayed
    known: Sequence[Tensor] | None = None
    if beta is not None and similar is not None:
        # (I + A) [u, w] = [beta v, beta k exp(total)], with A below the diagonal (arXiv 2412.06464, section 3.3)
        sides = torch.cat([value, key * decayed], dim=4) * beta[..., None]
        solved = torch.linalg.solve_triangular(similar * beta[..., None], sides, upper=False, unitriangular=True)
        value, of_state = solved.split([value.shape[4], key.shape[4]], dim=4)
        known = of_state.unbind(2)
    states: list[Tensor] = []
    values: list[Tensor] = []
    steps = zip(value.unbind(2), written.transpose(3, 4).unbind(2), ended.unbind(2), strict=True)
    for number, (new, write, kept) in enumerate(steps):
        if known is not None:
            new = new - known[number] @ state
        states.append(state)
        values.append(new)
        state = state * kept + write @ new
    output = read @ torch.stack(states, dim=2) + scores @ torch.stack(values, dim=2)
    return output, state


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """Each of dimension 1 `heads` times."""
    return x if heads == 1 else x.repeat_interleave(heads, dim=1)


def _products_of_channels(query: Tensor, key: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """q_i and k_i with k_j of the rows j up to i of a chunk, each channel decayed by exp(total_i - total_j), both
    [count, heads, chunks, size, size]; zeros above the diagonal.

    Rows are taken in parts. Those before the part of row i are decayed to the part's first row, and row i from there:
    no exponent is above 0. Within a part each channel is multiplied by itself."""
    size = query.shape[3]
    both = torch.stack([query, key])
    made = []
    for start in range(0, size, _SUB):
        stop = min(size, start + _SUB)
        of_part, ends = both[:, :, :, :, start:stop], total[:, :, :, start:stop]
        later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=total.device).triu(1)
        exponent = (ends[..., None, :] - ends[..., None, :, :]).masked_fill(later[..., None], float("-inf"))
        within = (of_part[..., None, :] * (key[:, :, :, None, start:stop] * exponent.exp())).sum(-1)
        parts = [within, within.new_zeros(*within.shape[:-1], size - stop)]
        if start:
            first = total[:, :, :, start : start + 1]
            earlier = key[:, :, :, :start] * (first - total[:, :, :, :start]).exp()
            parts.insert(0, (of_part * (ends - first).exp()) @ earlier.transpose(3, 4))
        made.append(torch.cat(parts, dim=-1))
    scores, similar = torch.cat(made, dim=4).unbind(0)
    return scores, similar


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, firsts: Tensor, before: Tensor, *, silu: bool
) -> Tensor:
    """x: [rows, channels]; weight: [channels, width], the last column for the row itself; bias: [channels]. before:
    int64 [firsts, width - 1 or more], for each of the rows `firsts` the rows that it reads, the nearest first, -1 for
    none. Other rows read those that lie before them. With `silu`, that of the sums. Returns [rows, channels] in x's
    dtype; computes in float32."""
    made: Tensor = _Convolution.apply(x, weight, bias, firsts, before[:, : weight.shape[1] - 1], silu)
    return made


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, firsts: Tensor, before: Tensor, silu: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, firsts, before)
        ctx.silu = silu
        made = _sums(x, weight, bias, firsts, before)
        return (torch.nn.functional.silu(made, inplace=True) if silu else made).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, firsts, before = ctx.saved_tensors
        gradient = gradients[0].float()
        if ctx.silu:
            sums = _sums(x, weight, bias, firsts, before)
            gradient = torch.ops.aten.silu_backward(gradient, sums)
            del sums
        columns = weight.float().unbind(1)[::-1]
        of_x = of_weight = of_bias = None
        inner = gradient.index_fill(0, firsts, 0.0)  # of the rows that read those that lie before them
        begin = gradient.index_select(0, firsts)
        if ctx.needs_input_grad[0]:
            of_x = gradient * columns[0]
            for distance, column in enumerate(columns[1:], start=1):
                of_x[:-distance].addcmul_(inner[distance:], column)
            for column, read in zip(columns[1:], before.unbind(1), strict=True):
                of_x.index_add_(0, read.clamp(min=0), (begin * column).masked_fill_(read[:, None] < 0, 0.0))
            of_x = of_x.to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = _of_weight(x, gradient, inner, begin, before).to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0).to(bias.dtype)
        return of_x, of_weight, of_bias, None, None, None


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None, firsts: Tensor, before: Tensor) -> Tensor:
    """float32 [rows, channels]."""
    rows = x.float()
    columns = weight.float().unbind(1)[::-1]
    made = rows * columns[0]
    for distance, column in enumerate(columns[1:], start=1):
        made[distance:].addcmul_(rows[:-distance], column)
    begin = rows.index_select(0, firsts) * columns[0]
    for column, read in zip(columns[1:], _read(rows, before), strict=True):
        begin.addcmul_(read, column)
    made.index_copy_(0, firsts, begin)
    return made if bias is None else made.add_(bias.float())


def _read(rows: Tensor, before: Tensor) -> Sequence[Tensor]:
    """For each distance, the rows that the first ones read, zeros for none: [firsts, channels]."""
    return [rows.index_select(0, read.clamp(min=0)).masked_fill_(read[:, None] < 0, 0.0) for read in before.unbind(1)]


def _of_weight(x: Tensor, gradient: Tensor, inner: Tensor, begin: Tensor, before: Tensor) -> Tensor:
    rows = x.float()
    columns = [(rows * gradient).sum(0)]
    for distance, read in enumerate(_read(rows, before), start=1):
        columns.append((rows[:-distance] * inner[distance:]).sum(0) + (read * begin).sum(0))
    return torch.stack(columns[::-1], dim=1)
