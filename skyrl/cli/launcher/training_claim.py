"""The name of this server, and its claim to train on the database. Without the claim, two servers on one database would
each run every command.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from skyrl.base.config.server import ConfigError
from skyrl.storage.db import claims
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import ONLY
from skyrl.storage.db.faults import DatabaseError, reason
from skyrl.storage.db.repeats import Rounds

logger = logging.getLogger(__name__)

HOLD_S = 3.0
"""How often the claim is renewed."""
DEAD_AFTER_S = 15.0
"""A server whose claim did not change for this long is dead."""
LOOK_S = 0.5
"""How often it is checked whether another server's claim has changed."""


def server_id(state_dir: Path) -> str:
    """The name of the server with this state directory. A restarted server has the same name; a server on a copy of the
    directory has another one, because the inode of the file differs. The caller holds the directory's lock."""
    file = state_dir / "server-id"
    if file.exists():
        name, _, inode = file.read_text().partition(" ")
        if inode == str(file.stat().st_ino):
            return name
        file.unlink()
    host = re.sub(r"[^\w.-]", "-", socket.gethostname())[:40]
    name = f"{host}-{secrets.token_hex(6)}"
    scratch = file.with_name(f".tmp-{secrets.token_hex(8)}")
    with scratch.open("x") as stream:
        stream.write(f"{name} {os.fstat(stream.fileno()).st_ino}")
    scratch.rename(file)
    return name


class TrainingClaim:
    """The claim of `server` to be the only server that trains on this database. `state_keys` are those of its base
    models in the table engine_state."""

    def __init__(self, database: Database, server: str, state_keys: Sequence[str] = (ONLY,)) -> None:
        self._database = database
        self._server = server
        self._state_keys = state_keys

    async def take(self) -> None:
        """Take the claim. If another server has it, watch for DEAD_AFTER_S seconds whether that server renews it.
        Raises ConfigError if it does."""
        seen = await asyncio.to_thread(self._database.read, claims.read_claim)
        if seen.owner not in (None, self._server):
            logger.info("server %s trained on this database: checking whether it still runs", seen.owner)
        deadline = time.monotonic() + DEAD_AFTER_S
        while seen.owner not in (None, self._server) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
            now = await asyncio.to_thread(self._database.read, claims.read_claim)
            if now != seen and now.owner not in (None, self._server):
                raise self._taken(now.owner)
            seen = now
        if not await asyncio.to_thread(
            self._database.write, lambda c: claims.claim(c, self._server, seen, self._state_keys)
        ):
            raise self._taken("another one, which has just started,")

    @staticmethod
    def _taken(server: str | None) -> ConfigError:
        return ConfigError(
            f"database-url: server {server} trains on this database, and only one server may train on a database: stop "
            "that server, or give this one its own database, or make it a gateway with --backend none"
        )

    async def hold(self) -> None:
        """Renew the claim every HOLD_S seconds. When another server has taken it, log that and return."""
        rounds = Rounds("renewing the claim to this database", HOLD_S)
        while True:
            await asyncio.sleep(HOLD_S)
            try:
                held = await asyncio.to_thread(self._database.write, lambda c: claims.hold(c, self._server))
            except Exception as error:  # logged; the claim holds for some time without it
                rounds.failed(error)
                continue
            rounds.went_well()
            if not held:
                logger.error("another server trains on this database now: this one had not renewed its claim in time")
                return

    def release(self) -> None:
        """Give the claim back. If the database is away, only log that; another server then takes the claim after
        DEAD_AFTER_S seconds."""
        try:
            self._database.write(lambda c: claims.release(c, self._server, "the server has stopped"))
        except DatabaseError as error:
            logger.error("the database was not told that the server has stopped: %s", reason(error))
