"""The inference servers on a Ray cluster: the placement process writes where each runs, the engine and the API
processes read it.

Each server (`owner`) has rows of its own; if it has several base models, each of them is an owner. A row says where a
server process runs, not whether it is ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from sqlalchemy import Connection, delete, insert, select

from skyrl.base.types.placed_server import PlacedServer
from skyrl.storage.db.database import Database
from skyrl.storage.db.periodic import repeat
from skyrl.storage.db.tables.processes import InferenceServerRow

FOLLOW_S = 2.0
servers = InferenceServerRow.__table__  # type: ignore[attr-defined]


def read_servers(connection: Connection, owner: str) -> list[PlacedServer]:
    """The servers of `owner`, in the order of their names."""
    names = ("name", "kind", "url", "node", "incarnation", "reason", "sidecar_url")
    columns = [servers.c[name] for name in names]
    rows = connection.execute(select(*columns).where(servers.c.owner == owner))
    return sorted((PlacedServer(*row) for row in rows), key=lambda server: (len(server.name), server.name))


def write_servers(connection: Connection, owner: str, placed: Sequence[PlacedServer]) -> None:
    """Replace all rows of `owner`."""
    connection.execute(delete(servers).where(servers.c.owner == owner))
    for server in placed:
        values = {
            "owner": owner,
            "name": server.name,
            "kind": server.kind,
            "url": server.url,
            "node": server.node,
            "incarnation": server.incarnation,
            "reason": server.reason,
            "sidecar_url": server.sidecar_url,
            "updated_at": time.time(),
        }
        connection.execute(insert(servers), values)


async def follow_servers(
    database: Database, owner: str, rung: asyncio.Event, follow: Callable[[Sequence[PlacedServer]], Awaitable[None]]
) -> None:
    """Give `follow` the servers of `owner` every FOLLOW_S, and when `rung` is set, until cancelled."""

    async def read() -> None:
        await follow(await database.read_async(lambda c: read_servers(c, owner)))

    await repeat("reading where the vLLMs run", FOLLOW_S, read, at_once=True, rung=rung)
