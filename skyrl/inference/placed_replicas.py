"""Keeps the engine's group of replicas equal to the vLLMs that the placement process has started on the Ray cluster.

A vLLM that comes up elsewhere has another URL, or its sidecar has: the old replica is removed, and a new one added.
Does not know which replicas are ready: `EngineGroup` finds that out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from skyrl.base.types.placed_server import PlacedServer
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.replica import Addresses, Replica

logger = logging.getLogger(__name__)


class PlacedReplicas:
    """`replica_at` makes the replica at these addresses; its id is its URL."""

    def __init__(self, group: EngineGroup, replica_at: Callable[[Addresses], Replica]) -> None:
        self._group = group
        self._replica_at = replica_at

    async def follow(self, placed: Sequence[PlacedServer]) -> None:
        """Make the group equal to the servers of `placed` that run."""
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
