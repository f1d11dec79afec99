"""The watch over the vLLMs of a base model that is only sampled from.

Publishes the base model's row in the table engine_state, as the engine does for a base model that trains. No adapters
are ever loaded. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import closing
from urllib.parse import urlsplit

from skyrl.base.config.server import ServerConfig
from skyrl.base.model_files import model_config
from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.types.weights import AdapterVersion
from skyrl.cli.launcher.parts import Part
from skyrl.inference.adapter_host import AdapterMissing
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.engine_kinds import Vllm
from skyrl.inference.metrics import AdapterMetrics
from skyrl.inference.model_options import LEAST
from skyrl.inference.placed_replicas import PlacedReplicas
from skyrl.inference.replica import Addresses, Replica
from skyrl.inference.router_members import RouterMembers
from skyrl.inference.vllm_client import VllmMetrics
from skyrl.inference.vllm_command import context_length
from skyrl.runtime.metrics.files import MetricsDirectory
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db.database import Database, Fence
from skyrl.storage.db.engine_publisher import EngineStatePublisher
from skyrl.storage.db.engine_state import ONLY_SAMPLED
from skyrl.storage.db.processes import follow_servers
from skyrl.storage.db.repeats import once, repeat
from skyrl.storage.doorbell import Doorbell

logger = logging.getLogger(__name__)

SAMPLED = "sampled"
"""The part's name, before the base model's."""
RETRY_S = 3.0
LOOK_S = 0.2
"""How often it is tried whether the router listens."""


def served_limits(config: ServerConfig, *, cuda: bool) -> ContextLimits:
    """The limits of the vLLMs of `config`, from the base model's config.json, which may be missing here."""
    model = model_config(config.base_model_path)
    if "vocab_size" not in model:
        return ContextLimits()
    context = context_length(config, cuda=cuda) or model.get("max_position_embeddings", LEAST)
    return ContextLimits(model["vocab_size"], context)


class NoAdapters:
    """The host of vLLMs that have no adapters."""

    copies = False

    async def bring(self, adapter: AdapterVersion) -> str:
        """Raises AdapterMissing, always."""
        raise AdapterMissing(adapter)


def only_sampled_part(runtime: Runtime, database: Database, needs: tuple[str, ...]) -> Part:
    """The watch as a part. `runtime` is that of the base model."""
    watch = OnlySampled(runtime, database)
    name = runtime.config.role.process(SAMPLED)
    return Part(
        name, needs, start=watch.start, supervise=watch.run, duty=f"watching the vLLMs of {name}", stop=watch.stop
    )


class OnlySampled:
    """Finds which of the vLLMs are ready, and publishes where samples go."""

    def __init__(self, runtime: Runtime, database: Database) -> None:
        self._runtime = runtime
        self._database = database
        self._api = Doorbell(*runtime.api_doorbells)
        key = runtime.config.role.state_keys[0]
        self._state = EngineStatePublisher(database, self._api, Fence(runtime.server_id), key)
        self._tasks: list[asyncio.Task[None]] = []
        self._group: EngineGroup | None = None

    async def start(self) -> None:
        runtime = self._runtime
        self._group = group = _group(runtime, self._state)
        self._tasks = [asyncio.create_task(self._publish()), asyncio.create_task(self._watch(group))]
        if runtime.config.ray is None:
            directory = MetricsDirectory(runtime.metrics_directory)
            metrics = VllmMetrics(runtime, runtime.replica_urls, directory)
            self._tasks.append(asyncio.create_task(once("publishing vLLM's metrics", metrics.run)))
        else:
            placed = PlacedReplicas(group, lambda at: _replica(runtime, at))
            following = follow_servers(self._database, runtime.placement_owner, asyncio.Event(), placed.follow)
            self._tasks.append(asyncio.create_task(following))

    async def run(self) -> None:
        """Return, or raise, when the watch has ended."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                await task

    async def stop(self) -> None:
        """Publish that no vLLM is there. The vLLMs keep running."""
        assert self._group is not None
        with closing(self._api):
            await self._group.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, group: EngineGroup) -> None:
        """Run the group. A router starts at the same time: the group tells it of replicas once it listens."""
        if self._runtime.config.routed:
            at = urlsplit(self._runtime.inference_url)
            while not await _listens(str(at.hostname), at.port or 0):  # noqa: ASYNC110 - another process
                await asyncio.sleep(LOOK_S)
        await group.run()

    async def _publish(self) -> None:
        """Publish the limits once the database takes them, and from then on what was missed while it was away."""
        limits = served_limits(self._runtime.config, cuda=self._runtime.cuda)
        is_published = False

        async def publish() -> None:
            nonlocal is_published
            if not is_published:
                await asyncio.to_thread(self._state.training, ready=False, reason=ONLY_SAMPLED, limits=limits)
                is_published = True
            await asyncio.to_thread(self._state.publish_missed)

        await repeat("publishing a base model that is only sampled from", RETRY_S, publish, at_once=True)


async def _listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


def _group(runtime: Runtime, state: EngineStatePublisher) -> EngineGroup:
    config, url = runtime.config, runtime.inference_url
    assert url is not None

    async def no_adapters() -> Sequence[AdapterVersion]:
        return ()

    members = RouterMembers(url, runtime.inference_api_key or "") if config.routed else None
    return EngineGroup(
        [_replica(runtime, Addresses.same(each)) for each in runtime.replica_urls],
        state.publish_url,
        no_adapters,
        proxy_url=url if config.routed else None,
        members=members,
        has_all=config.ray is None,
    )


def _replica(runtime: Runtime, at: Addresses) -> Replica:
    return Vllm(runtime.config, runtime.inference_api_key or "").replica(at, NoAdapters(), AdapterMetrics())
