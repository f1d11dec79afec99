"""A process for one way of `benchmarks.trainer`, so that each way's peak of memory is its own.

The other ways' processes wait meanwhile. Knows processes and clocks. Knows nothing of rows or tables.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.processes import cpu_seconds, forget_peak, peak_resident_mb, resident_mb
from benchmarks.trainer_rows import TenantPass, tokens_of
from benchmarks.trainer_ways import Trained, Way

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.trainer_ways", "peft", "transformers.models.qwen3.modeling_qwen3"])
MIB = 2**20
Draw = Callable[[int], Sequence[TenantPass]]


@dataclass(frozen=True)
class Step:
    """Means over some steps: wall seconds, CPU seconds of all processes of the way, tokens, and the rows that went
    through the model. Of the last of them: its number, and its results."""

    wall_s: float
    cpu_s: float
    tokens: float
    rows: float
    number: int
    trained: list[Trained]


class Measured:
    """A way in this process, with its clocks and its memory. `draw`: the passes of each step, by its number."""

    def __init__(self, make: Callable[[], Way], draw: Draw, *, redrawn: bool) -> None:
        """Makes the way, and two steps that are not measured. Without `redrawn` all steps have the passes of the
        first."""
        disable_progress_bar()
        self._draw, self._redrawn = draw, redrawn
        self._passes, self._number = draw(0), 0
        self._way = make()
        self._way.start(self._passes)
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
            forget_peak()
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
        """The means of `count` steps, and the results of the last. Batches are drawn between the steps."""
        wall, cpu, tokens, rows = 0.0, 0.0, 0, 0.0
        trained: list[Trained] = []
        for _ in range(count):
            self._number += 1
            if self._redrawn:
                self._passes = self._draw(self._number)
                self._way.take(self._passes)
            cpu_before, before = self._cpu(), time.perf_counter()
            trained = self._way.step()
            wall += time.perf_counter() - before
            cpu += self._cpu() - cpu_before
            tokens += tokens_of(self._passes)
            rows += sum(each.rows for each in trained)
        return Step(wall / count, cpu / count, tokens / count, rows / count, self._number, trained)

    def _cpu(self) -> float:
        return time.process_time() + sum(map(cpu_seconds, self._pids))

    def close(self) -> None:
        self._way.close()


def _serve(connection: Any, make: Callable[[], Way], draw: Draw, redrawn: bool) -> None:
    """Answer calls of methods until `close`."""
    try:
        measured = Measured(make, draw, redrawn=redrawn)
        connection.send(("answer", None))
        while True:
            method, arguments = connection.recv()
            connection.send(("answer", getattr(measured, method)(*arguments)))
            if method == "close":
                return
    except Exception as error:
        connection.send(("failure", f"{type(error).__name__}: {error}"))


_OF_ANOTHER_BUILD = """
import sys
from multiprocessing.connection import Client
from benchmarks.trainer_process import _serve
connection = Client(sys.argv[1])
_serve(connection, *connection.recv())
"""


class WayProcess:
    """A `Measured` in a process of its own. Its arguments must be picklable. Raises RuntimeError for an error there.

    root: where the checkout of another build lies, whose modules then measure; what is pickled must be there, too."""

    def __init__(self, make: Callable[[], Way], draw: Draw, *, redrawn: bool, root: Path | None = None) -> None:
        if root is None:
            self._connection, other = _context.Pipe()
            process = _context.Process(target=_serve, args=(other, make, draw, redrawn))
            process.start()
            other.close()
            self._is_running, self._wait = process.is_alive, process.join
        else:
            with Listener() as listener:
                command = [sys.executable, "-c", _OF_ANOTHER_BUILD, str(listener.address)]
                started = subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
                self._connection = listener.accept()
            self._connection.send((make, draw, redrawn))
            self._is_running, self._wait = lambda: started.poll() is None, started.wait
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
        if self._is_running():
            self.call("close")
        self._wait()
