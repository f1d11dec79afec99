"""Causal attention over packed rows by torch's kernel for sequences of any lengths (`torch.nn.attention.varlen`): one
call forward and one backward for all segments of a micro-batch, without padding and without masks.

Each segment is one sequence of queries. Its keys are the rows of the prefix that it continues and its own rows; the
last query sees the last key, so the mask is causal from there ("bottom right"). The keys and values of prefixes are
copied for each segment, or, where that would be many rows, attended to once for each group in a second call, and both
results are merged by the logarithms of their sums. The copies live for one call: the backward copies again.

The kernel is FlashAttention, and runs on GPUs only. Knows rows and the kernel. Knows nothing of models, adapters or
what attention is made of where the kernel does not fit.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.base.config.server import ConfigError
from skyrl.trainer.device import uploaded
from skyrl.trainer.rows.packing import AttentionGroup, Rows, in_window, placed, sum_of_cells
from skyrl.trainer.rows.prefixes import MAX_COPIES

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
MOST_HEAD_DIM, HEAD_DIM_STEP = 256, 8
CAPABILITY = (8, 0)
"""What FlashAttention takes: dtypes, sizes of heads, and CUDA's compute capability."""
SPLIT_COPIES = 4
"""Prefixes get a call of their own if that saves so many copies for each row of the micro-batch.

By bytes moved, forward and backward together, for heads of n bytes, k heads of keys and q of queries. A copied row:
keys and values are written and read twice (8 k n), their gradients are written for each head of queries, added over the
heads that read one head of keys (4 q n; nothing where q = k), and added over copies (4 k n). A row of the second call:
15 q n for the merge in float32, 14 q n for the kernel and the sum of gradients. So with q ÷ k = 1, 2, 4 and 8 one row
of the second call is as dear as 2.4, 2.9, 4.1 and 5.3 copied ones."""

CAUSAL = (-1, 0)
UNBOUNDED = (-1, -1)
_BACKWARD = (
    *("grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal"),
    *("rng_state", "scale", "window_size"),
)
"""Arguments of the kernel's backward, which torch documents only through autograd."""


def missing_in_torch() -> str | None:
    """What this version of torch lacks of the kernel: None from torch 2.11 on. 2.10 has one without windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return "has no torch.nn.attention.varlen"
    if not {"return_aux", "scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys():
        return "has a varlen_attn without scale, windows or sums"
    backward = getattr(torch.ops.torch_attn, "_varlen_attn_backward", None)
    if backward is None or tuple(each.name for each in backward.default._schema.arguments) != _BACKWARD:
        return "has another backward of varlen_attn"
    return None


@functools.cache
def _kernel() -> Any:
    """torch's function, from its version 2.11 on, which takes fewer heads of keys without being told."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    told = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return functools.partial(varlen_attn, return_aux=AuxRequest(lse=True), **told)


def usable_on(device: torch.device) -> bool:
    """Whether `trainer.attention: varlen` takes this way. False, with a warning, if torch lacks the kernel.

    Raises ConfigError for a device on which no version of the kernel runs."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        least = ".".join(map(str, CAPABILITY))
        raise ConfigError(
            f"trainer.attention: varlen needs a CUDA device of compute capability {least} or more, and the trainer "
            f"computes on {_name(device)}: leave it out"
        )
    lacks = missing_in_torch()
    if lacks is not None:
        logger.warning("trainer.attention: torch %s %s: sdpa instead of varlen", torch.__version__, lacks)
    return lacks is None


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type.upper()}"


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes these dtypes and sizes of heads, which are the last dimension."""
    head_dim = query.shape[-1]
    return (
        query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and head_dim == value.shape[-1] <= MOST_HEAD_DIM
        and head_dim % HEAD_DIM_STEP == 0
    )


@dataclass(frozen=True)
class Copies:
    """The keys of a call that are not simply the rows. rows: int64 [keys], the row that each is. `holders`: which keys
    hold each row, as `Indices.holders`."""

    rows: Tensor
    holders: tuple[Tensor, Tensor]

    def gathered(self, states: Tensor) -> Tensor:
        return states.index_select(0, self.rows)


@dataclass(frozen=True)
class Call:
    """One call of the kernel. queries, keys: int32 [sequences + 1], where those of each sequence begin, and the end;
    the longest has `most_queries` and `most_keys`. window: how many keys before and after its own place a query sees,
    -1: all; places are counted from the end of a sequence."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    window: tuple[int, int]
    copies: Copies | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """query [rows, heads, head_dim], key and value [rows, kv_heads, head_dim]; returns the result, like query, and
        the logarithms of the sums of exponentials, float32 [heads, rows]."""
        key, value = self._gathered(key, value)
        places = self.queries, self.keys, self.most_queries, self.most_keys
        return _kernel()(query, key, value, *places, scale=scale, window_size=self.window)

    def backward(
        self,
        of_output: Tensor,
        states: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        sums: Tensor,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of `states`, the query, key and value of `forward`. output, sums: what `forward` has returned, or
        of all keys, if those of this call are a part of them."""
        query, *of_rows = states
        key, value = self._gathered(*of_rows)
        unused = query.new_empty(2, dtype=torch.uint64)  # the state of random numbers for dropout
        places = self.queries, self.keys, self.most_queries, self.most_keys
        of_query, *found = torch.ops.torch_attn._varlen_attn_backward(
            *(of_output, query, key, value, output, sums),
            *(*places, self.window == CAUSAL, unused, scale, list(self.window)),
        )
        if self.copies is not None:
            found = [sum_of_cells(each, *self.copies.holders) for each in found]
        return of_query, found[0], found[1]

    def _gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.copies is None:
            return key, value
        return self.copies.gathered(key), self.copies.gathered(value)


@dataclass(frozen=True)
class Sequences:
    """The calls for a micro-batch, made once for all layers with one window.

    `own`: each segment, with the keys of its prefix and its own. With `prefixes`, only with its own: these are another
    call, of each group with the keys of its prefix, and bool [rows], which rows have no prefix. `copied`: rows of keys
    and values that each layer copies."""

    own: Call
    prefixes: tuple[Call, Tensor] | None
    copied: int

    @staticmethod
    def of(slices: Sequence[Sequence[AttentionGroup]], window: int | None, device: torch.device) -> Sequences | None:
        """slices: the groups of each slice, which cover the rows in order. window: only so many keys are seen.

        None with more than MAX_COPIES copied rows for each row, where the grids of `packing` copy fewer: with a window
        a group's prefix is copied for each segment, because each of its queries sees another part of it."""
        groups = [(group, start, prefix) for group, start, prefix in placed(slices)]
        if window is not None and window >= max(group.longest + len(prefix) for group, _, prefix in groups):
            window = None
        groups = [(group, start, in_window(prefix, window)) for group, start, prefix in groups]
        lengths = np.concatenate([group.lengths for group, _, _ in groups])
        causal = CAUSAL if window is None else (window - 1, 0)
        once = sum(len(prefix) for _, _, prefix in groups)
        each = sum(group.count * len(prefix) for group, _, prefix in groups)
        rows = int(lengths.sum())
        if not each:
            return Sequences(_call(lengths, lengths, causal, None, rows, device), None, 0)
        if window is None and each - once > SPLIT_COPIES * rows:
            own = _call(lengths, lengths, causal, None, rows, device)
            return Sequences(own, _of_prefixes(groups, rows, device), once)
        if each > MAX_COPIES * rows:
            return None
        keys, parts = [], []
        for group, start, prefix in groups:
            for length in group.lengths:
                keys.append(len(prefix) + length)
                parts += [prefix, np.arange(start, start := start + length)]
        return Sequences(_call(lengths, np.array(keys), causal, np.concatenate(parts), rows, device), None, each)


def _of_prefixes(
    groups: Sequence[tuple[AttentionGroup, int, Rows]], rows: int, device: torch.device
) -> tuple[Call, Tensor]:
    """`Sequences.prefixes`."""
    queries = np.array([sum(group.lengths) for group, _, _ in groups])
    keys = np.array([len(prefix) for _, _, prefix in groups])
    call = _call(queries, keys, UNBOUNDED, np.concatenate([prefix for _, _, prefix in groups]), rows, device)
    return call, uploaded([np.repeat(keys == 0, queries)], device)[0]


def _call(
    queries: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
    window: tuple[int, int],
    copied: Rows | None,
    rows: int,
    device: torch.device,
) -> Call:
    """queries, keys: how many each sequence has. copied: the row of each key; None: the keys are the queries' rows."""
    ends = [np.cumsum([0, *each], dtype=np.int32) for each in (queries, keys)]
    most = int(queries.max()), int(keys.max())
    if copied is None:
        (places,) = uploaded(ends[:1], device)
        return Call(places, places, *most, window, None)
    order = np.argsort(copied, kind="stable")
    firsts = np.searchsorted(copied[order], np.arange(rows))
    made = uploaded([*ends, copied, order, firsts], device)
    return Call(made[0], made[1], *most, window, Copies(made[2], (made[3], made[4])))


def attend_in_sequences(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float | None) -> Tensor:
    """query [rows, heads, head_dim], key and value [rows, kv_heads, head_dim], of one dtype, which `fits`; returns
    [rows, heads, head_dim]. `scale` (default: head_dim^-0.5) multiplies the scores. Keeps its arguments, its result and
    a number for each row and head for the backward, and no copies."""
    return _Attention.apply(query, key, value, sequences, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float | None
    ) -> Tensor:
        output, sums = sequences.own.forward(query, key, value, scale)
        if sequences.prefixes is not None:
            call, without = sequences.prefixes
            output, sums = _merged(output, sums, *call.forward(query, key, value, scale), without)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.sequences, ctx.scale = sequences, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """With the sums over all keys a call gives the part of the gradients that its keys have: FlashAttention-2
        (arXiv 2307.08691), algorithm 2, needs nothing else of the other keys."""
        query, key, value, output, sums = ctx.saved_tensors
        sequences: Sequences = ctx.sequences
        given = gradients[0].contiguous(), (query, key, value), output, sums, ctx.scale
        found = sequences.own.backward(*given)
        if sequences.prefixes is not None:
            others = sequences.prefixes[0].backward(*given)
            found = tuple(one.add_(other) for one, other in zip(found, others, strict=True))
        return *found, None, None


def _merged(
    output: Tensor, sums: Tensor, of_prefixes: Tensor, prefix_sums: Tensor, without: Tensor
) -> tuple[Tensor, Tensor]:
    """The result over the keys of both calls: each is weighted by its share of the exponentials (arXiv 2205.14135,
    section 3.1). Where a row has no prefix, the kernel's result is 0, and its sum has no meaning."""
    prefix_sums = prefix_sums.masked_fill(without, -torch.inf)
    weight = (sums - prefix_sums).sigmoid().t()[:, :, None]
    merged = of_prefixes.float().lerp_(output.float(), weight)
    return merged.to(output.dtype), torch.logaddexp(sums, prefix_sums)
