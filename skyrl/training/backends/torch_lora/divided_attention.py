"""Causal attention of one sequence whose rows are divided over ranks.

Each rank has consecutive rows. It sends its keys and values to the ranks whose queries see them, one rank at a time,
while it attends to those that it already has; in backward each rank sends back the gradients of what it got. So a rank
never has more than its own keys and values and those of two others.

Late rows see more keys than early ones. So without a sliding window each rank gives the queries of its second half to
its partner, the first rank to the last one and so on, and gets their outputs back: then all ranks compute equally much.
Knows nothing of models or adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from skyrl.training.backends.torch_lora.block_attention import Attended, Running, Scoring, attend_to, gradients_to
from skyrl.training.backends.torch_lora.neighbours import Exchange
from skyrl.training.backends.torch_lora.sequence_part import SequencePart


def divided_attention(
    query: Tensor, key: Tensor, value: Tensor, part: SequencePart, scoring: Scoring, sinks: Tensor | None
) -> Tensor:
    """query [heads, rows, head_dim], key [kv_heads, rows, head_dim] and value [kv_heads, rows, value_dim] of this
    rank's rows; returns [heads, rows, value_dim] in the query's dtype. sinks: as `attention_kernels.attend`; frozen."""
    made: Tensor = _DividedAttention.apply(query, key, value, sinks, _Sharing(part, scoring.window), scoring)
    return made


@dataclass(frozen=True)
class _Keys:
    """Keys and values [kv_heads, k, ...] of one rank; `start`: the place of the first of them in the sequence."""

    key: Tensor
    value: Tensor
    start: int


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
        sinks: Tensor | None,
        sharing: _Sharing,
        scoring: Scoring,
    ) -> Tensor:
        (queries,) = sharing.given(query)
        running = [Running.begin(half, value.shape[2], sinks) for half in queries]
        for keys in _steps(key, value, sharing):
            if keys is not None:
                for half, state, start in zip(queries, running, sharing.starts, strict=True):
                    attend_to(state, half, keys.key, keys.value, start - keys.start, scoring)
        output = sharing.given_back([state.output.to(query.dtype) for state in running])
        ctx.save_for_backward(*queries, *(state.sums for state in running), key, value, output)
        ctx.sharing, ctx.scoring = sharing, scoring
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *saved, key, value, output = ctx.saved_tensors
        queries, sums = saved[:2], saved[2:]
        sharing: _Sharing = ctx.sharing
        scoring: Scoring = ctx.scoring
        (gradient,) = gradients
        of_outputs, deltas = sharing.given(gradient, (gradient.float() * output.float()).sum(-1))
        attended = [Attended(*of_half) for of_half in zip(queries, sums, of_outputs, deltas, strict=True)]
        of_queries = [torch.zeros_like(half, dtype=torch.float32) for half in queries]
        own = [torch.zeros_like(each, dtype=torch.float32) for each in (key, value)]
        for step, keys in enumerate(_steps(key, value, sharing)):
            found: list[Tensor] = own
            if keys is not None:
                if step:
                    found = [torch.zeros_like(each, dtype=torch.float32) for each in (keys.key, keys.value)]
                for of_query, half, start in zip(of_queries, attended, sharing.starts, strict=True):
                    distance = start - keys.start
                    gradients_to(of_query, found[0], found[1], half, keys.key, keys.value, distance, scoring)
            if step:
                later, source = sharing.ranks_at(step)
                exchange = Exchange(found, source, [each.new_empty(each.shape) for each in own], later)
                for total, received in zip(own, exchange.wait(), strict=later is not None):
                    total += received
        of_query = sharing.given_back([half.to(gradient.dtype) for half in of_queries])
        return of_query, own[0].to(key.dtype), own[1].to(value.dtype), None, None, None


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
