"""The crash ledger: which commands were running whenever the engine died, to find a command that kills the engine.

One small file, rewritten before and after each command, and never synced: it must survive the death of the process, not
of the machine, and the kernel's page cache is enough for that. A write costs microseconds; a commit would cost a good
part of a small command. Knows keys and counts; `recovery` knows what a key stands for, and which commands to skip.
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

from skyrl.runtime.processes.startup import read_running_file
from skyrl.storage.db.database import Displaced
from skyrl.storage.db.faults import OPERATIONAL_ERRORS

logger = logging.getLogger(__name__)

DEATHS_TO_BLAME = 2
"""A command is blamed after the engine has died this often while the command ran."""
DATABASE_TROUBLE = (*OPERATIONAL_ERRORS, Displaced)
"""A full disk, a lost connection, a claim taken by another server: the engine may die of these errors, but the running
command is not to blame."""


class CrashLedger:
    """The keys that run now, and how often the engine has died while each key ran. Threads may share one ledger."""

    def __init__(self, file: Path) -> None:
        """Read the previous engine's file: each key that was running gets one more death."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._running: list[str] = []
        self._recording = True
        self._dying = False
        """A block has raised: the engine ends."""
        self._counts = _read(file)
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._write()

    @property
    def counts(self) -> dict[str, int]:
        """Deaths of the engine by key, without keys whose block has succeeded since."""
        with self._lock:
            return dict(self._counts)

    @contextlib.contextmanager
    def running(
        self, keys: Sequence[str], not_blamed: tuple[type[Exception], ...] = DATABASE_TROUBLE
    ) -> Iterator[None]:
        """While the block runs, a death of this process counts against `keys`.

        If the block raises, the engine ends: that counts as a death, too, except for an error in `not_blamed`. What
        begins after that is not to blame. If the block succeeds, earlier deaths of `keys` are forgotten.
        """
        with self._lock:
            recorded = () if self._dying else keys
            self._running += recorded
            self._write()
        try:
            yield
        except not_blamed:
            self._ended(recorded)
            raise
        except BaseException:
            self._dying = True
            raise
        self._ended(recorded, succeeded=True)

    def forget_all_but(self, keys: Collection[str]) -> None:
        """Forget the deaths of all other keys: their commands have ended or will never run again."""
        with self._lock:
            self._counts = {key: count for key, count in self._counts.items() if key in keys}
            self._write()

    def stop_recording(self) -> None:
        """The engine was told to end: from now on, blame no command for its death."""
        with self._lock:
            self._recording = False
            self._write()

    def close(self) -> None:
        os.close(self._descriptor)

    def _ended(self, keys: Sequence[str], *, succeeded: bool = False) -> None:
        with self._lock:
            for key in keys:
                self._running.remove(key)
                if succeeded:
                    self._counts.pop(key, None)
            self._write()

    def _write(self) -> None:
        """Write one line in one call, which no signal interrupts. The rest of a longer earlier line may follow it in
        the file; `_read` ignores that."""
        running = self._running if self._recording else []
        line = json.dumps({"running": running, "deaths": self._counts}) + "\n"
        try:
            os.pwrite(self._descriptor, line.encode(), 0)
        except OSError as error:  # a full disk: if the engine dies now, no command is blamed
            logger.warning("the running commands could not be recorded: %s", error)


def _read(file: Path) -> dict[str, int]:
    """Deaths by key, including the last death; empty if the file is missing or damaged."""
    try:
        entry = read_running_file(file)
        return dict(Counter(entry["deaths"]) + Counter(entry["running"]))
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        logger.warning("%s is damaged: no command is blamed for the engine's deaths so far", file)
        return {}
