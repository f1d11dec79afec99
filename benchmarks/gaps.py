"""Which of some threads want a core at a time: shares of a run in which all, some or none of them do."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

EVERY_S = 0.01


def wants_core(stat: str) -> bool:
    """Whether a thread runs or waits for a core, from the text of its `/proc/PID/task/TID/stat`."""
    return stat.rsplit(")", 1)[1].split()[0] == "R"


def shares(counts: Mapping[tuple[str, ...], int]) -> dict[str, float]:
    """Counts of looks by the names of the threads that wanted a core, as shares of all looks. No name: `none`."""
    total = sum(counts.values())
    return {"+".join(names) or "none": count / total for names, count in sorted(counts.items())} if total else {}


class Gaps:
    """Looks at the threads every 10 ms, in a thread of its own, between `with` and its end. `threads`: name to process
    id and thread id."""

    def __init__(self, threads: Mapping[str, tuple[int, int]]) -> None:
        self._stats = {name: Path(f"/proc/{pid}/task/{thread}/stat") for name, (pid, thread) in threads.items()}
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._end = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="gaps", daemon=True)

    def __enter__(self) -> Gaps:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._end.wait(EVERY_S):
            self._counts[tuple(name for name, stat in self._stats.items() if wants_core(stat.read_text()))] += 1

    def shares(self) -> dict[str, float]:
        return shares(self._counts)
