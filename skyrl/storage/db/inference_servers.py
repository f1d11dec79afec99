"""The inference servers on a Ray cluster: the placement process writes where each runs, the engine and the API
processes read it.

Each server (`owner`) has rows of its own; if it has several base models, each of them is an owner. A row says where a
server process runs, not whether it is ready.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select

from skyrl.storage.db.tables.processes import InferenceServerRow

servers = InferenceServerRow.__table__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class PlacedServer:
    """One inference server. `url` is None while it does not run; then `reason` says why, after the server's name.
    `sidecar_url` is that of the sidecar beside it, if it has one."""

    name: str
    kind: str
    url: str | None = None
    node: str | None = None
    incarnation: str | None = None
    reason: str = ""
    sidecar_url: str | None = None

    @property
    def sentence(self) -> str:
        """What it does, for people: `vllm-1 waits for 1 GPU: ...`."""
        return f"{self.name} {self.reason or f'starts on node {self.node}'}"

    @property
    def for_tenants(self) -> str:
        """The sentence without what it says of the operator's nodes."""
        return f"{self.name} {self.reason.partition(':')[0].partition(' on node')[0] or 'starts'}"


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
