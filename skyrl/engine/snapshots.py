"""Snapshots: the state of each model on disk, from which an engine that starts goes on.

A snapshot is taken at three moments:

- after an optimizer step, when the last snapshot is old: this bounds how much a restart repeats;
- after every load, because the checkpoint may be replaced or deleted later;
- when a model has run commands for long, but has not stepped: the database keeps the bodies of all commands that no
  snapshot holds.

Knows directories and the numbers of commands. What lies in a snapshot is the backend's business.
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
from skyrl.storage.directories import atomic_directory, link_tree, remove, safe_name
from skyrl.types.command import ExecutedCommand
from skyrl.types.kinds import SAVES, Kind

OVERDUE_S = 60.0
"""A model that does not step is snapshotted so many seconds later than the interval."""
_ONLY_READ = SAVES | {Kind.FORWARD}
"""Commands that leave a model as it was."""


@dataclass
class _Behind:
    """Commands have run that the model's newest snapshot does not hold. `since` is when the first one ran, in monotonic
    seconds; `changed` says whether any of them may have changed the model."""

    since: float
    changed: bool = False


class Snapshots:
    """The newest state of each model, in `snapshots/<model>/<number>`.

    The number is that of the first command that the snapshot does not hold. The model's row has it, too, as `next_seq`.
    A snapshot after a step needs no gradient: the step has just cleared it.
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
        """A model was restored from snapshot `next_seq` (0: from none), and `commands` were repeated after it."""
        if next_seq > 0:
            self._newest[model_id] = next_seq
        for executed in commands:
            self.ran(model_id, executed.command.kind)

    def ran(self, model_id: str, kind: str) -> None:
        """A command of this model has run, with or without success."""
        behind = self._behind.setdefault(model_id, _Behind(time.monotonic()))
        behind.changed |= kind not in _ONLY_READ

    def after_step(self, model_id: str, next_seq: int) -> None:
        """Snapshot a model that has just stepped, if its last snapshot is old. Runs on the backend's thread."""
        now = time.monotonic()
        if now - self._taken_at.setdefault(model_id, now) >= self._interval_s:
            self.take(model_id, next_seq)

    def overdue(self) -> list[str]:
        """Models whose commands have waited for a snapshot for the interval and OVERDUE_S more."""
        latest = time.monotonic() - self._interval_s - OVERDUE_S
        return [model_id for model_id, behind in list(self._behind.items()) if behind.since <= latest]

    def put_off(self, model_id: str) -> None:
        """A snapshot could not be taken: count the time until the next try from now."""
        self._behind[model_id].since = time.monotonic()

    def take(self, model_id: str, next_seq: int) -> None:
        """Snapshot a model in which all commands before `next_seq` are done. Runs on the backend's thread.

        If the model has not changed since its last snapshot, that snapshot only gets a new number.
        """
        behind, newest = self._behind.get(model_id), self._newest.get(model_id)
        if newest != next_seq:  # if equal, the commands that ran came late: their numbers are below the snapshot's
            self._write(model_id, next_seq, newest if behind is not None and not behind.changed else None)
            self._newest[model_id] = next_seq
        self._taken_at[model_id] = time.monotonic()
        self._behind.pop(model_id, None)

    def _write(self, model_id: str, next_seq: int, same: int | None) -> None:
        """`same` is the number of a snapshot that holds the same state."""
        target = self.path(model_id, next_seq)
        remove(target)
        with atomic_directory(target) as scratch:
            if same is None:
                self._backend.save_snapshot(model_id, scratch)
            else:
                link_tree(self.path(model_id, same), scratch)
        self._database.write(model_rows.set_model(model_id, next_seq=next_seq), power_safe=True)
        for old in target.parent.iterdir():
            if old != target:
                remove(old)

    def path(self, model_id: str, next_seq: int) -> Path:
        return self._root / safe_name(model_id) / str(next_seq)

    def disregard(self, model_id: str) -> None:
        """The model is closed or has failed: take no more snapshots of it."""
        for known in (self._taken_at, self._newest, self._behind):
            known.pop(model_id, None)

    def forget(self, model_id: str) -> None:
        """Delete the snapshots of a closed model."""
        self.disregard(model_id)
        remove(self._root / safe_name(model_id))
