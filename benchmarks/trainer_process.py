"""A process for one way of `benchmarks.trainer`, so that each way's peak of memory is its own.

The other ways' processes wait meanwhile. Knows processes and clocks. Knows nothing of rows or tables.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.processes import cpu_seconds, peak_resident_mb, resident_mb
from benchmarks.trainer_rows import TenantPass
from benchmarks.trainer_ways import Trained, Way

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.trainer_ways", "peft", "transformers.models.qwen3.modeling_qwen3"])
MIB = 2**20


@dataclass(frozen=True)
class Step:
    """Wall seconds, CPU seconds of all processes of the way, and results."""

    wall_s: float
    cpu_s: float
    trained: list[Trained]


class Measured:
    """A way in this process, with its clocks and its memory."""

    def __init__(self, make: Callable[[], Way], passes: Sequence[TenantPass]) -> None:
        """Makes the way, and two steps that are not measured."""
        disable_progress_bar()
        self._way = make()
        self._way.start(passes)
        self._way.step()
        self._pids = self._way.pids()
        self._second = self.step(1)

    def steps_within(self, seconds: float) -> int:
        """How many steps take so long; at least one."""
        return max(1, round(seconds / self._second.wall_s))

    def watch_memory(self) -> None:
        """Count the peak from now on."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated() / MIB
        else:
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory, which the step would use again
            Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak: proc_pid_clear_refs(5)
            self._held = resident_mb(os.getpid())

    def peak_mb(self) -> float | None:
        """MiB of the largest amount since `watch_memory`, above what the way held then: base model, adapters, moments.
        None if other processes do the work."""
        if self._pids:
            return None
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() / MIB - self._held
        return peak_resident_mb(os.getpid()) - self._held

    def step(self, count: int) -> Step:
        """The mean of `count` steps, and the results of the last."""
        cpu, wall = self._cpu(), time.perf_counter()
        trained: list[Trained] = []
        for _ in range(count):
            trained = self._way.step()
        return Step((time.perf_counter() - wall) / count, (self._cpu() - cpu) / count, trained)

    def _cpu(self) -> float:
        return time.process_time() + sum(map(cpu_seconds, self._pids))

    def close(self) -> None:
        self._way.close()


def _serve(connection: Any, make: Callable[[], Way], passes: Sequence[TenantPass]) -> None:
    """Answer calls of methods until `close`."""
    try:
        measured = Measured(make, passes)
        connection.send(("answer", None))
        while True:
            method, arguments = connection.recv()
            connection.send(("answer", getattr(measured, method)(*arguments)))
            if method == "close":
                return
    except Exception as error:
        connection.send(("failure", f"{type(error).__name__}: {error}"))


class WayProcess:
    """A `Measured` in a process of its own. `make` must be picklable. Raises RuntimeError for an error there."""

    def __init__(self, make: Callable[[], Way], passes: Sequence[TenantPass]) -> None:
        self._connection, other = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(other, make, passes))
        self._process.start()
        other.close()
        self._answer()

    def call(self, method: str, *arguments: Any) -> Any:
        self._connection.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            kind, value = self._connection.recv()
        except EOFError:
            raise RuntimeError("the process has ended; was it killed for its memory?") from None
        if kind == "failure":
            raise RuntimeError(value)
        return value

    def close(self) -> None:
        if self._process.is_alive():
            self.call("close")
        self._process.join()
