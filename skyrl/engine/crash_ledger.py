"""The crash ledger: which commands were running whenever the engine died. So a poison command is found.

One small file, rewritten before and after each command, and never synced: it must outlive the process, not the machine,
and for that the kernel's page cache is enough. A write costs microseconds; a commit would cost a good part of a small
command. Knows keys and counts; recovery knows what a key stands for, and decides what follows.
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
"""If the engine has died so many times while one command ran, the command is blamed."""
DATABASE_TROUBLE = (*OPERATIONAL_ERRORS, Displaced)
"""A full disk, a lost connection, a claim that another server has taken: the engine may die of these, but the command
that it was running is not to blame."""


class CrashLedger:
    """What runs now, and how often the engine has died while the same ran before. Threads may share it."""

    def __init__(self, file: Path) -> None:
        """Read the file of the engine before this one: whatever was running then gets one more death."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._running: list[str] = []
        self._listening = True
        self._counts = _read(file)
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._write()

    @property
    def counts(self) -> dict[str, int]:
        """Deaths of the engine by key. A key whose block has ended well since is not in it."""
        with self._lock:
            return dict(self._counts)

    @contextlib.contextmanager
    def watching(self, keys: Sequence[str], innocent: tuple[type[Exception], ...] = DATABASE_TROUBLE) -> Iterator[None]:
        """While the block runs, a death of this process counts against `keys`.

        If the block raises, the engine ends: that counts too, unless the error is one of `innocent`. When the block
        ends well, earlier deaths of `keys` are forgotten.
        """
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
        """Forget the deaths of all other keys: what these stand for has ended, or will never run again."""
        with self._lock:
            self._counts = {key: count for key, count in self._counts.items() if key in keys}
            self._write()

    def disregard(self) -> None:
        """The engine was told to end: from now on its death is nobody's fault."""
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
        """One call writes all, and no signal cuts it short. A longer text from before may stay behind the line's end;
        readers ignore it."""
        running = self._running if self._listening else []
        line = json.dumps({"running": running, "deaths": self._counts}) + "\n"
        try:
            os.pwrite(self._descriptor, line.encode(), 0)
        except OSError as error:  # a full disk: if the engine dies now, nothing is blamed
            logger.warning("what runs could not be noted: %s", error)


def _read(file: Path) -> dict[str, int]:
    """Deaths by key, with the last one; empty if there is no such file, or if it is damaged."""
    try:
        noted = json.loads(file.read_text().partition("\n")[0])
        return dict(Counter(noted["deaths"]) + Counter(noted["running"]))
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        logger.warning("%s is damaged; nothing is held against the commands that were running", file)
        return {}
