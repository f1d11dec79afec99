"""What a placement process does: starts its servers, finds out when none can start or the cluster is away, and stops
them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence

from skyrl.cli.launcher.first_ready import Supervised
from skyrl.cli.launcher.inference_parts import ServerParts
from skyrl.cli.launcher.metrics import LauncherMetrics
from skyrl.cli.launcher.parts import Parts
from skyrl.cli.ray_placement.ray_server import NOT_STARTED
from skyrl.cli.ray_placement.scheduling import RayPlacement
from skyrl.inference.engine_kinds import VLLM, Vllm
from skyrl.inference.placement import ServerPlan
from skyrl.runtime.processes.runtime import Runtime, run_process, set_up_process
from skyrl.runtime.processes.startup import MARK, MAY_START, Cause, FirstStarts
from skyrl.runtime.ray_cluster.connection import NoCluster, check_reachable, connect

logger = logging.getLogger(__name__)

LOOK_S = 2.0
AWAY_S = 15.0
"""The placement process ends, and is started again, when the cluster's head has refused connections for this long."""


class Starts:
    """Finds out when no vLLM can ever start. Then the placement process ends, as a vLLM's failure ends the start of a
    server without Ray. Once a vLLM has answered, a vLLM that cannot start is tried for ever: others may be in use."""

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
    runtime: Runtime, kind: Vllm, placement: RayPlacement, starts: Starts, metrics: LauncherMetrics
) -> list[ServerParts]:
    """The vLLMs of the configuration. They have GPUs if the cluster has."""
    inference = runtime.config.backend_config.inference
    ports = inference.ports or [None] * inference.num_engines
    return [
        ServerParts(
            ServerPlan(f"{runtime.config.role.process(VLLM)}-{number}", kind, runtime.cuda, port),
            kind,
            placement,
            starts,
            metrics.restarts,
            probe_interval_s=inference.probe_interval_s,
        )
        for number, port in enumerate(ports)
    ]


async def run_servers(
    address: str, starts: Starts, beside: Sequence[Callable[[], Coroutine[None, None, None]]]
) -> Cause | None:
    """Run the servers of `starts` until SIGTERM or SIGINT. Also ends when no server can start: returns why. `beside`
    runs as long as the servers, from the moment in which all of them have a handle; when one of it fails, the servers
    are stopped, and what it raised is raised. Ends the process when the cluster at `address` is away."""
    stop, loop, parts = asyncio.Event(), asyncio.get_running_loop(), Parts()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    for server in starts.servers:
        for part in server.parts(()):
            await parts.add(part)
    away, ended = asyncio.create_task(until_away(address)), asyncio.create_task(parts.until_one_ends())
    stopping = asyncio.create_task(stop.wait())
    failed = asyncio.create_task(_until_one_fails([asyncio.create_task(work()) for work in beside]))
    await asyncio.wait({away, ended, stopping, failed, starts.hopeless}, return_when=asyncio.FIRST_COMPLETED)
    if away.done():
        end(MAY_START, str(away.result()))
    await parts.stop()
    hopeless = starts.hopeless.result() if starts.hopeless.done() and not stop.is_set() else None
    if hopeless is None:
        for task in (ended, failed):
            if task.done():
                await task
    for task in (away, stopping, ended, failed):
        task.cancel()
    await asyncio.gather(away, stopping, ended, failed, return_exceptions=True)
    return hopeless


async def _until_one_fails(running: Sequence[asyncio.Task[None]]) -> None:
    """Raises what the first that fails has raised, and cancels the others. Does not return."""
    try:
        await asyncio.gather(*running)
        await asyncio.Event().wait()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def end(code: int, sentence: str) -> None:
    """End at once with the sentence that the launcher reads: threads that wait for Ray would keep the process."""
    logger.critical("%s%s", MARK, " ".join(sentence.split()))
    os._exit(code)


def live(run: Callable[[Runtime], Coroutine[None, None, None]], outage: Callable[[Exception], str | None]) -> None:
    """A placement process: connects to Ray, and runs `run` until it returns. `outage` is as in
    `run_process`."""
    runtime = Runtime.from_environment()
    set_up_process(runtime.config.log_level, runtime.config.log_format, runtime.config.role.process("placement"))

    def place() -> None:
        assert runtime.ray_address is not None
        connect(runtime.ray_address, namespace=f"skyrl-{runtime.server_id}", patience_s=runtime.ray_patience_s)
        asyncio.run(run(runtime))
        logging.shutdown()
        os._exit(0)  # the connection to Ray ends with the process; ray.shutdown would wait for the head

    run_process("the placement process", place, outage)
