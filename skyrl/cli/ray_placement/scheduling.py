"""The placement of inference servers on a Ray cluster: asks Ray for resources and actors, and turns its errors
into Lost.

A server goes to a node that has room for all of it, and of those to the one with the fewest servers (`choose`). The
only module of the placement process that imports Ray. `ray_server` decides what is started where and when.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl.cli.ray_placement.ray_server import Host, Lost, RayServer, in_loop
from skyrl.inference.placement import Kind, OnExit, ServerPlan, ServerSpec, Spot
from skyrl.runtime.ray_cluster.capacity import Bundle, NodeCapacity, missing, nodes, reserve
from skyrl.runtime.ray_cluster.hosts import Look, ServerHost, Started

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


def choose(nodes: Sequence[NodeCapacity], bundle: Bundle, servers_on: Mapping[str, int]) -> str | None:
    """The id of the node; None when no node has room. `servers_on` has the number of servers by node id."""
    fitting = [node for node in nodes if not missing([bundle], [node])]
    if not fitting:
        return None
    return min(fitting, key=lambda node: (servers_on.get(node.id, 0), node.address)).id


def actor_options(bundle: Bundle) -> dict[str, object]:
    """The bundle as options of an actor."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    gpus = bundle.get("GPU", 0.0)
    return {
        "num_cpus": bundle.get("CPU", 0.0),
        "num_gpus": int(gpus) if gpus == int(gpus) else gpus,
        "memory": bundle.get("memory") or None,
        "resources": others,
    }


logger = logging.getLogger(__name__)

MAX_SERVERS = 64
"""The bound of `num_engines`."""


@dataclass(frozen=True)
class KindProgram:
    """A server of a kind as the actor's program."""

    name: str
    kind: Kind
    cuda: bool

    def check(self) -> None:
        self.kind.check(cuda=self.cuda)

    def command(self, host: str, port: int, sidecar_port: int, directory: Path) -> ServerSpec:
        return self.kind.spec(self.name, Spot(host, port, directory, self.cuda, sidecar_port))


class RayPlacement:
    """Starts servers on the cluster to which this process is connected; their output is appended to files in `log_dir`.
    `on_change` is called whenever something is known anew of a server."""

    def __init__(self, log_dir: Path, on_change: Callable[[], None]) -> None:
        self._log_dir = log_dir
        self._on_change = on_change
        self._hosts: set[RayHost] = set()
        self.servers: list[RayServer] = []
        self._choosing = asyncio.Lock()
        self.waiting = ThreadPoolExecutor(MAX_SERVERS, "reserve")
        """One thread for each server that waits for room. The loop's own few threads would all wait, and nothing else
        could use them."""

    async def start(self, plan: ServerPlan, on_exit: OnExit | None = None) -> RayServer:
        bundle = plan.kind.bundle(cuda=plan.cuda)
        spots = _Spots(self, KindProgram(plan.name, plan.kind, plan.cuda), plan.port)
        server = RayServer(plan.name, bundle, spots, self._log_dir / f"{plan.name}.log", on_exit, self._on_change)
        self.servers.append(server)
        return server

    async def target(self, bundle: Bundle, avoided: Collection[str]) -> str | None:
        """The node on which one more server should run; one of the `avoided` nodes only if no other has room."""
        servers_on = Counter(host.node_id for host in self._hosts if host.node_id is not None)
        known = await asyncio.to_thread(nodes)
        others = [node for node in known if node.id not in avoided]
        return choose(others, bundle, servers_on) or choose(known, bundle, servers_on)

    def note(self, host: RayHost) -> None:
        self._hosts.add(host)

    def forget(self, host: RayHost) -> None:
        self._hosts.discard(host)

    @property
    def choosing(self) -> asyncio.Lock:
        """Held while a node is chosen, so that two servers do not choose the same one."""
        return self._choosing


class _Spots:
    def __init__(self, placement: RayPlacement, program: KindProgram, port: int | None) -> None:
        self._placement = placement
        self._program = program
        self._port = port
        self._avoided: set[str] = set()

    def avoid(self, node_id: str) -> None:
        self._avoided.add(node_id)

    async def reserve(
        self, name: str, bundle: Bundle, on_waiting: Callable[[str], None], is_cancelled: Callable[[], bool]
    ) -> Host:
        import ray
        from ray.util.placement_group import remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        said = in_loop(asyncio.get_running_loop(), on_waiting)
        host = RayHost(self._placement)
        async with self._placement.choosing:
            host.node_id = await self._placement.target(bundle, self._avoided)
            if host.node_id is not None:
                self._placement.note(host)
        try:
            reserving = partial(
                reserve,
                [bundle],
                "STRICT_PACK",
                name=f"skyrl {name}",
                on_waiting=said,
                is_cancelled=is_cancelled,
                target_node=host.node_id,
            )
            group = await asyncio.get_running_loop().run_in_executor(self._placement.waiting, reserving)
            try:
                actor = (
                    ray.remote(ServerHost)
                    .options(
                        **actor_options(bundle),
                        max_restarts=0,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
                    )
                    .remote(name, self._program, self._port)
                )
            except BaseException:
                remove_placement_group(group)
                raise
        except BaseException:
            self._placement.forget(host)
            raise
        host.made(group, actor)
        return host


class RayHost:
    """An actor in a placement group of its own."""

    def __init__(self, placement: RayPlacement) -> None:
        self.node_id: str | None = None
        self._placement = placement
        self._group: PlacementGroup | None = None
        self._actor: Any = None

    def made(self, group: PlacementGroup, actor: Any) -> None:
        self._group, self._actor = group, actor
        self._placement.note(self)

    async def node(self, within_s: float) -> tuple[str, str]:
        self.node_id, address = await _answer(self._actor.node.remote(), within_s)
        return self.node_id or "", address

    async def start(self, within_s: float) -> Started:
        return await _answer(self._actor.start.remote(), within_s)

    async def look(self, offset: int, sidecar_offset: int, within_s: float) -> Look:
        return await _answer(self._actor.look.remote(offset, sidecar_offset), within_s)

    async def ended(self, within_s: float) -> None:
        await _answer(self._actor.ended.remote(), within_s)

    def kill(self) -> None:
        self._actor.kill.remote()

    async def stop(self, grace_s: float) -> None:
        await _answer(self._actor.stop.remote(grace_s), grace_s + 5.0)

    async def release(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        self._placement.forget(self)

        def end() -> None:
            ray.kill(self._actor)
            assert self._group is not None
            remove_placement_group(self._group)

        await asyncio.to_thread(end)


async def _answer(ref: Any, within_s: float) -> Any:
    """The answer of an actor. Raises Lost, and TimeoutError."""
    from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

    try:
        async with asyncio.timeout(within_s):
            return await asyncio.wrap_future(ref.future())
    except ActorUnavailableError as error:  # the actor may be reachable again
        await asyncio.sleep(min(1.0, within_s))
        raise TimeoutError from error
    except RayTaskError as error:  # for example, somebody has deleted the actor's directory
        logger.exception("an actor has failed")
        raise Lost(_first_sentence(error)) from error
    except RayError as error:
        raise Lost(_first_sentence(error)) from error


def _first_sentence(error: Exception) -> str:
    """Ray's messages have several lines, with the cause in the last of them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next((line for line in reversed(lines) if "Error" in line or "died" in line or "dead" in line), "")
    text = cause or (lines[0] if lines else type(error).__name__)
    return text[:300]
