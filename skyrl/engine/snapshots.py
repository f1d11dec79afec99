"""Snapshots: the state of each model on disk, from which a starting engine restores the model.

A snapshot is taken at four moments:

- after an optimizer step, when the last snapshot is old: this bounds how much a restart repeats;
- after every load, because the checkpoint may be replaced or deleted later;
- when a model has run commands for long without a step: the database keeps the bodies of all commands that no snapshot
  holds;
- when the engine is told to stop, so that the next start repeats nothing.

Knows directories and the numbers of commands. The backend decides what a snapshot contains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from skyrl.base.config.server import ServerConfig
from skyrl.base.types.requests import SAVES, Kind
from skyrl.storage.checkpoint_store.directories import atomic_directory, link_tree, remove, safe_name
from skyrl.storage.db import models as model_rows
from skyrl.storage.db.database import Displaced, FencedDatabase
from skyrl.trainer.protocol import Backend

logger = logging.getLogger(__name__)

OVERDUE_S = 60.0
"""A model without steps is snapshotted this long after the snapshot interval has passed."""
LONG_S, MOST_TIME = 3.0, 0.1
"""Where a snapshot takes longer than LONG_S, because that of a whole model is large, snapshots after steps may take
MOST_TIME of a model's time."""
_ONLY_READ = SAVES | {Kind.FORWARD}
"""Commands that do not change a model."""


@dataclass
class _Uncovered:
    """Commands of a model have ended that its newest snapshot does not hold. `since` is when the first of them ended,
    in monotonic seconds; `changed` says whether any of them may have changed the model."""

    since: float
    changed: bool = False


class Snapshots:
    """The newest state of each model, in `snapshots/<model>/<number>`.

    The number is the seq_id of the first command that the snapshot does not hold, as in `next_seq` of the model's row.
    A snapshot after a step needs no gradient: the step has just cleared it.
    """

    def __init__(self, config: ServerConfig, database: FencedDatabase, backend: Backend) -> None:
        self._root = config.snapshots_dir
        self._interval_s = config.snapshot_interval_s
        self._database = database
        self._backend = backend
        self._taken_at: dict[str, float] = {}
        self._took_s: dict[str, float] = {}
        """How long the last snapshot of a model took."""
        self._newest: dict[str, int] = {}
        """By model, the number of its snapshot on disk."""
        self._uncovered: dict[str, _Uncovered] = {}

    def restoring(self, model_id: str, next_seq: int) -> None:
        """Note that a model is being restored from snapshot `next_seq` (0: no snapshot)."""
        self.stop_tracking(model_id)
        self._taken_at[model_id] = time.monotonic()
        if next_seq > 0:
            self._newest[model_id] = next_seq

    def restored(self, model_id: str, next_seq: int) -> None:
        """Note that a model is restored, and all its commands before `next_seq` have ended: those that failed are not
        repeated. The interval to its next snapshot begins with its first step."""
        self._taken_at.pop(model_id, None)
        if next_seq > self._newest.get(model_id, 0):
            self.refused(model_id)

    def ran(self, model_id: str, kind: str) -> None:
        """Note that a command of this model has run, or was repeated, with or without success."""
        uncovered = self._uncovered.setdefault(model_id, _Uncovered(time.monotonic()))
        uncovered.changed |= kind not in _ONLY_READ

    def refused(self, model_id: str) -> None:
        """Note that commands of this model have failed without a run: their rows, too, stay until a snapshot."""
        self._uncovered.setdefault(model_id, _Uncovered(time.monotonic()))

    def after_step(self, model_id: str, next_seq: int) -> None:
        """Snapshot a model that has just stepped, if its last snapshot is old. Runs on the backend thread."""
        now = time.monotonic()
        if now - self._taken_at.setdefault(model_id, now) >= self._interval_of(model_id):
            self.take(model_id, next_seq)

    def _interval_of(self, model_id: str) -> float:
        """The seconds between two snapshots of a model: longer than configured if its snapshots take long."""
        took_s = self._took_s.get(model_id, 0.0)
        return self._interval_s if took_s < LONG_S else max(self._interval_s, took_s / MOST_TIME)

    def overdue(self) -> list[str]:
        """Models whose commands have waited for a snapshot for the interval and OVERDUE_S more."""
        now = time.monotonic()
        return [
            model_id
            for model_id, uncovered in list(self._uncovered.items())
            if uncovered.since <= now - self._interval_of(model_id) - OVERDUE_S
        ]

    def lacking(self) -> list[str]:
        """Models that have run commands which their newest snapshot does not hold, the quickest snapshot first."""
        return sorted(self._uncovered, key=self.expected_s)

    def expected_s(self, model_id: str) -> float:
        """How long a snapshot of the model will take, as the last one did; 0 if none was taken."""
        return self._took_s.get(model_id, 0.0)

    def put_off(self, model_id: str) -> None:
        """A snapshot could not be taken: try again OVERDUE_S and the interval from now."""
        self._uncovered[model_id].since = time.monotonic()

    def attempt(self, take: Callable[[str, int], None], model_id: str, next_seq: int) -> bool:
        """Call `take`, which is `self.take` or `self.after_step`. Whether no snapshot is missing: a failure is only
        logged, because without the snapshot recovery takes longer and loses nothing. Raises Displaced."""
        try:
            take(model_id, next_seq)
        except Displaced:
            raise
        except Exception:  # logged: the commands since the last snapshot are kept and run again
            logger.exception("model %s has no snapshot at command %d", model_id, next_seq)
            return False
        return True

    def take(self, model_id: str, next_seq: int) -> None:
        """Snapshot a model that has run all commands before `next_seq`. Runs on the backend thread.

        If the model has not changed since its last snapshot, that snapshot only gets a new number.
        """
        began = time.monotonic()
        uncovered, newest = self._uncovered.get(model_id), self._newest.get(model_id)
        same_state = newest if uncovered is not None and not uncovered.changed else None
        try:
            self._write(model_id, next_seq, same_state)
            self._newest[model_id] = next_seq
        except Exception:
            self._taken_at[model_id] = time.monotonic()  # not again after each step: each try may fill the disk
            if time.monotonic() - began >= LONG_S:
                self._note_time(model_id, began)
            raise
        if same_state is None:
            self._note_time(model_id, began)
        self._taken_at[model_id] = time.monotonic()
        self._uncovered.pop(model_id, None)

    def _note_time(self, model_id: str, began: float) -> None:
        self._taken_at[model_id] = now = time.monotonic()
        self._took_s[model_id] = now - began

    def _write(self, model_id: str, next_seq: int, same_state: int | None) -> None:
        """`same_state` is the number of a snapshot that holds the same state."""
        target = self.path(model_id, next_seq)
        self._database.confirm_claim()  # the server that has it now may have a snapshot of this number
        remove(target)
        with atomic_directory(target) as scratch:
            if same_state is None:
                self._backend.save_snapshot(model_id, scratch)
            else:
                link_tree(self.path(model_id, same_state), scratch)
        self._database.write(model_rows.set_model(model_id, next_seq=next_seq), power_safe=True)
        for old in target.parent.iterdir():
            if old.name.isdecimal() and int(old.name) < next_seq:  # the server that has the claim by now has later ones
                remove(old)

    def path(self, model_id: str, next_seq: int) -> Path:
        return self._root / safe_name(model_id) / str(next_seq)

    def stop_tracking(self, model_id: str) -> None:
        """The model is closed or has failed: take no more snapshots of it."""
        for by_model in (self._taken_at, self._took_s, self._newest, self._uncovered):
            by_model.pop(model_id, None)

    def forget(self, model_id: str) -> None:
        """Delete the snapshots of a closed model."""
        self.stop_tracking(model_id)
        remove(self._root / safe_name(model_id))
