"""The placer's process: a driver of the Ray cluster that keeps the server's vLLMs running on it.

Writes where each vLLM runs into the database, for the engine and the API processes. Neither the launcher nor the engine
is the driver: Ray ends a driver's actors with the driver, and may end the driver when the cluster's head is away.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import closing

from skyrl.cluster.connection import NoCluster, check_reachable, connect
from skyrl.db.database import Database
from skyrl.db.faults import outage
from skyrl.inference.engine_kinds import KINDS, VLLM
from skyrl.inference.placement import ServerPlan
from skyrl.inference.vllm_metrics import VllmMetrics
from skyrl.launcher.first_ready import Supervised
from skyrl.launcher.parts import Parts
from skyrl.launcher.server_parts import ServerParts, wherever
from skyrl.metrics.files import MetricsDirectory, publishing
from skyrl.metrics.processes import LauncherMetrics
from skyrl.placer.publisher import ServersPublisher
from skyrl.placer.ray_placement import RayPlacement
from skyrl.placer.ray_server import NOT_STARTED
from skyrl.processes.runtime import Runtime, run_process, set_up_process
from skyrl.processes.startup import CANNOT_START, MARK, MAY_START, Cause, FirstStarts

logger = logging.getLogger(__name__)

LOOK_S = 2.0
AWAY_S = 15.0
"""The placer ends, and is started again, when the cluster's head has refused connections for this long."""


class Starts:
    """Finds out when no vLLM can ever start. Then the placer ends, as a vLLM's failure ends the start of a server
    without Ray. Once a vLLM has answered, a vLLM that cannot start is tried for ever: others may be in use."""

    def __init__(self) -> None:
        self.servers: Sequence[ServerParts] = ()
        self.hopeless: asyncio.Future[Cause] = asyncio.get_running_loop().create_future()
        self._watched: dict[str, Supervised] = {}
        self._refused: set[str] = set()
        """The vLLMs that a node was unable to start."""
        self._starts = FirstStarts()

    def watch(self, name: str, process: Supervised) -> None:
        self._watched[name] = process

    def ended(self, name: str, code: int, cause: Cause | None) -> None:
        if any(server.has_answered for server in self.servers) or self.hopeless.done():
            return
        if code == NOT_STARTED and cause is None:
            self._refused.add(name)
            if len(self._refused) < len(self.servers):
                return  # another vLLM may be able to start, on another node
            cause = Cause(self._watched[name].log_tail(1), final=True)
        if self._starts.hopeless(name, cause):
            assert cause is not None
            self.hopeless.set_result(cause)


async def until_away(address: str) -> NoCluster:
    """Return when the head of the cluster has not accepted connections for AWAY_S."""
    failed_s = 0.0
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            await asyncio.to_thread(check_reachable, address)
        except NoCluster as error:
            failed_s += LOOK_S
            if failed_s >= AWAY_S:
                return error
        else:
            failed_s = 0.0


def server_parts(
    runtime: Runtime, placement: RayPlacement, starts: Starts, metrics: LauncherMetrics
) -> list[ServerParts]:
    """The vLLMs of the configuration. They have GPUs if the cluster has."""
    config, inference = runtime.config, runtime.config.backend_config.inference
    kind = KINDS[VLLM](config, runtime.inference_api_key or "")
    ports = inference.ports or [None] * inference.num_engines
    return [
        ServerParts(
            ServerPlan(f"{VLLM}-{number}", kind, runtime.cuda, port),
            kind,
            placement,
            starts,
            metrics.restarts,
            probe_interval_s=inference.probe_interval_s,
        )
        for number, port in enumerate(ports)
    ]


async def run(runtime: Runtime) -> None:
    """Place the vLLMs until SIGTERM or SIGINT. Ends the process when no vLLM can start, or when the cluster is away."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    assert runtime.ray_address is not None
    metrics, starts, parts = LauncherMetrics.new(), Starts(), Parts()
    with closing(Database(runtime.config.database)) as database:
        publisher = ServersPublisher(database, runtime)
        placement = RayPlacement(runtime.config.state_dir / "logs", publisher.changed)
        publisher.servers = placement.servers
        publishing_rows = asyncio.create_task(publisher.run())
        async with publishing(metrics.registry, "placer", runtime.metrics_directory) as published:
            starts.servers = server_parts(runtime, placement, starts, metrics)
            for server in starts.servers:
                for part in server.parts(()):
                    await parts.add(part)
            away = asyncio.create_task(until_away(runtime.ray_address))
            ended = asyncio.create_task(parts.until_one_ends())
            stopping = asyncio.create_task(stop.wait())
            measuring = [
                asyncio.create_task(each) for each in (metrics.lag.run(), *_vllm_metrics(runtime, starts, published))
            ]
            await asyncio.wait({away, ended, stopping, starts.hopeless}, return_when=asyncio.FIRST_COMPLETED)
            if away.done():
                _end(MAY_START, str(away.result()))
            await parts.stop()
            publishing_rows.cancel()
            await asyncio.gather(publishing_rows, return_exceptions=True)
            await publisher.clear()
            if starts.hopeless.done() and not stop.is_set():
                _end(CANNOT_START, starts.hopeless.result().sentence)
            if ended.done():
                await ended
            for task in (away, stopping, ended, *measuring):
                task.cancel()
            await asyncio.gather(away, stopping, ended, *measuring, return_exceptions=True)


def _vllm_metrics(
    runtime: Runtime, starts: Starts, published: MetricsDirectory
) -> Iterator[Coroutine[None, None, None]]:
    """Publish the metrics of each vLLM, wherever it runs."""
    for number, parts in enumerate(starts.servers):

        async def publish(url: str, number: int = number) -> None:
            await VllmMetrics((url,), runtime.inference_api_key or "", published, number).run()

        yield wherever(parts.server, publish)


def _end(code: int, sentence: str) -> None:
    """End at once with the sentence that the launcher reads: threads that wait for Ray would keep the process."""
    logger.critical("%s%s", MARK, " ".join(sentence.split()))
    os._exit(code)


def _main(runtime: Runtime) -> None:
    assert runtime.ray_address is not None
    connect(runtime.ray_address, namespace=f"skyrl-{runtime.server_id}", patience_s=runtime.ray_patience_s)
    asyncio.run(run(runtime))
    logging.shutdown()
    os._exit(0)  # the connection to Ray ends with the process; ray.shutdown would wait for the head


def main() -> None:
    runtime = Runtime.from_environment()
    set_up_process(runtime.config.log_level, runtime.config.log_format, "placer")
    run_process("the placer", lambda: _main(runtime), outage)


if __name__ == "__main__":
    main()
