"""What ranks compute together and send each other: sums in a fixed order, agreement on failures, and what the ranks
that compute parts of one sequence exchange.

Every rank calls these functions in the same order, in backward and in layers that are computed again, too. Uses
torch.distributed's default process group. A rank without a group is alone: nothing is sent, and what all ranks agree on
is its own. Knows nothing of adapters or passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from skyrl.trainer.device import failure_of
from skyrl.trainer.shares import SequencePart

CHUNK = 2**20
"""Elements that each rank sums at a time. The exchange takes three buffers of `CHUNK` times the number of ranks."""
T = TypeVar("T")


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


class SameFailureEverywhere(Exception):
    """All ranks know that a command has failed, and none of them has changed anything. `error` is this rank's failure;
    None on a rank where all went well."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(str(error))
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle drops the cause of an exception. Whether a file system or a hub was the cause decides what follows."""
        cause = None if self.error is None else self.error.__cause__
        return _agreed, (self.error, OSError(str(cause)) if isinstance(cause, OSError) else None)


def _agreed(error: Exception | None, cause: OSError | None) -> SameFailureEverywhere:
    if error is not None:
        error.__cause__ = cause
    return SameFailureEverywhere(error)


def on_all_or_none(action: Callable[[], T], device: torch.device) -> T:
    """Run an action that changes nothing and calls no collectives. Raises SameFailureEverywhere on every rank if it
    fails on one."""
    failure: Exception | None = None
    made: list[T] = []
    try:
        made.append(action())
    except Exception as error:  # `agree` raises it on every rank
        failure = sendable(failure_of(error, device))
    agree(failure)
    return made[0]


def agree(failure: Exception | None) -> None:
    """Raises SameFailureEverywhere on every rank if one of them has a failure."""
    if any(failed_anywhere([failure is not None])):
        raise SameFailureEverywhere(failure)


def sendable(error: Exception) -> Exception:
    """The error as one that any process can read: an exception of torch may have no way through pickle."""
    if type(error).__module__.split(".")[0] in ("builtins", "skyrl"):
        return error
    sent = RuntimeError(f"{type(error).__name__}: {error}")
    sent.__cause__ = error.__cause__
    return sent.with_traceback(error.__traceback__)


def failed_anywhere(failed: Sequence[bool]) -> list[bool]:
    """For each place, whether it is true on any rank."""
    if not failed or _alone():
        return list(failed)
    flags = torch.tensor(failed, dtype=torch.int32)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags]


def total_norm(own: float) -> float:
    """The norm of a vector of which each rank has a part with the norm `own`; the same bits on all ranks."""
    if _alone():
        return own
    norms = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    _all_gather(norms, torch.tensor([own], dtype=torch.float64))
    return math.sqrt(sum(norm * norm for norm in norms.tolist()))


def is_same_everywhere(number: int) -> bool:
    """Whether all ranks have given the same number, of 63 bits."""
    if _alone():
        return True
    bounds = torch.tensor([number, -number], dtype=torch.int64)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    return bool(bounds[0] == -bounds[1])


def summed_in_rank_order(partial: Tensor | None, holders: Sequence[int], numel: int, device: torch.device) -> Tensor:
    """The sum of the partial sums of the ranks `holders` (ascending), added in their order: flat float32 [numel].

    Every rank calls this at the same time, and all get the same bits. The result takes the place of this rank's
    partial sum. Each rank sums a part of every chunk and sends it to the others: so a rank receives about twice the
    buffer, whatever the number of ranks.
    """
    if partial is None:
        partial = torch.zeros(numel, dtype=torch.float32, device=device)
    if _alone():
        return partial
    ranks = dist.get_world_size()
    if len(holders) == 1:
        dist.broadcast(partial, src=holders[0])
        return partial
    width = min(CHUNK, -(-numel // ranks))
    sent = partial.new_zeros(ranks * width)
    received = torch.empty_like(sent)
    for start in range(0, numel, ranks * width):
        stop = min(start + ranks * width, numel)
        sent[: stop - start] = partial[start:stop]
        dist.all_to_all_single(received, sent)
        of_rank = received.view(ranks, width)
        total = of_rank[holders[0]].clone()
        for other in holders[1:]:
            total += of_rank[other]
        _all_gather(received, total)
        partial[start:stop] = received[: stop - start]
    return partial


def gathered(own: Tensor, sizes: Sequence[int]) -> Tensor:
    """The vectors of all ranks, one after the other; of rank r with sizes[r] elements."""
    most = max(sizes)
    sent = own.new_zeros(most)
    sent[: len(own)] = own
    received = own.new_empty(len(sizes) * most)
    _all_gather(received, sent)
    return torch.cat([of_rank[:size] for of_rank, size in zip(received.split(most), sizes, strict=True)])


class SumInRankOrder:
    """FSDP2's reduce-scatter: each rank gets the sum of its part, added in the order of the ranks. So the same numbers
    give the same bits, which an algorithm of gloo does not promise. It takes the memory of its input once more."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first, *others = received.view(group.size(), -1)
        output_tensor.copy_(first)
        for other in others:
            output_tensor.add_(other)


def _all_gather(received: Tensor, sent: Tensor) -> None:
    gather = getattr(dist, "all_gather_single", None)  # its name as of torch 2.13
    (dist.all_gather_into_tensor if gather is None else gather)(received, sent)


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
