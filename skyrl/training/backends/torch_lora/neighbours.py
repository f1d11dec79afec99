"""What ranks that compute parts of one sequence send to each other.

Every rank calls these functions in the same order, in backward and in layers that are computed again, too. What one
rank sends to another has the shape that the other one expects. Uses torch.distributed's default process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from skyrl.training.backends.torch_lora.sequence_part import SequencePart


class Exchange:
    """Tensors on their way: `sent` to the rank `to`, and others from the rank `source` into `expected`, which are
    contiguous. None: no rank."""

    def __init__(self, sent: Sequence[Tensor], to: int | None, expected: Sequence[Tensor], source: int | None) -> None:
        self._sent = [tensor.contiguous() for tensor in sent] if to is not None else []
        self._received = list(expected) if source is not None else []
        operations = [dist.P2POp(dist.isend, tensor, to, tag=tag) for tag, tensor in enumerate(self._sent)]
        operations += [dist.P2POp(dist.irecv, tensor, source, tag=tag) for tag, tensor in enumerate(self._received)]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        """The tensors that came; none without a source."""
        for work in self._works:
            work.wait()
        self._sent = []
        return self._received


def after_rows_before(rows: Tensor, count: int, part: SequencePart) -> Tensor:
    """The part's rows [rows, ...] after the last `count` rows of the rank before, which are zero for the first rank.
    Every part has at least so many rows. The gradient of those rows goes back to the rank that has them."""
    made: Tensor = _RowsBefore.apply(rows, count, part)
    return made


class _RowsBefore(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int, part: SequencePart) -> Tensor:
        ctx.count, ctx.part = count, part
        before = rows.new_zeros(count, *rows.shape[1:])
        Exchange([rows[-count:]], part.after, [before], part.before).wait()
        return torch.cat([before, rows])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        of_before, of_rows = gradient[: ctx.count], gradient[ctx.count :].clone()
        of_after = of_before.new_zeros(of_before.shape)
        Exchange([of_before], ctx.part.before, [of_after], ctx.part.after).wait()
        of_rows[-ctx.count :] += of_after
        return of_rows, None, None


def state_before(like: Tensor, part: SequencePart, anchor: Tensor) -> Tensor:
    """The state that the rank before has passed on with `pass_on`, with the shape and dtype of `like`; zero for the
    first rank. `anchor`: a tensor that the backward reaches, so that the state's gradient goes back."""
    made: Tensor = _StateBefore.apply(like, part, anchor)
    return made


class _StateBefore(Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, part: SequencePart, anchor: Tensor) -> Tensor:
        ctx.part = part
        state = like.new_zeros(like.shape)
        Exchange([], None, [state], part.before).wait()
        return state

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        Exchange(gradients, ctx.part.before, [], None).wait()
        return None, None, None


def pass_on(output: Tensor, state: Tensor, part: SequencePart) -> Tensor:
    """The output, after the state has gone to the rank after this one. The backward of the output waits for the state's
    gradient from there."""
    made: Tensor = _PassOn.apply(output, state, part)
    return made


class _PassOn(Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, state: Tensor, part: SequencePart) -> Tensor:
        ctx.part = part
        ctx.empty, ctx.shape = state.new_empty(0), state.shape
        Exchange([state], part.after, [], None).wait()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        of_state = ctx.empty.new_zeros(ctx.shape)
        Exchange([], None, [of_state], ctx.part.after).wait()
        return gradient, of_state, None
