"""Ranks in processes of this machine, without Ray: the RankGroup of most tests.

The processes are forked from one server that has imported torch and transformers. A process serves one group after the
other. The group on Ray is `skyrl.engine.rank_actors`, and `tests/ray` tests it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from skyrl.runtime.processes.ports import free_port
from skyrl.trainer.protocol import RankDied
from skyrl.trainer.ranks.full_rank import FullRank
from skyrl.trainer.ranks.lora_rank import ExpertRank, LoraRank
from skyrl.trainer.ranks.rank import RankBase, RankSettings

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["skyrl.trainer.ranks.full_rank"])
_names = itertools.count()


def _serve(connection: Connection) -> None:
    """Make ranks and run their methods until the other end closes."""
    rank: Any = None
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            if method == "start":
                rank_class, *settings = arguments
                rank = rank_class(*settings)
                answer: tuple[str, Any] = ("answer", None)
            else:
                answer = ("answer", rank.answer(method, arguments))
        except BaseException as error:
            answer = ("failure", f"{type(error).__name__}: {error}")
        connection.send(answer)


class _Process:
    def __init__(self) -> None:
        self.connection, other = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.join()
        self.connection.close()


def rank_of(backend: Any) -> Any:
    """The rank of a backend on this process's device."""
    return backend.group.rank


class LocalRanks:
    """A RankGroup. `pids` are the processes of its ranks."""

    _idle: list[_Process] = []
    """Processes of closed groups, which the next group uses."""

    def __init__(self, ranks: int, settings: RankSettings, rank_class: type[RankBase] = LoraRank) -> None:
        """`rank_class`: a class of a test's module, whose processes serve no other group."""
        self.size = ranks
        self._shared = rank_class in (LoraRank, ExpertRank, FullRank)
        self._timeout_s = settings.timeout_s
        self._lock = threading.Lock()
        self._died: str | None = None
        self._processes = [self._idle.pop() if self._idle and self._shared else _Process() for _ in range(ranks)]
        for rank, process in enumerate(self._processes):
            process.connection.send(("start", (rank_class, rank, ranks, settings)))
        self._answers(range(ranks))
        self.call("join", "127.0.0.1", free_port(""), f"group{next(_names)}")

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self._ask(range(self.size), method, [arguments] * self.size)

    def call_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        return self._ask(range(self.size), method, arguments)

    def read(self, method: str, *arguments: Any) -> Any:
        return self._ask(range(1), method, [arguments])[0]

    def read_all(self, method: str, *arguments: Any) -> list[Any]:
        return self.call(method, *arguments)

    def _ask(self, ranks: range, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        with self._lock:
            if self._died is not None:
                raise RankDied(self._died)
            with suppress(BrokenPipeError):
                for rank in ranks:
                    self._processes[rank].connection.send((method, arguments[rank]))
            return self._answers(ranks)

    def _answers(self, ranks: range) -> list[Any]:
        waiting: dict[Any, int] = {self._processes[rank].connection: rank for rank in ranks}
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), 2 * self._timeout_s)
            if not ready:
                self._fail(f"rank {min(waiting.values())} has not answered")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    kind, answers[rank] = connection.recv()
                except (EOFError, OSError):
                    kind, answers[rank] = "failure", "it has ended"
                if kind == "failure":
                    self._fail(f"rank {rank}: {answers[rank]}")
        return [answers[rank] for rank in ranks]

    def _fail(self, why: str) -> None:
        self._died = why
        raise RankDied(why)

    def close(self) -> None:
        if self._died is None and self._shared:
            self.call("leave")
            self._idle += self._processes
        else:
            for process in self._processes:
                process.end()
        self._processes = []
