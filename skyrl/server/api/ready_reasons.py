"""Whether the server can train and sample, and why not: for `/readyz`, the status page and `skyrl status`."""

from __future__ import annotations

from skyrl.base.config.server import ServerConfig
from skyrl.server.api.readiness import EngineWatch, Readiness
from skyrl.server.sampling.client import ForwardingClient
from skyrl.storage.checkpoint_store.space import shortage


class ReadyReasons:
    """Looks at the engine, the inference servers and the disk, at most once a second. `replicas` is None unless a
    router stands in front of several inference servers."""

    def __init__(self, config: ServerConfig, watch: EngineWatch, client: ForwardingClient | None) -> None:
        self._config = config
        self._watch = watch
        self._client = client
        self.replicas = Readiness(client.replicas_in_use) if config.routed and client is not None else None
        self._readiness = Readiness(self._find)

    async def now(self) -> tuple[bool, list[str]]:
        """Whether the server is ready, and the reasons to list. Too little disk space and missing replicas are listed,
        but the server stays ready while one replica is in use: samples go on."""
        return await self._readiness.now()

    async def _find(self) -> tuple[bool, list[str]]:
        await self._watch.refresh()
        reasons = self._watch.reasons()
        if not reasons and not self._config.modes.manages_inference and self._client is not None:
            failure = await self._client.probe()
            reasons = [f"sampling: {failure}"] if failure is not None else []
        ready = not reasons
        replicas = self._config.backend_config.inference.num_engines
        if ready and self.replicas is not None and (used := await self.replicas.now()) < replicas:
            ready = used > 0
            missing = self._watch.missing_servers
            reasons = ["; ".join([f"sampling: {used} of {replicas} replicas are in use", *missing])]
        disk_shortage = shortage(self._config.state_dir)
        return ready, [*reasons, f"disk: {disk_shortage}"] if disk_shortage is not None else reasons
