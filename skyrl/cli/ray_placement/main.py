"""The placement process's process: a driver of the Ray cluster that keeps the server's vLLMs running on it.

Writes where each vLLM runs into the database, and rings the engine and the API processes. Neither the launcher nor the
engine is the driver: Ray ends a driver's actors with the driver, and may end the driver when the cluster's head is
away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing

from skyrl.base.types.placed_server import PlacedServer
from skyrl.cli.launcher.inference_parts import wherever
from skyrl.cli.launcher.metrics import LauncherMetrics
from skyrl.cli.ray_placement.lifecycle import Starts, end, live, run_servers, server_parts
from skyrl.cli.ray_placement.ray_server import RayServer
from skyrl.cli.ray_placement.scheduling import RayPlacement
from skyrl.inference.engine_kinds import VLLM, Vllm
from skyrl.inference.vllm_client import VllmMetrics
from skyrl.runtime.metrics.files import MetricsDirectory, publishing
from skyrl.runtime.processes.runtime import Runtime
from skyrl.runtime.processes.startup import CANNOT_START
from skyrl.storage.db.database import Database
from skyrl.storage.db.faults import outage
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


async def run(runtime: Runtime) -> None:
    """Place the vLLMs until SIGTERM or SIGINT. Ends the process when no vLLM can start, or when the cluster is away."""
    assert runtime.ray_address is not None
    metrics, starts = LauncherMetrics.new(), Starts()
    with closing(Database(runtime.config.database)) as database:
        publisher = ServersPublisher(database, runtime)
        placement = RayPlacement(runtime.config.state_dir / "logs", publisher.changed)
        publisher.servers = placement.servers
        publishing_rows = asyncio.create_task(publisher.run())
        role = runtime.config.role
        process, directory = role.process("placement"), runtime.metrics_directory
        async with publishing(metrics.registry, process, directory, labels=role.labels) as published:
            kind = Vllm(runtime.config, runtime.inference_api_key or "")
            starts.servers = server_parts(runtime, kind, placement, starts, metrics)
            beside = (metrics.lag.run, *_vllm_metrics(runtime, starts, published))
            hopeless = await run_servers(runtime.ray_address, starts, beside)
            publishing_rows.cancel()
            await asyncio.gather(publishing_rows, return_exceptions=True)
            await publisher.clear()
            if hopeless is not None:
                end(CANNOT_START, hopeless.sentence)


def _vllm_metrics(
    runtime: Runtime, starts: Starts, published: MetricsDirectory
) -> Iterator[Callable[[], Coroutine[None, None, None]]]:
    """Publish the metrics of each vLLM, wherever it runs."""
    for number, parts in enumerate(starts.servers):

        async def publish(url: str, number: int = number) -> None:
            await VllmMetrics(runtime, (url,), published, number).run()

        yield lambda parts=parts, publish=publish: wherever(parts.server, publish)


def main() -> None:
    live(run, outage)


if __name__ == "__main__":
    main()
