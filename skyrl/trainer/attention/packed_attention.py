"""Causal attention over packed rows, registered with transformers under the name "skyrl_segments".

Ranges of rows are padded to grids, or are the sequences of `varlen`. Each reads the keys and values of the prefix that
it continues, and nothing of other items. Supports sliding windows, and exact formulas for soft-capping and sinks beside
torch's kernel. At start-up an attention that computes nothing records what each layer asks for, and is compared with
what packed rows compute, also beyond the few tokens of the probe. Knows nothing of adapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface

from skyrl.trainer.attention.divided import Scoring, divided_attention
from skyrl.trainer.attention.relative import RelativeBias, bias_of
from skyrl.trainer.attention.sparse import Chosen, attend_to_chosen
from skyrl.trainer.attention.varlen import Sequences, attend_in_sequences, fits
from skyrl.trainer.device import HOST, moved
from skyrl.trainer.reused import Reused
from skyrl.trainer.rows.packing import AttentionGroup, FromCells, Grids, IntoCells, Shape
from skyrl.trainer.shares import SequencePart

SCORES_BYTES = 64 * 2**20
"""Size of one block of float32 scores. With soft-capping or sinks, backward needs the memory of a few blocks."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative: RelativeBias | None = None,
    places: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """query [count, heads, q, head_dim], key [count, kv_heads, k, head_dim] and value [count, kv_heads, k, value_dim]
    of one dtype; returns [count, heads, q, value_dim] in that dtype. `heads` is a multiple of `kv_heads`.

    mask: bool [q, k] or [count, 1, q, k], True where a query sees a key; without softcap, sinks and relative biases
    also numbers of query's dtype, which are added to the scores. None: each query sees every key. With `causal` there
    is no mask, q equals k, and query i sees the keys 0 to i. `scale` (default: head_dim^-0.5) multiplies the scores. A
    query that sees no key gets a finite result without meaning.

    softcap: the scores become softcap * tanh(scores / softcap) before the mask (Gemma 2, arXiv 2408.00118, section 2).
    sinks: float32 [heads], one more score per head that takes part in the softmax and has no value (gpt-oss, arXiv
    2508.10925, section 2.3). relative: biases of the scores, with states [count, heads, q, n], and places: int64 [q]
    and [k], of queries and keys; their difference is the distance. Without these, torch's scaled_dot_product_attention
    computes the result. With one of them the scores are made in blocks of queries, the softmax in float32; with
    gradients and more than one block, backward computes each block again, and adds the blocks' gradients of keys and
    values in float32 (`Reused`).
    """
    assert not (causal and mask is not None)
    if softcap is None and sinks is None and relative is None:
        if mask is not None and wants_all_heads(query.device):
            key, value = for_all_heads(key, query.shape[1]), for_all_heads(value, query.shape[1])
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    count, heads, rows, _ = query.shape
    length = key.shape[2]
    step = max(1, SCORES_BYTES // (4 * count * heads * (length + (0 if relative is None else relative.extent))))
    if rows <= step:
        block = _causal_mask(0, rows, query.device) if causal else mask
        biases: tuple[Any, ...] = () if relative is None else (relative.states, relative.profiles, places)
        return _explicit(query, key, value, block, factor, softcap, sinks, *biases)
    keys, values = Reused(key), Reused(value)
    profiles = None if relative is None else Reused(relative.profiles)
    parts = []
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        block = _causal_mask(start, stop, query.device) if causal else mask
        if mask is not None:
            block = mask[..., start:stop, :]
        seen = slice(None), slice(None), slice(stop if causal else length)
        arguments: tuple[Any, ...] = (keys.use(*seen), values.use(*seen), block, factor, softcap, sinks)
        arguments = (query[:, :, start:stop], *arguments)
        if relative is not None and profiles is not None and places is not None:
            of_block = places[0][start:stop], places[1][seen[2]]
            arguments += relative.states[:, :, start:stop], profiles.use(), of_block
        if torch.is_grad_enabled():
            parts.append(checkpoint(_explicit, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_explicit(*arguments))
    return torch.cat(parts, dim=2)


def wants_all_heads(device: torch.device) -> bool:
    """Whether masked attention is given keys and values of every head: see `for_all_heads`."""
    return device.type == "cuda"


def for_all_heads(states: Tensor, heads: int) -> Tensor:
    """Keys or values [count, kv_heads, ...] as [count, heads, ...]: each head a copy of the one that it reads.

    With a mask and fewer heads of keys and values, torch has on CUDA only kernels that keep all scores in memory. With
    as many heads it has one that does not (PyTorch's scaled_dot_product_attention, "memory-efficient attention"). The
    copies need less memory than the scores."""
    return states if states.shape[1] == heads else states.repeat_interleave(heads // states.shape[1], dim=1)


def _causal_mask(start: int, stop: int, device: torch.device) -> Tensor:
    """Queries [start, stop) of a causal grid over the keys [0, stop)."""
    return torch.arange(start, stop, device=device)[:, None] >= torch.arange(stop, device=device)[None, :]


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    states: Tensor | None = None,
    profiles: Tensor | None = None,
    places: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """softmax(softcap(scale * query key^T) + bias) value, where the sinks add their exponentials to the softmax's
    sum."""
    count, heads, rows, head_dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    grouped = query.reshape(count, kv_heads, heads // kv_heads * rows, head_dim)
    scores = (grouped @ key.transpose(2, 3)).view(count, heads, rows, length) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float()
    if states is not None and profiles is not None and places is not None:
        scores = scores + bias_of(states, profiles, places[0][:, None] - places[1])
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
    if sinks is not None:
        column = sinks.view(1, heads, 1, 1).expand(count, heads, rows, 1)
        scores = torch.cat([scores, column], dim=3)
    weights = scores.softmax(dim=3)[..., :length].to(value.dtype)
    output = weights.reshape(count, kv_heads, heads // kv_heads * rows, length) @ value
    return output.view(count, heads, rows, value.shape[-1])


NAME = "skyrl_segments"
_UNSUPPORTED = ("position_bias",)
KEPT_MASK_BYTES = 64 * 2**20
"""A mask of at most these bytes, one number for each query and key, is made once for all layers, not by up to ten small
operations in each. All masks of 3,800 rows, 4 groups of 16 samples behind prompts of 512 tokens, have 3.6 MB together.
Only sequences of more than 4,096 tokens, with a sliding window or behind a prompt, have larger ones."""
_ALIGNMENT = 16
"""Rows of a mask begin at multiples of so many numbers: the memory-efficient kernel would copy another mask at each
call."""


class PackedGroups(tuple[Sequence[AttentionGroup], ...]):
    """The attention groups of each slice of a micro-batch, and what the first layer makes of them for those after
    it. `varlen`: layers attend in sequences where these fit."""

    def __new__(cls, slices: Sequence[Sequence[AttentionGroup]], *, varlen: bool = False) -> Self:
        return super().__new__(cls, slices)

    def __init__(self, slices: Sequence[Sequence[AttentionGroup]], *, varlen: bool = False) -> None:
        self._made: dict[int | None, tuple[Grids, Masks]] = {}
        self._sequences: dict[int | None, Sequences | None] | None = {} if varlen else None

    def sequences(self, window: int | None, device: torch.device) -> Sequences | None:
        """window: as for `with_window`. None: grids are to be taken."""
        if self._sequences is not None and window not in self._sequences:
            self._sequences[window] = Sequences.of(self, window, device)
        return (self._sequences or {}).get(window)

    def with_window(self, window: int | None, device: torch.device) -> tuple[Grids, Masks]:
        """window: a layer's sliding window."""
        if window not in self._made:
            grids = Grids.of(self, window, device)
            self._made[window] = grids, Masks([shape for shape, _ in grids.calls], window, device)
        return self._made[window]


class Masks:
    """The masks of some shapes of grids with a layer's sliding window."""

    def __init__(self, shapes: Sequence[Shape], window: int | None, device: torch.device) -> None:
        self._shapes, self._window, self._device = shapes, window, device
        self._masked = [
            shape for shape in dict.fromkeys(shapes) if shape.before or shape.longest > (window or math.inf)
        ]
        self._kept: dict[Any, dict[Shape, Tensor]] = {}

    @property
    def any(self) -> bool:
        """Whether a shape has a mask."""
        return bool(self._masked)

    def of(self, shape: Shape, dtype: torch.dtype) -> Tensor | None:
        """[queries, keys] of a bundle: bool, which keys each row sees; or numbers of `dtype` to be added to scores. A
        large one is bool in any case. None: row i sees the first i + 1 keys."""
        if shape not in self._masked:
            return None
        if dtype not in self._kept:
            self._kept[dtype] = self._make(dtype)
        kept = self._kept[dtype].get(shape)
        return _mask(*shape, self._window, self._device) if kept is None else kept

    def _make(self, dtype: torch.dtype) -> dict[Shape, Tensor]:
        """All masks that are not too large, from one copy to the device."""
        small = [shape for shape in self._masked if shape.queries * shape.keys * dtype.itemsize <= KEPT_MASK_BYTES]
        if not small:
            return {}
        padded = [-(-shape.keys // _ALIGNMENT) * _ALIGNMENT for shape in small]
        sizes = [shape.queries * width for shape, width in zip(small, padded, strict=True)]
        flat = torch.zeros(sum(sizes), dtype=torch.bool)
        for shape, width, part in zip(small, padded, flat.split(sizes), strict=True):
            part.view(-1, width)[:, : shape.keys] = _mask(*shape, self._window, HOST)
        (flat,) = moved([flat], self._device)
        if dtype != torch.bool:
            flat = torch.zeros(flat.shape, dtype=dtype, device=self._device).masked_fill_(~flat, -torch.inf)
        return {
            shape: part.view(-1, width)[:, : shape.keys]
            for shape, width, part in zip(small, padded, flat.split(sizes), strict=True)
        }


def segments_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    attention_groups: Sequence[Sequence[AttentionGroup]] | SequencePart | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Chosen | None = None,
    relative: RelativeBias | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim]; returns [1, rows, heads,
    head_dim].

    `attention_groups`: of each slice, which cover the rows in order; or the rows are this rank's part of one sequence.
    `s_aux`: the heads' sinks [heads]. `indices`: what an indexer has chosen, without a window, softcap, sinks and
    biases; some layers give it in the mask's place. relative: with states [1, heads, rows, n]. Dropout is never
    applied. Raises ValueError for position biases in another form, which would need another kernel, and without groups.
    """
    chosen = attention_mask if isinstance(attention_mask, Chosen) else indices
    if attention_groups is None:
        raise ValueError("the model does not pass the layout of the rows on to its attention")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"attention with {name} is not supported")
    if isinstance(attention_groups, SequencePart):
        scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
        bits = None if chosen is None else chosen.bits[0]
        if relative is not None:
            relative = RelativeBias(relative.states[0], relative.profiles)
        made = divided_attention(query[0], key[0], value[0], attention_groups, scoring, s_aux, bits, relative)
        return made.transpose(0, 1)[None], None
    groups = attention_groups if isinstance(attention_groups, PackedGroups) else PackedGroups(attention_groups)
    of_queries = [] if relative is None else [relative.states]
    # `squeeze`: the gradient of an index would be a copy
    states = [state.squeeze(0).transpose(0, 1) for state in (query, key, value, *of_queries)]
    if chosen is None and softcap is None and s_aux is None and relative is None and fits(query, key, value):
        sequences = groups.sequences(sliding_window, query.device)
        if sequences is not None:
            return attend_in_sequences(states[0], states[1], states[2], sequences, scaling)[None], None
    grids, masks = groups.with_window(sliding_window, query.device)
    sinks = None if s_aux is None else s_aux.float()  # so the gradients of all calls are added in float32
    mask_dtype = query.dtype if softcap is None and sinks is None and relative is None else torch.bool
    if grids.queries is not None:
        cells = (grids.queries, grids.keys, grids.keys, *[grids.queries] * len(of_queries))
        states = [IntoCells.apply(state, index) for state, index in zip(states, cells, strict=True)]
    if masks.any and mask_dtype != torch.bool and wants_all_heads(query.device):
        states[1:] = [for_all_heads(state, query.shape[1]) for state in states[1:]]
    of_keys = [bundles * shape.keys for shape, bundles in grids.calls]
    sizes = [[bundles * shape.queries for shape, bundles in grids.calls], of_keys, of_keys]
    sizes += sizes[: len(of_queries)]
    # Cut into parts once: backward then puts their gradients together once, in place of a sum over all cells for each
    parts = zip(*(state.split(of_calls) for state, of_calls in zip(states, sizes, strict=True)), strict=True)
    outputs: list[Tensor] = []
    choices = (None,) * len(grids.calls) if chosen is None else chosen.bits
    for (shape, bundles), of_call, bits in zip(grids.calls, parts, choices, strict=True):
        queries, keys, values, *others = (part.unflatten(0, (bundles, -1)).transpose(1, 2) for part in of_call)
        if bits is not None:
            given = queries, keys, values, bits, shape
            output = attend_to_chosen(attend, *given, scale=scaling, block_bytes=SCORES_BYTES)
        else:
            mask = masks.of(shape, mask_dtype)
            causal = mask is None
            biases: dict[str, Any] = {}
            if relative is not None:
                of_rows = RelativeBias(others[0], relative.profiles)
                biases = {"relative": of_rows, "places": shape.places(query.device)}
            output = attend(
                *(queries, keys, values),
                mask=mask,
                causal=causal,
                scale=scaling,
                softcap=softcap,
                sinks=sinks,
                **biases,
            )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    made = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return (made if grids.queries is None else FromCells.apply(made, grids.queries))[None], None


def _mask(length: int, together: int, before: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each row of a bundle attends to: bool [together * length, before + together * length]. Those of
    the prefix, and those of its own segment up to itself."""
    places = torch.arange(before + length, device=device)
    distance = places[before:, None] - places
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if together == 1:
        return mask
    own = torch.block_diag(*[mask[:, before:]] * together)
    return torch.cat([mask[:, :before].repeat(together, 1), own], dim=1)


AttentionInterface.register(NAME, segments_attention)


RECORDER = "skyrl_noted"
_FAR = 4096
"""Queries are compared at least this far from the first token. Chunks and windows are rarely longer."""

MaskFunction = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asks its attention for. `sees` is transformers' mask: it gets indices of the batch, head, query
    and key, and returns whether the query sees the key; None: the layer has no mask. made: float [1, 1, tokens,
    tokens], a mask that the layer has made itself, of the tokens that its indexer has chosen."""

    layer: str
    window: int | None
    sees: MaskFunction | None
    options: tuple[str, ...]
    made: Tensor | None = None

    def check(self) -> None:
        """Raise ValueError unless the layer's mask is that of a causal window of `window` tokens (None: all before)."""
        if self.options:
            raise ValueError(f"{self.layer}: attention with {', '.join(self.options)} is not supported")
        if self.made is not None:
            if bool((self.made == 0).triu(1).any()):
                raise ValueError(f"{self.layer}: a token sees later ones, which is not supported")
            return  # which of the earlier ones is compared where packed rows are
        if self.sees is None:
            raise ValueError(f"{self.layer}: attention without a causal mask is not supported")
        window = self.window or _FAR
        queries = {0, 1, window - 1, window, window + 1, 2 * window - 1, 2 * window, 3 * window + 1, _FAR}
        distances = {-1, 0, 1, window - 1, window, window + 1, 2 * window}
        query = torch.tensor([q for q in sorted(queries) for _ in distances])
        key = query - torch.tensor(sorted(distances)).repeat(len(queries))
        query, key = query[key >= 0], key[key >= 0]
        first = torch.zeros_like(query)
        seen = torch.as_tensor(self.sees(first, first, query, key)).expand(query.shape)
        expected = query >= key
        if self.window is not None:
            expected &= query - key < self.window
        wrong = (seen != expected).nonzero()
        if len(wrong):
            at = int(wrong[0])
            verb = "sees" if bool(seen[at]) else "does not see"
            kind = "causal attention" if self.window is None else f"a causal window of {self.window} tokens"
            raise ValueError(
                f"{self.layer}: the mask is not that of {kind}: token {int(query[at])} {verb} token {int(key[at])}; "
                "chunked, bidirectional and other masks are not supported"
            )


class NotedMask:
    """Travels through the model's layers in the place of a mask."""

    def __init__(self, sees: MaskFunction) -> None:
        self.sees = sees

    def __getitem__(self, place: Any) -> NotedMask:
        """Layers with an indexer give it the part without heads."""
        return self


_calls: list[AttentionCall] = []


@contextmanager
def recorded_calls(model: Any) -> Iterator[list[AttentionCall]]:
    """Inside, the model's attention computes nothing, and the list gets what each layer asks for."""
    before = model.config._attn_implementation
    model.set_attn_implementation(RECORDER)
    _calls.clear()
    try:
        yield _calls
    finally:
        model.set_attn_implementation(before)


_COMPUTED_BY_PACKED_ROWS = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "indices"}
_WITHOUT_EFFECT = {
    "input_ids",
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}


def _note(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: NotedMask | Tensor | None,
    *,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    known = _COMPUTED_BY_PACKED_ROWS | _WITHOUT_EFFECT
    if getattr(module, "takes_relative_bias", False):  # packed rows have the biases of `relative_layers`
        known = known | set(_UNSUPPORTED)
    unknown = tuple(sorted(name for name, given in kwargs.items() if given is not None and name not in known))
    layer = f"layer {getattr(module, 'layer_idx', len(_calls))} ({type(module).__name__})"
    sees = attention_mask.sees if isinstance(attention_mask, NotedMask) else None
    made = attention_mask if isinstance(attention_mask, Tensor) else None
    _calls.append(AttentionCall(layer, sliding_window, sees, unknown, made))
    count, heads, rows, _ = query.shape
    return value.new_zeros(count, rows, heads, value.shape[-1]), None


def _note_mask(*args: Any, mask_function: MaskFunction, **kwargs: Any) -> Any:
    return NotedMask(mask_function)


AttentionInterface.register(RECORDER, _note)
AttentionMaskInterface.register(RECORDER, _note_mask)  # pyright: ignore[reportArgumentType]  # gives no tensor
