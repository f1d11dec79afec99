"""Which commands were running whenever the engine died: the mark that a poison command leaves.

One small file, rewritten before and after what runs and never synced: it has to outlive the process, and for that the
kernel's page cache is enough. That costs microseconds, where a commit would cost a good part of a small command.
Knows keys and counts. What a key stands for, and what becomes of it, is recovery's business.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from skyrl.db.faults import OPERATIONAL_ERRORS
from skyrl.db.fence import Displaced

logger = logging.getLogger(__name__)

POISON = 2
"""So many deaths of the engine while one command ran are that command's fault."""
DATABASE_TROUBLE = (*OPERATIONAL_ERRORS, Displaced)
"""A full disk, a lost connection, a claim that another server has taken: the engine may die of it, but not through what
it was running."""


class CrashLedger:
    """What runs now, and how often the engine died while it ran. Threads may share it."""

    def __init__(self, file: Path) -> None:
        """Counts what the engine before this one was running when it died."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._running: list[str] = []
        self._listening = True
        self._counts = _read(file)
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._write()

    @property
    def counts(self) -> dict[str, int]:
        """Deaths of the engine by key, of what has not come to its end since."""
        with self._lock:
            return dict(self._counts)

    @contextlib.contextmanager
    def watching(self, keys: Sequence[str], innocent: tuple[type[Exception], ...] = DATABASE_TROUBLE) -> Iterator[None]:
        """While the block runs, a death of this process is held against `keys`. So is what it raises, because an engine
        ends by that; but not one of `innocent`. Once the block has ended well, earlier deaths are forgotten."""
        with self._lock:
            self._running += keys
            self._write()
        try:
            yield
        except innocent:
            self._ended(keys)
            raise
        self._ended(keys, well=True)

    def forget_all_but(self, keys: Collection[str]) -> None:
        """The others' deaths count no longer: they have come to an end, or never will."""
        with self._lock:
            self._counts = {key: count for key, count in self._counts.items() if key in keys}
            self._write()

    def disregard(self) -> None:
        """The engine was told to end: whatever it still runs, its death will not be that command's fault."""
        with self._lock:
            self._listening = False
            self._write()

    def close(self) -> None:
        os.close(self._descriptor)

    def _ended(self, keys: Sequence[str], *, well: bool = False) -> None:
        with self._lock:
            for key in keys:
                self._running.remove(key)
                if well:
                    self._counts.pop(key, None)
            self._write()

    def _write(self) -> None:
        """In one call, which a signal does not cut short; what a longer text left behind the line's end is ignored."""
        running = self._running if self._listening else []
        line = json.dumps({"running": running, "deaths": self._counts}) + "\n"
        try:
            os.pwrite(self._descriptor, line.encode(), 0)
        except OSError as error:  # a full disk; if the engine dies now, nobody will be blamed
            logger.warning("what runs could not be noted: %s", error)


def _read(file: Path) -> dict[str, int]:
    """Deaths by key, the last one included; nothing if there is no such file, or it is damaged."""
    try:
        noted = json.loads(file.read_text().partition("\n")[0])
        return dict(Counter(noted["deaths"]) + Counter(noted["running"]))
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        logger.warning("%s is damaged; nothing is held against the commands that were running", file)
        return {}
