"""Writes where the vLLMs run into the database, and rings the engine and the API processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from skyrl.base.types.placed_server import PlacedServer
from skyrl.cli.ray_placement.ray_server import RayServer
from skyrl.inference.engine_kinds import VLLM
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db.database import Database
from skyrl.storage.db.processes import write_servers
from skyrl.storage.db.repeats import Rounds
from skyrl.storage.doorbell import SERVERS, STATE, Doorbell

RETRY_S = 1.0


class ServersPublisher:
    """The rows of this server, or of one of its base models. A write that fails is tried again until it succeeds."""

    def __init__(self, database: Database, runtime: Runtime) -> None:
        self.servers: Sequence[RayServer] = ()
        self._database = database
        self._owner = runtime.placement_owner
        self._engine = Doorbell(runtime.engine_doorbell)
        self._api = Doorbell(*runtime.api_doorbells)
        self._has_changed = asyncio.Event()
        self._has_changed.set()

    def changed(self) -> None:
        self._has_changed.set()

    async def run(self) -> None:
        """Write each change until cancelled. The rows of a placement process that was killed are replaced at once."""
        rounds = Rounds("writing where the vLLMs run", RETRY_S)
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            try:
                await self._write(
                    [
                        PlacedServer(
                            server.name,
                            VLLM,
                            server.url,
                            server.node,
                            server.incarnation,
                            server.reason,
                            server.sidecar_url,
                        )
                        for server in self.servers
                    ]
                )
            except Exception as error:  # logged; tried until the database takes it
                rounds.failed(error)
                self._has_changed.set()
                await asyncio.sleep(RETRY_S)
            else:
                rounds.went_well()

    async def clear(self) -> None:
        """No vLLM runs any more. A failure is logged: the next placement process replaces the rows."""
        try:
            await self._write([])
        except Exception as error:  # logged; the server is about to end
            Rounds("removing the rows of the vLLMs", RETRY_S).failed(error)

    async def _write(self, placed: Sequence[PlacedServer]) -> None:
        await asyncio.to_thread(self._database.write, lambda c: write_servers(c, self._owner, placed))
        self._engine.ring([SERVERS])
        self._api.ring([STATE])
