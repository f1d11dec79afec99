"""What captures a function's operations on a device, and starts them again at once.

Rules of a captured function (CUDA programming guide, "CUDA Graphs"; docs of `torch.cuda.CUDAGraph`): it neither waits
for the device nor copies from or to the host; its operations, their numbers and all addresses are the same in each
replay. Knows torch's graphs. Knows nothing of rows or of what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

Compute = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class Recorder(Protocol):
    """Captures functions on one device. All captures and replays come in the order in which their effects are wanted:
    on the current stream, from one thread at a time."""

    @property
    def held_bytes(self) -> int:
        """The device's memory that captured graphs hold for what they compute in between."""
        ...

    def capture(self, compute: Compute, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Callable[[], None]:
        """A function that runs the operations of compute(reads, writes) again. They read nothing else that may change,
        and leave `reads` as they are. What a replay computes lies in `writes` afterwards; a capture itself may leave
        anything there. Raises RuntimeError, such as torch.OutOfMemoryError, if it cannot capture."""
        ...

    def wait(self) -> None:
        """Return when no replay runs any more. Then graphs may be dropped."""
        ...

    def forget(self) -> None:
        """Give back what graphs have held. To be called when all of them have been dropped."""
        ...


class CudaRecorder:
    """CUDA graphs of one device, which share memory for what they compute in between: replays never overlap, and all
    that outlives a replay lies in `writes`.

    A function runs once on the capturing stream before it is captured, because libraries allocate workspaces and
    compile kernels at their first call, which a capture forbids. Other threads, which save adapters, go on using the
    device: so only calls of the capturing thread are checked (`thread_local`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()  # no memory yet
        self._stream = torch.cuda.Stream(device)
        self.held_bytes = 0

    def capture(self, compute: Compute, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Callable[[], None]:
        current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute(reads, writes)
            # Not `torch.cuda.graph`: it gives all cached memory back to the device, hundreds of times for one model
            self._stream.synchronize()
            before = torch.cuda.memory_reserved(self._device)
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute(reads, writes)
            except Exception:
                with suppress(RuntimeError):  # the first error says more
                    self._end(graph)
                raise
            self._end(graph)
            self.held_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        current.wait_stream(self._stream)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture. One that has waited for the device is invalid, and `capture_end` raises before it tells the
        allocator (torch: aten/src/ATen/cuda/CUDAGraph.cpp), which would never give cached memory or the pool back."""
        try:
            graph.capture_end()
        except RuntimeError:
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            with suppress(RuntimeError):  # of later versions of torch, which end it themselves
                torch._C._cuda_endAllocateToPool(index, self._pool)  # pyright: ignore[reportAttributeAccessIssue]
                torch._C._cuda_releasePool(index, self._pool)  # pyright: ignore[reportAttributeAccessIssue]
            raise

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def forget(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        self.held_bytes = 0
