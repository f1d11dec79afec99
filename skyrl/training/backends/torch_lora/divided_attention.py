"""Causal attention of one sequence whose rows are divided over ranks.

Each rank has consecutive rows. It sends its keys and values to the ranks after it, one of them at a time, while it
attends to those that it already has; in backward each rank sends back the gradients of what it got. So a rank never
has more than its own keys and values and those of two others. Knows nothing of models or adapters.
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
    made: Tensor = _DividedAttention.apply(query, key, value, sinks, part, scoring)
    return made


@dataclass(frozen=True)
class Earlier:
    """Keys and values [kv_heads, k, ...] of one rank; the part begins `distance` tokens after the first of them."""

    key: Tensor
    value: Tensor
    distance: int


class _DividedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        part: SequencePart,
        scoring: Scoring,
    ) -> Tensor:
        running = Running.begin(query, value.shape[2], sinks)
        for earlier in _steps(key, value, part, scoring.window):
            if earlier is not None:
                attend_to(running, query, earlier.key, earlier.value, earlier.distance, scoring)
        output = running.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, running.sums)
        ctx.part, ctx.scoring = part, scoring
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        part: SequencePart = ctx.part
        scoring: Scoring = ctx.scoring
        (gradient,) = gradients
        attended = Attended(query, sums, gradient, delta=(gradient.float() * output.float()).sum(-1))
        of_query, of_key, of_value = (torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value))
        own = [of_key, of_value]
        for step, earlier in enumerate(_steps(key, value, part, scoring.window)):
            found: list[Tensor] = own
            if earlier is not None:
                if step:
                    states = (earlier.key, earlier.value)
                    found = [torch.zeros_like(each, dtype=torch.float32) for each in states]
                gradients_to(
                    of_query, found[0], found[1], attended, earlier.key, earlier.value, earlier.distance, scoring
                )
            if step:
                later, before = _ranks_at(part, step)
                exchange = Exchange(found, before, [each.new_empty(each.shape) for each in own], later)
                for total, received in zip(own, exchange.wait(), strict=later is not None):
                    total += received
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def _ranks_at(part: SequencePart, step: int) -> tuple[int | None, int | None]:
    """The rank that gets this rank's keys in a step, and the rank whose keys this one gets."""
    to, source = part.rank + step, part.rank - step
    return (to if to < part.ranks else None), (source if source >= 0 else None)


def _steps(key: Tensor, value: Tensor, part: SequencePart, window: int | None) -> Iterator[Earlier | None]:
    """The keys and values of the part, then those of the rank before it, and so on; None where there is no such rank.
    Every rank makes the same steps, because it sends its own keys in each. Those of the next step are on their way
    while the caller computes."""
    distance = 0
    current: Earlier | None = Earlier(key, value, distance)
    last = part.reach(window)
    for step in range(last + 1):
        exchange: Exchange | None = None
        if step < last:
            later, before = _ranks_at(part, step + 1)
            rows = 0 if before is None else part.rows_of(before)
            expected = [states.new_empty(len(states), rows, states.shape[2]) for states in (key, value)]
            exchange = Exchange([key, value], later, expected, before)
            distance += rows
        yield current
        current = None
        if exchange is not None and (received := exchange.wait()):
            current = Earlier(received[0], received[1], distance)
