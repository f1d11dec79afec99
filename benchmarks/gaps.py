"""Which threads of a run want a core at a time: shares of the run in which all, some or none of them do."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

EVERY_S = 0.02
MANY = 3
"""So many threads, or more, are counted together."""

Thread = tuple[int, int]
"""Process id and thread id."""


def wants_core(stat: str) -> bool:
    """Whether a thread runs or waits for a core, from the text of its `/proc/PID/task/TID/stat`."""
    return stat.rsplit(")", 1)[1].split()[0] == "R"


def shares(looks: Collection[str]) -> dict[str, float]:
    """What each look saw, as a share of all looks."""
    return {seen: count / len(looks) for seen, count in sorted(Counter(looks).items())}


class Gaps:
    """Looks at the threads every 20 ms, in a thread of its own, between `with` and its end. `named` threads are told
    apart; of these and `others` together only the number that wants a core is counted. A thread that has ended wants
    none."""

    def __init__(self, named: Mapping[str, Thread], others: Collection[Thread] = ()) -> None:
        self._named = {name: _stat_of(thread) for name, thread in named.items()}
        self._others = [_stat_of(thread) for thread in set(others) - set(named.values())]
        self._names: list[str] = []
        self._numbers: list[str] = []
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
            wanting = [name for name, stat in self._named.items() if _wants_core(stat)]
            number = len(wanting) + sum(map(_wants_core, self._others))
            self._names.append("+".join(wanting) or "none")
            self._numbers.append(str(number) if number < MANY else f"{MANY}+")

    def shares(self) -> tuple[dict[str, float], dict[str, float]]:
        """By the names of the threads that wanted a core ("none" if none did), and by the number of threads."""
        return shares(self._names), shares(self._numbers)


def _stat_of(thread: Thread) -> Path:
    process, number = thread
    return Path(f"/proc/{process}/task/{number}/stat")


def _wants_core(stat: Path) -> bool:
    try:
        return wants_core(stat.read_text())
    except (FileNotFoundError, ProcessLookupError):
        return False
