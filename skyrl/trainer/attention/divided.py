"""Causal attention of one sequence whose rows are divided over ranks.

Each rank has consecutive rows. It sends its keys and values to the ranks whose queries see them, one rank at a time,
while it attends to those that it already has; in backward each rank sends back the gradients of what it got. So a rank
never has more than its own keys and values and those of two others.

Late rows see more keys than early ones. So without a sliding window each rank gives the queries of its second half to
its partner, the first rank to the last one and so on, and gets their outputs back: then all ranks compute equally much.

Keys come in parts, and in blocks: the softmax goes on from part to part by the logarithm of its sum ("Ring Attention
with Blockwise Transformers", arXiv 2310.01889; the formulas of the backward are those of FlashAttention, arXiv
2205.14135). The scores of two blocks are in memory at a time. Knows nothing of models or adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from skyrl.trainer.attention.relative import RelativeBias, bias_of
from skyrl.trainer.attention.sparse import unpacked
from skyrl.trainer.collectives import Exchange
from skyrl.trainer.shares import SequencePart

BLOCK_BYTES = 16 * 2**20
"""Of the float32 scores of one block of queries and one of keys."""
LARGEST_BLOCK = 1024
_SMALLEST_BLOCK = 64


@dataclass(frozen=True)
class Scoring:
    """`scale` multiplies the scores; `window` and `softcap` as in `attention_kernels`."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass
class SoftmaxSum:
    """What queries have made of the keys so far: `output` [heads, q, value_dim], and `sums` [heads, q], the logarithms
    of the softmax's sums; both float32."""

    output: Tensor
    sums: Tensor

    @staticmethod
    def begin(query: Tensor, value_dim: int, sinks: Tensor | None) -> SoftmaxSum:
        """Before the first key. query: [heads, q, head_dim]; sinks: [heads], scores without a value."""
        heads, rows, _ = query.shape
        output = query.new_zeros(heads, rows, value_dim, dtype=torch.float32)
        if sinks is None:  # not -inf, of which differences are not a number
            return SoftmaxSum(output, torch.full_like(output[..., 0], torch.finfo(torch.float32).min))
        return SoftmaxSum(output, sinks.float()[:, None].expand(heads, rows).clone())


@dataclass(frozen=True)
class ChosenKeys:
    """Which keys queries see of those up to themselves. bits: uint8 [q, ...], one for each token of the sequence; the
    first key is its token `start`."""

    bits: Tensor
    start: int


def attend_to(
    running: SoftmaxSum,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance: int,
    scoring: Scoring,
    chosen: ChosenKeys | None = None,
    relative: RelativeBias | None = None,
) -> None:
    """Add keys to what the queries have attended to, in place. query: [heads, q, head_dim], key [kv_heads, k,
    head_dim], value [kv_heads, k, value_dim]; the first query is `distance` tokens after the first key, or before it if
    that is negative. A query sees the keys up to itself, or those `chosen` of them. relative: with states [heads, q,
    n]."""
    kv_heads = len(key)
    for rows, columns in _blocks(len(query), query.shape[1], key.shape[1], distance, scoring.window):
        states = _grouped(query[:, rows], kv_heads)
        scores, _ = _scores(states, key[:, columns], scoring)
        if relative is not None:
            scores += _bias(relative, rows, columns, distance).view_as(scores)
        scores = _masked(scores, rows, columns, distance, scoring.window, chosen)
        most = scores.amax(-1).clamp_(min=torch.finfo(torch.float32).min)  # -inf of a query that sees no key here
        weights = scores.sub_(most[..., None]).exp_()
        own_sums = most + weights.sum(-1).log()
        made = weights.to(value.dtype).flatten(1, 2) @ value[:, columns]
        sums = running.sums[:, rows]
        own_sums, most = own_sums.flatten(0, 1), most.flatten(0, 1)
        together = torch.logaddexp(sums, own_sums)
        output = running.output[:, rows]
        output.mul_((sums - together).exp_()[..., None])
        output.addcmul_(made.view(output.shape).float(), (most - together).exp_()[..., None])
        sums.copy_(together)


@dataclass(frozen=True)
class Attended:
    """Queries [heads, q, head_dim] that have attended to all their keys. sums: `SoftmaxSum.sums`. gradient: of their
    outputs [heads, q, value_dim]. delta: float32 [heads, q], the sum of each output times its gradient. `relative`: as
    in `attend_to`; `of_relative`: float32, what its gradients are added to."""

    query: Tensor
    sums: Tensor
    gradient: Tensor
    delta: Tensor
    relative: RelativeBias | None = None
    of_relative: RelativeBias | None = None


def gradients_to(
    of_query: Tensor,
    of_key: Tensor,
    of_value: Tensor,
    attended: Attended,
    key: Tensor,
    value: Tensor,
    distance: int,
    scoring: Scoring,
    chosen: ChosenKeys | None = None,
) -> None:
    """Add the gradients by way of these keys, in place, to float32 tensors like query, key and value. The keys are as
    in `attend_to`."""
    query = attended.query
    kv_heads = len(key)
    for rows, columns in _blocks(len(query), query.shape[1], key.shape[1], distance, scoring.window):
        states = _grouped(query[:, rows], kv_heads)
        keys, values = key[:, columns], value[:, columns]
        scores, slope = _scores(states, keys, scoring)
        if attended.relative is not None:
            scores += _bias(attended.relative, rows, columns, distance).view_as(scores)
        scores = _masked(scores, rows, columns, distance, scoring.window, chosen)
        weights = scores.sub_(_by_kv_head(attended.sums[:, rows], kv_heads)[..., None]).exp_().flatten(1, 2)
        of_output = _grouped(attended.gradient[:, rows], kv_heads).to(value.dtype)
        of_value[:, columns] += weights.to(value.dtype).transpose(1, 2) @ of_output
        of_scores = (of_output @ values.transpose(1, 2)).float()
        of_scores = of_scores.sub_(_by_kv_head(attended.delta[:, rows], kv_heads).flatten(1, 2)[..., None]).mul_(
            weights
        )
        if attended.relative is not None and attended.of_relative is not None:
            _add_gradients(attended.of_relative, attended.relative, of_scores, rows, columns, distance)
        if slope is not None:
            of_scores.mul_(slope)
        of_scores = of_scores.mul_(scoring.scale).to(query.dtype)
        of_query[:, rows] += (of_scores @ keys).view(len(query), -1, query.shape[2])
        of_key[:, columns] += of_scores.transpose(1, 2) @ states


def _blocks(heads: int, rows: int, columns: int, distance: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries and keys of which some query sees some key."""
    size = LARGEST_BLOCK
    while size > _SMALLEST_BLOCK and 4 * heads * size * size > BLOCK_BYTES:
        size //= 2
    for row in range(0, rows, size):
        last_row = min(row + size, rows)
        for column in range((columns - 1) // size * size, -1, -size):
            last_column = min(column + size, columns)
            if column > last_row - 1 + distance:
                continue
            if window is not None and row + distance - (last_column - 1) >= window:
                break
            yield slice(row, last_row), slice(column, last_column)


def _grouped(states: Tensor, kv_heads: int) -> Tensor:
    """[heads, q, dim] as [kv_heads, heads / kv_heads * q, dim]: the queries that read one head of keys."""
    heads, rows, dim = states.shape
    return states.reshape(kv_heads, heads // kv_heads * rows, dim)


def _by_kv_head(numbers: Tensor, kv_heads: int) -> Tensor:
    """[heads, q] as [kv_heads, heads / kv_heads, q]."""
    return numbers.reshape(kv_heads, -1, numbers.shape[-1])


def _scores(states: Tensor, keys: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
    """float32 [kv_heads, grouped queries, k], and with soft-capping its derivative."""
    scores = (states @ keys.transpose(1, 2)).float().mul_(scoring.scale)
    if scoring.softcap is None:
        return scores, None
    capped = scores.div_(scoring.softcap).tanh_()
    slope = 1 - capped * capped
    return capped.mul_(scoring.softcap), slope


def _bias(relative: RelativeBias, rows: slice, columns: slice, distance: int) -> Tensor:
    """[heads, rows, columns]."""
    places = torch.arange(rows.start + distance, rows.stop + distance, device=relative.states.device)
    apart = places[:, None] - torch.arange(columns.start, columns.stop, device=places.device)
    return bias_of(relative.states[:, rows], relative.profiles, apart)


def _add_gradients(
    total: RelativeBias, relative: RelativeBias, of_scores: Tensor, rows: slice, columns: slice, distance: int
) -> None:
    """Add those by way of a block's biases. of_scores: float32 [kv_heads, grouped queries, columns]."""
    used = RelativeBias(*(each.detach().requires_grad_() for each in (relative.states, relative.profiles)))
    with torch.enable_grad():
        bias = _bias(used, rows, columns, distance)
    of_bias = of_scores.view(bias.shape).to(bias.dtype)
    of_states, of_profiles = torch.autograd.grad(bias, (used.states, used.profiles), of_bias)
    total.states[:, rows] += of_states[:, rows]
    total.profiles.add_(of_profiles)


def _masked(
    scores: Tensor, rows: slice, columns: slice, distance: int, window: int | None, chosen: ChosenKeys | None
) -> Tensor:
    """[kv_heads, grouped queries, k] as [kv_heads, heads / kv_heads, q, k], -inf where a query does not see a key."""
    count = rows.stop - rows.start
    scores = scores.view(len(scores), -1, count, scores.shape[-1])
    if chosen is not None:
        seen = unpacked(chosen.bits[rows], columns.stop - columns.start, chosen.start + columns.start)
        scores.masked_fill_(~seen, float("-inf"))
    first, last = rows.start + distance, rows.stop - 1 + distance
    seen = columns.stop - 1 <= first and (window is None or last - columns.start < window)
    if seen:
        return scores
    places = torch.arange(first, last + 1, device=scores.device)[:, None]
    apart = places - torch.arange(columns.start, columns.stop, device=scores.device)
    unseen = apart < 0 if window is None else (apart < 0) | (apart >= window)
    return scores.masked_fill_(unseen, float("-inf"))


def divided_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: SequencePart,
    scoring: Scoring,
    sinks: Tensor | None,
    bits: Tensor | None = None,
    relative: RelativeBias | None = None,
) -> Tensor:
    """query [heads, rows, head_dim], key [kv_heads, rows, head_dim] and value [kv_heads, rows, value_dim] of this
    rank's rows; returns [heads, rows, value_dim] in the query's dtype. sinks: as `attention_kernels.attend`; frozen.
    bits: uint8 [1, rows, ...], of each row for each token of the sequence whether it is chosen; None: all are.
    relative: with states [heads, rows, n]."""
    of_queries = (None, None) if relative is None else (relative.states, relative.profiles)
    sharing = _Sharing(part, scoring.window)
    made: Tensor = _DividedAttention.apply(query, key, value, *of_queries, sinks, bits, sharing, scoring)
    return made


@dataclass(frozen=True)
class _Keys:
    """Keys and values [kv_heads, k, ...] of one rank; `start`: the place of the first of them in the sequence."""

    key: Tensor
    value: Tensor
    start: int

    def of(self, bits: Tensor | None) -> ChosenKeys | None:
        """What queries with these bits see of them."""
        return None if bits is None else ChosenKeys(bits, self.start)


@dataclass(frozen=True)
class _Sharing:
    """Which queries and keys the ranks give each other. With a `window` all ranks have equally much to compute, and
    keep their queries."""

    part: SequencePart
    window: int | None

    @property
    def partner(self) -> int | None:
        """The rank that computes the second half of this rank's queries; None: this rank."""
        partner = self.part.partner
        return None if self.window is not None or partner == self.part.rank else partner

    @property
    def starts(self) -> tuple[int, int]:
        """Where the two halves that this rank computes begin in the sequence."""
        second = self.part.rank if self.partner is None else self.partner
        return self.part.start, self.part.middle_of(second)

    def sees(self, rank: int, other: int) -> bool:
        """Whether queries that `rank` computes see keys of `other`."""
        bounds = self.part.bounds
        if self.window is None:
            return other <= max(rank, self.part.ranks - 1 - rank)
        return other <= rank and bounds[rank] - (bounds[other + 1] - 1) < self.window

    def ranks_at(self, step: int) -> tuple[int | None, int | None]:
        """The rank that gets this rank's keys in a step, and the rank whose keys this one gets."""
        own, ranks = self.part.rank, self.part.ranks
        to, source = (own + step) % ranks, (own - step) % ranks
        return (to if self.sees(to, own) else None), (source if self.sees(own, source) else None)

    def halves(self, rows: Tensor) -> list[Tensor]:
        """[heads, rows, ...] in two."""
        middle = self.part.middle_of(self.part.rank) - self.part.start
        return [rows[:, :middle], rows[:, middle:]]

    def given(self, *of_rows: Tensor) -> list[list[Tensor]]:
        """For each [heads, rows, ...], of this rank's rows, the two halves that this rank computes."""
        halves = [self.halves(rows) for rows in of_rows]
        if self.partner is not None:
            self._swap(halves, self.part.bounds[self.partner + 1] - self.part.middle_of(self.partner))
        return halves

    def given_back(self, halves: list[Tensor]) -> Tensor:
        """The other way round: [heads, rows, ...] of this rank's rows."""
        both = [halves]
        self._swap(both, self.part.stop - self.part.middle_of(self.part.rank))
        return torch.cat(both[0], dim=1)

    def _swap(self, halves: list[list[Tensor]], count: int) -> None:
        """Put the partner's second halves, of `count` rows, in the place of the second halves."""
        if self.partner is None:
            return
        sent = [second for _, second in halves]
        expected = [each.new_empty(len(each), count, *each.shape[2:]) for each in sent]
        for pair, received in zip(halves, Exchange(sent, self.partner, expected, self.partner).wait(), strict=True):
            pair[1] = received


class _DividedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        states: Tensor | None,
        profiles: Tensor | None,
        sinks: Tensor | None,
        bits: Tensor | None,
        sharing: _Sharing,
        scoring: Scoring,
    ) -> Tensor:
        queries, *others = sharing.given(query, *([] if states is None else [states]))
        biases = _biases(others, profiles)
        chosen: list[Tensor | None] = [None, None]
        if bits is not None:
            chosen = [half[0] for half in sharing.given(bits)[0]]
        running = [SoftmaxSum.begin(half, value.shape[2], sinks) for half in queries]
        for keys in _steps(key, value, sharing):
            if keys is not None:
                of_halves = zip(queries, running, sharing.starts, chosen, biases, strict=True)
                for half, state, start, own, bias in of_halves:
                    attend_to(state, half, keys.key, keys.value, start - keys.start, scoring, keys.of(own), bias)
        output = sharing.given_back([state.output.to(query.dtype) for state in running])
        of_states = others[0] if others else [None, None]
        ctx.save_for_backward(*queries, *(state.sums for state in running), *of_states, profiles, key, value, output)
        ctx.sharing, ctx.scoring, ctx.chosen = sharing, scoring, chosen
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *saved, profiles, key, value, output = ctx.saved_tensors
        queries, sums, of_states = saved[:2], saved[2:4], saved[4:]
        biases = _biases([of_states] if profiles is not None else [], profiles)
        of_biases = [None if bias is None else bias.zeros() for bias in biases]
        sharing: _Sharing = ctx.sharing
        scoring: Scoring = ctx.scoring
        (gradient,) = gradients
        of_outputs, deltas = sharing.given(gradient, (gradient.float() * output.float()).sum(-1))
        halves = zip(queries, sums, of_outputs, deltas, biases, of_biases, strict=True)
        attended = [Attended(*of_half) for of_half in halves]
        of_queries = [torch.zeros_like(half, dtype=torch.float32) for half in queries]
        own = [torch.zeros_like(each, dtype=torch.float32) for each in (key, value)]
        for step, keys in enumerate(_steps(key, value, sharing)):
            found: list[Tensor] = own
            if keys is not None:
                if step:
                    found = [torch.zeros_like(each, dtype=torch.float32) for each in (keys.key, keys.value)]
                for of_query, half, start, bits in zip(of_queries, attended, sharing.starts, ctx.chosen, strict=True):
                    distance, of_bits = start - keys.start, keys.of(bits)
                    gradients_to(of_query, found[0], found[1], half, keys.key, keys.value, distance, scoring, of_bits)
            if step:
                later, source = sharing.ranks_at(step)
                exchange = Exchange(found, source, [each.new_empty(each.shape) for each in own], later)
                for total, received in zip(own, exchange.wait(), strict=later is not None):
                    total += received
        of_query = sharing.given_back([half.to(gradient.dtype) for half in of_queries])
        of_states = of_profiles = None
        if profiles is not None:
            sums = [bias for bias in of_biases if bias is not None]
            of_states = sharing.given_back([bias.states.to(gradient.dtype) for bias in sums])
            of_profiles = torch.stack([bias.profiles for bias in sums]).sum(0).to(profiles.dtype)
        nothing = (None, None, None, None)
        return of_query, own[0].to(key.dtype), own[1].to(value.dtype), of_states, of_profiles, *nothing


def _biases(halves: Sequence[Sequence[Tensor]], profiles: Tensor | None) -> list[RelativeBias | None]:
    """halves: of the states of both halves of the queries, if there are any."""
    if profiles is None:
        return [None, None]
    return [RelativeBias(states, profiles) for states in halves[0]]


def _steps(key: Tensor, value: Tensor, sharing: _Sharing) -> Iterator[_Keys | None]:
    """The keys and values of the part, then those of the rank before it, and so on around; None where no query sees
    them. Every rank makes the same steps, because it sends its own keys in each. Those of the next step are on their
    way while the caller computes."""
    part = sharing.part
    current: _Keys | None = _Keys(key, value, part.start)
    for step in range(1, part.ranks + 1):
        exchange: Exchange | None = None
        source: int | None = None
        if step < part.ranks:
            to, source = sharing.ranks_at(step)
            rows = 0 if source is None else part.rows_of(source)
            expected = [states.new_empty(len(states), rows, states.shape[2]) for states in (key, value)]
            exchange = Exchange([key, value], to, expected, source)
        yield current
        current = None
        if exchange is not None:
            received = exchange.wait()
            if source is not None:
                current = _Keys(received[0], received[1], part.bounds[source])
