"""The name of this server, and its claim to train on the database: two servers that train would each run every command.

Knows the state directory and the row of the claim. Does not know what the engine does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
import time
from pathlib import Path

from skyrl.config.server import ConfigError
from skyrl.db import engine_state
from skyrl.db.database import Database
from skyrl.db.faults import DatabaseError, reason
from skyrl.db.periodic import Rounds

logger = logging.getLogger(__name__)

HOLD_S = 3.0
DEAD_AFTER_S = 15.0
"""A server that holds the claim is gone if it has given no sign of life while this one has looked for so long."""
LOOK_S = 0.5


def server_id(state_dir: Path) -> str:
    """The name of the server with this state directory. It stays after a restart, and is another one in a copy of the
    directory. The caller holds the directory's lock."""
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
    """The claim of `server` to be the only one that trains on this database."""

    def __init__(self, database: Database, server: str) -> None:
        self._database = database
        self._server = server

    async def take(self) -> None:
        """Take the claim. Raises ConfigError when another server trains. If another server has the claim, look for
        DEAD_AFTER_S seconds whether it still gives signs of life."""
        seen = await asyncio.to_thread(self._database.read, engine_state.read_claim)
        if seen.owner not in (None, self._server):
            logger.info("server %s trained on this database: looking whether it still does", seen.owner)
        deadline = time.monotonic() + DEAD_AFTER_S
        while seen.owner not in (None, self._server) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
            now = await asyncio.to_thread(self._database.read, engine_state.read_claim)
            if now != seen and now.owner not in (None, self._server):
                raise self._taken(now.owner)
            seen = now
        if not await asyncio.to_thread(self._database.write, lambda c: engine_state.claim(c, self._server, seen)):
            raise self._taken("another one, started in this moment,")

    @staticmethod
    def _taken(server: str | None) -> ConfigError:
        return ConfigError(
            f"database-url: server {server} trains on this database, and one database has one server that trains: stop "
            "that one, or give this one a database of its own, or make it a gateway with --backend none"
        )

    async def hold(self) -> None:
        """Renew the claim every HOLD_S seconds. Log and return when another server has it by now."""
        rounds = Rounds("renewing the claim to this database", HOLD_S)
        while True:
            await asyncio.sleep(HOLD_S)
            try:
                held = await asyncio.to_thread(self._database.write, lambda c: engine_state.hold(c, self._server))
            except Exception as error:
                rounds.failed(error)
                continue
            rounds.went_well()
            if not held:
                logger.error("another server trains on this database by now, as this one gave no sign for long")
                return

    def release(self) -> None:
        """Give the claim back. While the database is away this is only logged; the claim then runs out."""
        try:
            self._database.write(lambda c: engine_state.release(c, self._server, "the server has stopped"))
        except DatabaseError as error:
            logger.error("the database was not told that the server has stopped: %s", reason(error))
