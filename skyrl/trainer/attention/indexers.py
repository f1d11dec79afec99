"""Sparse attention's indexers over packed rows: which tokens each query attends to (DeepSeek-V3.2, arXiv 2512.02556,
section 2.1).

`Indexing` puts a function in the place of each indexer's forward that scores packed rows where they are given, in
blocks, and calls transformers' own otherwise. The choice of a micro-batch's forward is kept for its backward: a layer
that is computed again chooses nothing anew. Layers that share another layer's choice get it from transformers' model.
Where a sequence has no more tokens than are chosen, nothing is scored. No gradient goes through scores.
At start-up the choice is compared with transformers', for fewer tokens than the model's own number.
Knows transformers' indexers and grids of rows. Knows nothing of adapters; `sparse` attends.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from skyrl.trainer.attention.packed_attention import SCORES_BYTES, NotedMask, PackedGroups
from skyrl.trainer.attention.sparse import Chosen, by_segment, causal, in_cells, packed
from skyrl.trainer.collectives import gathered
from skyrl.trainer.rows.packing import PackedItem, Shape
from skyrl.trainer.rows.prefixes import Layout
from skyrl.trainer.shares import SequencePart

_ROPE: dict[str, str | None] = {
    "DeepseekV32Indexer": "apply_rotary_pos_emb",
    "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave",
    "Glm5NextTextIndexer": None,
}
"""How each kind of indexer turns its queries and keys: by a function of its module."""
FEW = 16
"""So many tokens, or two pools, are chosen when the choice is compared: the sequences of the comparison are short."""
_NOTHING = Chosen(())


@dataclass
class IndexedRows:
    """Stands in the place of a micro-batch's mask, and tells indexers its rows. `recomputed`: whether backward computes
    the decoder layers again. given: bool [rows, rows] for each layer with an indexer, what rows attend to whatever it
    chooses; None: its choice."""

    groups: PackedGroups | SequencePart
    recomputed: bool
    given: Mapping[int, Tensor] | None = None
    chosen: dict[int, Chosen] = field(default_factory=dict[int, Chosen])
    """By layer: what backward needs again, or what is to be compared."""

    def __getitem__(self, place: Any) -> IndexedRows:
        """transformers' layers take the part of a mask that has no heads."""
        return self

    def choice(self, layer: int, choose: Callable[[], Chosen], device: torch.device) -> Chosen:
        made = self.chosen.get(layer)
        if made is None:
            made = choose()
            if self.recomputed or self.given is not None:
                self.chosen[layer] = made
        if self.given is None or not isinstance(self.groups, PackedGroups):
            return made
        return Chosen.from_rows(self.given[layer], self.groups.with_window(None, device)[0])


class Indexing:
    """The indexers of a model's decoder layers."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """Raises ValueError for an indexer that is not known."""
        modules = [module for layer in layers for module in layer.modules()]
        self._indexers: list[Any] = [module for module in modules if type(module).__name__.endswith("Indexer")]
        self._recorded: dict[int, list[Tensor]] = {}
        """What transformers' indexers have chosen for each sequence, by layer: [tokens, n], -1 for none."""
        self._records = False
        self._given: Mapping[int, Tensor] | None = None
        self._last: IndexedRows
        self.difference = 0.0
        """At the last `following`, how many tokens packed rows chose otherwise in a layer, as a share of its choice."""
        for indexer in self._indexers:
            _check_known(indexer)
            indexer.forward = functools.partial(self._forward, indexer, indexer.forward)
        for module in modules:
            if hasattr(module, "build_attention_mask_from_topk"):
                built: Any = module
                built.build_attention_mask_from_topk = _either(built.build_attention_mask_from_topk)

    @property
    def any(self) -> bool:
        return bool(self._indexers)

    def masks(self, groups: PackedGroups | SequencePart, *, recomputed: bool) -> dict[str, IndexedRows | None]:
        """What the decoder takes in place of the masks of its kinds of layers."""
        self._last = IndexedRows(groups, recomputed, self._given)
        return {"indexed_attention": self._last, "linear_attention": None}

    def _forward(self, indexer: Any, stock: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """The indexer's forward, with packed rows or a mask among its arguments."""
        names = ("hidden_states", "q_resid")
        hidden, q_resid, *args = (*given, *(named.pop(name) for name in names[len(given) :]))
        masks = [each for each in (*args, *named.values()) if isinstance(each, (IndexedRows, NotedMask))]
        if not masks:
            made = stock(hidden, q_resid, *args, **named)
            if self._records:
                self._recorded.setdefault(indexer.layer_idx, []).append(made[0])
            return made
        rows = masks[0]
        if not isinstance(rows, IndexedRows):
            return _NOTHING
        turns = next((each for each in args if isinstance(each, tuple)), None)
        choose = functools.partial(_choose, indexer, hidden, q_resid, turns, rows.groups)
        return rows.choice(indexer.layer_idx, choose, hidden.device)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, transformers' indexers choose few tokens for each of some sequences, and their choice is recorded."""
        self._recorded = {}
        self._records = True
        try:
            with self._few():
                yield
        finally:
            self._records = False

    @contextmanager
    def following(self, packed_item: PackedItem) -> Iterator[None]:
        """Inside, the recorded choice is used, and compared with the one of packed rows. `packed_item`: the sequences
        of the last `recording`, alone in their micro-batch; without one, nothing is compared."""
        if not self._recorded:
            yield
            return
        rows = packed_item.stop - packed_item.start
        given = {layer: _seen_by_rows(of_layer, packed_item.layout, rows) for layer, of_layer in self._recorded.items()}
        self._given = given
        try:
            with self._few():
                yield
        finally:
            self._given = None
        groups = self._last.groups
        assert isinstance(groups, PackedGroups)
        grids, _ = groups.with_window(None, packed_item.tokens.device)
        other = [
            float((self._last.chosen[layer].of_rows(grids, rows) != seen).sum() / seen.sum())
            for layer, seen in given.items()
        ]
        self.difference = max(other)

    @contextmanager
    def _few(self) -> Iterator[None]:
        own = [indexer.index_topk for indexer in self._indexers]
        for indexer in self._indexers:
            indexer.index_topk = min(indexer.index_topk, max(FEW, 2 * _pool(indexer)))
        try:
            yield
        finally:
            for indexer, count in zip(self._indexers, own, strict=True):
                indexer.index_topk = count


def _check_known(indexer: Any) -> None:
    kind = type(indexer).__name__
    if kind not in _ROPE:
        raise ValueError(f"how {kind} chooses tokens is not known; known are {', '.join(_ROPE)}")
    if not getattr(indexer, "index_kpool_always_select_tail", True):
        raise ValueError(f"{kind} leaves out the last tokens (index_kpool_always_select_tail), which is not supported")


def _either(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The layer's own mask of chosen tokens; the choice itself where rows are packed."""

    @functools.wraps(stock)
    def build(topk_indices: Any, *args: Any, **kwargs: Any) -> Any:
        return topk_indices if isinstance(topk_indices, Chosen) else stock(topk_indices, *args, **kwargs)

    return build


def _seen_by_rows(recorded: Sequence[Tensor], layout: Layout, rows: int) -> Tensor:
    """What was recorded for the sequences of a layout, as bool [rows, rows]. Tokens after a query are left out: where
    there are few tokens before it, an indexer fills up with these."""
    seen = torch.zeros(rows, rows, dtype=torch.bool, device=recorded[0].device)
    for chosen, of_sequence in zip(recorded, layout.rows_of, strict=True):
        own = torch.from_numpy(of_sequence).to(chosen.device)
        tokens = len(own)
        # One more column takes the place of none
        marks = torch.zeros(tokens, tokens + 1, dtype=torch.bool, device=chosen.device)
        marks.scatter_(1, chosen.long().remainder(tokens + 1), True)
        seen[own[:, None], own] = marks[:, :tokens].tril()
    return seen


def _pool(indexer: Any) -> int:
    """How many consecutive tokens are chosen together."""
    return getattr(indexer, "index_kpool", 1)


@dataclass(frozen=True)
class _States:
    """What an indexer makes of rows, or of a call's segments in place of `rows`. query: [rows, heads, dim]; weights:
    float32 [rows, heads]; key: [rows, dim]; gate: as key, of pools."""

    query: Tensor
    weights: Tensor
    key: Tensor
    gate: Tensor | None


@torch.no_grad()
def _choose(
    indexer: Any,
    hidden: Tensor,
    q_resid: Tensor,
    turns: tuple[Tensor, Tensor] | None,
    groups: PackedGroups | SequencePart,
) -> Chosen:
    """hidden: [1, rows, hidden]; q_resid: [1, rows, rank]; turns: cosines and sines [1, rows, rope_dim]."""
    if isinstance(groups, SequencePart):
        if _sees_all(indexer, groups.bounds[-1]):
            return Chosen((None,))
        return Chosen((_choose_in_part(indexer, _states(indexer, hidden, q_resid, turns), groups),))
    grids, _ = groups.with_window(None, hidden.device)
    dense = [_sees_all(indexer, shape.before + shape.longest) for shape, _ in grids.calls]
    if all(dense):
        return Chosen((None,) * len(dense))
    rows = _states(indexer, hidden, q_resid, turns)
    query, weights = in_cells(rows.query, grids.queries), in_cells(rows.weights, grids.queries)
    key = in_cells(rows.key, grids.keys)
    gate = None if rows.gate is None else in_cells(rows.gate, grids.keys)
    bits: list[Tensor | None] = []
    first_query = first_key = 0
    for (shape, bundles), sees_all in zip(grids.calls, dense, strict=True):
        of_queries = slice(first_query, first_query + bundles * shape.queries)
        of_keys = slice(first_key, first_key + bundles * shape.keys)
        first_query, first_key = of_queries.stop, of_keys.stop
        if sees_all:
            bits.append(None)
            continue
        of_call = _States(
            query[of_queries].unflatten(0, (-1, shape.longest)),
            weights[of_queries].unflatten(0, (-1, shape.longest)),
            by_segment(key[of_keys], shape, bundles),
            None if gate is None else by_segment(gate[of_keys], shape, bundles),
        )
        bits.append(_choose_in(indexer, of_call, shape))
    return Chosen(tuple(bits))


def _sees_all(indexer: Any, tokens: int) -> bool:
    """Whether each query of a sequence sees all tokens before it."""
    return tokens // _pool(indexer) <= indexer.index_topk // _pool(indexer)


def _choose_in_part(indexer: Any, rows: _States, part: SequencePart) -> Tensor:
    """`Chosen.bits` of this rank's rows. Every rank gets the keys of all."""
    states = rows.key if rows.gate is None else torch.cat([rows.key, rows.gate], dim=1)
    width = states.shape[1]
    sizes = [width * part.rows_of(rank) for rank in range(part.ranks)]
    earlier = gathered(states.reshape(-1), sizes).view(-1, width)[None, : part.stop]
    key, *gates = earlier.split(rows.key.shape[1], dim=2)
    of_part = _States(rows.query[None], rows.weights[None], key, gates[0] if gates else None)
    bits = _choose_in(indexer, of_part, Shape(part.stop - part.start, 1, part.start))
    return nn.functional.pad(bits, (0, -(-part.bounds[-1] // 8) - bits.shape[2]))


def _states(indexer: Any, hidden: Tensor, q_resid: Tensor, turns: tuple[Tensor, Tensor] | None) -> _States:
    query = indexer.wq_b(q_resid).unflatten(2, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden))
    turn = _ROPE[type(indexer).__name__]
    if turn is not None and turns is not None:
        size = indexer.qk_rope_head_dim
        turned = vars(sys.modules[type(indexer).__module__])[turn](
            query[..., :size], key[:, :, None, :size], *turns, unsqueeze_dim=2
        )
        query = torch.cat([turned[0], query[..., size:]], dim=-1)
        key = torch.cat([turned[1][:, :, 0], key[..., size:]], dim=-1)
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float() * indexer.n_heads**-0.5
    gate = None
    if _pool(indexer) > 1:
        gate = nn.functional.linear(hidden, indexer.index_kpool_compress_gate)[0]
    return _States(query[0], weights[0], key[0], gate)


def _choose_in(indexer: Any, states: _States, shape: Shape) -> Tensor:
    """`Chosen.bits` of a call. states: of its segments, [segments, longest, ...] of queries and weights, [segments,
    before + longest, ...] of keys and gates."""
    segments, longest = states.weights.shape[:2]
    pool = _pool(indexer)
    keys = states.key.float() if states.gate is None else _pooled(indexer, states.key, states.gate)
    count = shape.before + longest
    bits = torch.zeros(segments, longest, -(-count // 8), dtype=torch.uint8, device=keys.device)
    step = max(1, SCORES_BYTES // (4 * segments * indexer.n_heads * keys.shape[1]))
    for start in range(0, longest, step):
        stop = min(longest, start + step)
        visible = causal(shape, keys.device, range(start, stop))
        # A pool is there for a query from its last token on
        candidates = visible[:, pool - 1 :: pool]
        of_queries = states.query[:, start:stop], states.weights[:, start:stop]
        scores = _scores(indexer, *of_queries, keys[:, : candidates.shape[1]])
        scores.masked_fill_(~candidates, float("-inf"))
        found = scores.topk(min(indexer.index_topk // pool, scores.shape[2]), dim=2).indices
        seen = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, found, True) & candidates
        if pool > 1:
            seen = _with_tail(seen, visible, pool)
        of_block = packed(seen)
        bits[:, start:stop, : of_block.shape[2]] = of_block
    return bits


def _scores(indexer: Any, query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Of each query the sum over heads of weight * relu(query . key): float32 [segments, queries, keys]. query:
    [segments, queries, heads, dim]; weights: [segments, queries, heads]; keys: float32 [segments, keys, dim]."""
    products = query.float().flatten(1, 2) @ keys.transpose(1, 2)
    of_heads = products.mul_(indexer.softmax_scale).relu_().unflatten(1, query.shape[1:3])
    return (weights[:, :, None] @ of_heads)[:, :, 0]


def _pooled(indexer: Any, key: Tensor, gate: Tensor) -> Tensor:
    """The keys of whole pools, each a mean of its tokens' keys with the gates' softmax as weights: float32 [segments,
    pools, dim]."""
    pool = _pool(indexer)
    count = key.shape[1] // pool * pool
    logits = gate[:, :count].unflatten(1, (-1, pool)).float() + indexer.index_kpool_compress_ape.float()
    shares = logits.softmax(dim=2).to(key.dtype)
    return (shares * key[:, :count].unflatten(1, (-1, pool))).sum(dim=2).float()


def _with_tail(pools: Tensor, visible: Tensor, pool: int) -> Tensor:
    """The tokens of chosen pools [segments, queries, pools], and those that are visible and in no whole pool yet: bool
    [segments, queries, tokens]."""
    tokens = visible.shape[1]
    count = visible.sum(1, keepdim=True)
    tail = visible & (torch.arange(tokens, device=visible.device) >= count - count % pool)
    of_pools = pools.repeat_interleave(pool, dim=2)
    return torch.nn.functional.pad(of_pools, (0, tokens - of_pools.shape[2])) | tail
