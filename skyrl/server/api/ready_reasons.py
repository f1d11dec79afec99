"""Whether the server can train and sample, and why not: for `/readyz`, the status page and `skyrl status`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from skyrl.base.config.server import ServerConfig
from skyrl.runtime.processes.host_resources import shortage
from skyrl.sampling.client import ForwardingClient
from skyrl.server.api.readiness import EngineWatch, Readiness

Reasons = tuple[bool, list[str]]
"""Whether something is ready, and the reasons to list."""


class ReadyReasons:
    """One base model: looks at its engine and its inference servers, at most once a second. `replicas` is None unless a
    router stands in front of several inference servers."""

    def __init__(self, config: ServerConfig, watch: EngineWatch, client: ForwardingClient | None) -> None:
        self._config = config
        self._watch = watch
        self._client = client
        self.replicas = Readiness(client.replicas_in_use) if config.routed and client is not None else None
        self._readiness = Readiness(self._find)

    async def now(self) -> Reasons:
        """Missing replicas are listed, but the base model stays ready while one replica is in use: samples go on."""
        return await self._readiness.now()

    async def _find(self) -> Reasons:
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
        return ready, reasons


class ServerReadiness:
    """The whole server. With several base models it is ready while one of them is: requests for that one are served.
    The reasons of the others are listed, each after the base model's name."""

    def __init__(self, state_dir: Path, models: Mapping[str, ReadyReasons]) -> None:
        """`models` by the name that clients know."""
        self._state_dir = state_dir
        self._models = dict(models)

    async def by_model(self) -> dict[str, Reasons]:
        found = await asyncio.gather(*(model.now() for model in self._models.values()))
        return dict(zip(self._models, found, strict=True))

    async def now(self) -> Reasons:
        """Too little disk space is listed, but the server stays ready."""
        found = await self.by_model()
        several = len(found) > 1
        reasons = [f"{name}: {why}" if several else why for name, (_, whys) in found.items() for why in whys]
        return any(ready for ready, _ in found.values()), [*reasons, *self.of_server()]

    def of_server(self) -> list[str]:
        """The reasons that are of no base model."""
        disk_shortage = shortage(self._state_dir)
        return [] if disk_shortage is None else [f"disk: {disk_shortage}"]
