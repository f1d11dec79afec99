"""A torch.distributed group of a trainer and the workers that sample. Apart from the default group: trainer and vLLM
each have their own. Imports torch alone, because vLLM's workers import it too.

Prefixes and order of calls are those of the usual recipe of RL frameworks (a TCP store, a prefix with the group's name,
torch's helper for new groups), so a trainer that forms its side by that recipe meets this one.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, TCPStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import GroupName, PrefixStore

BACKENDS = ("gloo", "nccl")
_CARRIED = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""gloo and NCCL both know these. All others travel as bytes."""
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_BYTES_AT_ONCE = 64 * 2**20
"""Of tensors that are on their way at the same time, besides the first of them. One at a time, each waits until the
threads of all members have had their turn: 7 ms on a machine whose cores are all in use."""


class GroupError(Exception):
    """The group was not formed, or failed. It cannot be used again; form another, with another name."""


class Group:
    """One member. Make it with `join`."""

    def __init__(self, group: ProcessGroup, store: distributed_c10d.Store, rank: int, timeout: timedelta) -> None:
        self._group: ProcessGroup | None = group
        self._store: distributed_c10d.Store | None = store
        self._rank = rank
        self._timeout = timeout

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send rank 0's `tensor`, or fill this one with it. All members call this with the same shape and dtype.
        Returns when the values are there. Raises GroupError, at the latest after the group's timeout; ValueError for a
        tensor to fill that is not contiguous."""
        deque(self.broadcast_each([tensor]), maxlen=0)

    def broadcast_each(self, tensors: Iterable[torch.Tensor]) -> Generator[torch.Tensor]:
        """As `broadcast` of one after the other, with several of them on their way at once: a tensor is taken from
        `tensors` up to 64 MiB ahead. Gives each when its values are there. Raises as `broadcast`; when this ends, no
        tensor is on its way any more."""
        started, size = deque[tuple[torch.Tensor, distributed_c10d.Work]](), 0
        try:
            for tensor in tensors:
                started.append((tensor, self._start(tensor)))
                size += tensor.nbytes
                while size - started[0][0].nbytes > _BYTES_AT_ONCE:
                    size -= started[0][0].nbytes
                    yield self._ended(*started.popleft())
            while started:
                yield self._ended(*started.popleft())
        finally:
            for _, work in started:  # after an error; each ends with the group's timeout at the latest
                with contextlib.suppress(RuntimeError):
                    work.wait(self._timeout)

    def _start(self, tensor: torch.Tensor) -> distributed_c10d.Work:
        if self._group is None:
            raise GroupError("the group is closed")
        options = distributed_c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if self._rank == 0:
            tensor = tensor.contiguous()  # gloo sends the memory as it lies, and does not look at strides
        elif not tensor.is_contiguous():
            raise ValueError("only a contiguous tensor can be filled")
        if tensor.dtype not in _CARRIED:
            tensor = tensor.reshape(-1).view(torch.uint8)
        try:
            return self._group.broadcast([tensor], options)
        except RuntimeError as error:
            raise GroupError(f"rank {self._rank}: {_first_line(error)}") from error

    def _ended(self, tensor: torch.Tensor, work: distributed_c10d.Work) -> torch.Tensor:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise GroupError(f"rank {self._rank}: {_first_line(error)}") from error
        return tensor

    def close(self) -> None:
        """Leave the group. A second call changes nothing."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError):  # of a group that has failed
                distributed_c10d.destroy_process_group(group)


def listen(address: str, world: int, timeout_s: float) -> TCPStore:
    """The store of a new group, on a free port of this machine, its `port`. Open it before the others are told to join:
    one that comes too early tries again only after a second. Raises GroupError if `address` does not lead here."""
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(address, 0, world, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        raise GroupError(f"{address}: {_first_line(error)}") from error


def join(
    address: str,
    port: int,
    rank: int,
    world: int,
    name: str,
    backend: str,
    timeout_s: float,
    store: TCPStore | None = None,
) -> Group:
    """Wait until all `world` members are there. Rank 0, the trainer, has the `store` of `listen`, or opens `port`.
    `timeout_s` bounds this call, and each broadcast later. Raises GroupError, ValueError (an argument)."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    if not 0 <= rank < world:
        raise ValueError(f"rank: {rank} is not in a group of {world}")
    timeout = timedelta(seconds=timeout_s)
    try:
        if store is None:
            store = TCPStore(address, port, world, is_master=rank == 0, timeout=timeout, multi_tenant=True)
        with _errors_are_raised(backend):
            group, _ = distributed_c10d._new_process_group_helper(
                world, rank, [], backend, PrefixStore(name, store), group_name=GroupName(name), timeout=timeout
            )
        distributed_c10d._world.pg_group_ranks[group] = {one: one for one in range(world)}  # torch's clean-up reads it
    except RuntimeError as error:
        raise GroupError(f"rank {rank} of {world} at {address}:{port}: {_first_line(error)}") from error
    return Group(group, store, rank, timeout)


@contextlib.contextmanager
def _errors_are_raised(backend: str) -> Iterator[None]:
    """A new NCCL group reads this variable. Without it NCCL ends the whole process when a member is away too long."""
    if backend != "nccl":
        yield
        return
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


def _first_line(error: BaseException) -> str:
    """Without the place in torch's source code."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^\]]*\] *", "", line) or type(error).__name__
