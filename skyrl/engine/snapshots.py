"""Snapshots: the state of each model on disk, from which a restart goes on.

Taken after an optimizer step when the last one is old enough, which bounds how much is repeated; after every load,
because the checkpoint may be replaced or deleted later; and of models that do not step, because the log could forget
nothing of theirs. Knows files and a row's number; does not know how a model is restored from them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl.backends.base import Backend
from skyrl.config.server import ServerConfig
from skyrl.db import models as model_rows
from skyrl.db.database import Database
from skyrl.storage.directories import atomic_directory, link_files, remove, safe_name
from skyrl.types.command import ExecutedCommand
from skyrl.types.kinds import SAVES, Kind

OVERDUE_S = 60.0
"""How much later than the interval a model is snapshotted that does not step, in seconds."""
_ONLY_READ = SAVES | {Kind.FORWARD}
"""What leaves a model as it was."""


@dataclass
class _Behind:
    """Commands have run that a model's newest snapshot does not hold: since when (monotonic seconds), and whether any
    of them may have changed the model."""

    since: float
    changed: bool = False


class Snapshots:
    """The newest state of each model on disk: `snapshots/<model>/<first command that is not in it>`.

    Taken after an optimizer step when the last one is old, which leaves out the gradient; and, of a model that does not
    step, OVERDUE_S later than that. Until a snapshot holds a command, the database keeps its body.
    """

    def __init__(self, config: ServerConfig, database: Database, backend: Backend) -> None:
        self._root = config.snapshots_dir
        self._interval_s = config.snapshot_interval_s
        self._database = database
        self._backend = backend
        self._taken_at: dict[str, float] = {}
        self._newest: dict[str, int] = {}
        """By model, the number of its snapshot on disk."""
        self._behind: dict[str, _Behind] = {}

    def restored(self, model_id: str, next_seq: int, commands: Sequence[ExecutedCommand]) -> None:
        """A model is as its snapshot `next_seq` (0: it has none) and the commands after that have left it."""
        if next_seq > 0:
            self._newest[model_id] = next_seq
        for executed in commands:
            self.ran(model_id, executed.command.kind)

    def ran(self, model_id: str, kind: str) -> None:
        """A command of this model has run, whatever came of it."""
        behind = self._behind.setdefault(model_id, _Behind(time.monotonic()))
        behind.changed |= kind not in _ONLY_READ

    def after_step(self, model_id: str, next_seq: int) -> None:
        """Snapshot a model that has just stepped, if its last snapshot is old. Runs on the backend's thread."""
        now = time.monotonic()
        if now - self._taken_at.setdefault(model_id, now) >= self._interval_s:
            self.take(model_id, next_seq)

    def overdue(self) -> list[str]:
        """Models that have run commands for OVERDUE_S beyond the interval without a snapshot."""
        latest = time.monotonic() - self._interval_s - OVERDUE_S
        return [model_id for model_id, behind in list(self._behind.items()) if behind.since <= latest]

    def put_off(self, model_id: str) -> None:
        """A snapshot could not be taken: it is overdue again after as long a time."""
        self._behind[model_id].since = time.monotonic()

    def take(self, model_id: str, next_seq: int) -> None:
        """Snapshot a model in which all commands before `next_seq` are done. Runs on the backend's thread.

        Of a model that has not changed since its last snapshot only the name is new.
        """
        behind, newest = self._behind.get(model_id), self._newest.get(model_id)
        if newest != next_seq:  # else what has run came late, and is below the snapshot's number already
            self._write(model_id, next_seq, newest if behind is not None and not behind.changed else None)
            self._newest[model_id] = next_seq
        self._taken_at[model_id] = time.monotonic()
        self._behind.pop(model_id, None)

    def _write(self, model_id: str, next_seq: int, same: int | None) -> None:
        """`same`: the number of a snapshot with just this state."""
        target = self.path(model_id, next_seq)
        remove(target)
        with atomic_directory(target) as scratch:
            if same is None:
                self._backend.save_state(model_id, scratch)
            else:
                link_files(self.path(model_id, same), scratch)
        self._database.write(model_rows.set_model(model_id, next_seq=next_seq), power_safe=True)
        for old in target.parent.iterdir():
            if old != target:
                remove(old)

    def path(self, model_id: str, next_seq: int) -> Path:
        return self._root / safe_name(model_id) / str(next_seq)

    def disregard(self, model_id: str) -> None:
        """A model that is closed or has failed: it has no next snapshot."""
        for known in (self._taken_at, self._newest, self._behind):
            known.pop(model_id, None)

    def forget(self, model_id: str) -> None:
        """Delete what there is of a closed model."""
        self.disregard(model_id)
        remove(self._root / safe_name(model_id))
