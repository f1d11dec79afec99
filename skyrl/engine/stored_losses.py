"""The custom losses of passes: read from the database, checked again, and kept in memory for the next pass."""

from __future__ import annotations

from cachetools import LRUCache

from skyrl.base.types.custom_loss import CustomLoss
from skyrl.base.types.loss_graph import decode_loss
from skyrl.base.types.requests import Command
from skyrl.base.wire.errors import RequestError
from skyrl.storage.db import custom_losses
from skyrl.storage.db.database import Database

KEPT = 64
"""Losses in memory."""


class StoredLosses:
    """Call it on one thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: LRUCache[tuple[str, str, str], CustomLoss] = LRUCache(KEPT)

    def find(self, loss_id: str, command: Command) -> CustomLoss:
        """The loss of the command's session. Raises RequestError if there is none."""
        key = loss_id, command.session_id, command.tenant
        loss = self._known.get(key)
        if loss is None:
            stored = self._database.read(lambda c: custom_losses.find(c, *key))
            if stored is None:
                raise RequestError(f"no custom loss {loss_id[:200]!r} in this session", field="loss_fn_config.loss_id")
            loss = self._known[key] = decode_loss(stored)
        return loss
