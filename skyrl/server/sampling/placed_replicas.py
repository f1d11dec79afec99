"""Keeps the engine's group of replicas equal to the vLLMs that the placement process has started on the Ray cluster.

A vLLM that comes up elsewhere has another URL, or its sidecar has: the old replica is removed, and a new one added.
Does not know which replicas are ready: `EngineGroup` finds that out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.replica import Addresses, Replica
from skyrl.storage.db.database import Database
from skyrl.storage.db.inference_servers import read_servers
from skyrl.storage.db.periodic import Rounds

logger = logging.getLogger(__name__)

POLL_S = 2.0


class PlacedReplicas:
    """`replica_at` makes the replica at these addresses; its id is its URL."""

    def __init__(
        self, database: Database, owner: str, group: EngineGroup, replica_at: Callable[[Addresses], Replica]
    ) -> None:
        self._database = database
        self._owner = owner
        self._group = group
        self._replica_at = replica_at
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """The rows have changed."""
        self._rung.set()

    async def run(self) -> None:
        """Follow the rows until cancelled."""
        rounds = Rounds("reading where the vLLMs run", POLL_S)
        while True:
            self._rung.clear()
            try:
                await self._follow()
            except Exception as error:  # logged; the watch must go on
                rounds.failed(error)
            else:
                rounds.went_well()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._rung.wait(), POLL_S)

    async def _follow(self) -> None:
        placed = await self._database.read_async(lambda c: read_servers(c, self._owner))
        urls = {server.url: server for server in placed if server.url is not None}
        for replica in self._group.replicas:
            server = urls.get(replica.id)
            if server is None or server.sidecar_url != replica.addresses.sidecar:
                logger.info("vLLM at %s is gone", replica.id)
                await self._group.remove(replica.id)
        known = {replica.id for replica in self._group.replicas}
        for url, server in urls.items():
            if url not in known:
                logger.info("%s runs on node %s, at %s", server.name, server.node, url)
                self._group.add(self._replica_at(Addresses.same(url, server.sidecar_url)))
        self._group.set_has_all()
