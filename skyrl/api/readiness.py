"""Whether the server can train and sample, and why not: for `/readyz`, the status page and `skyrl status`.

`EngineWatch` is the engine's state as the API process last read it: after each notice, and every few seconds.
`Readiness` limits how often probes find out whether the server is ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from skyrl.base.config.base_models import Modes
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.activity import EngineActivity, decode_activity
from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.types.placed_server import PlacedServer
from skyrl.runtime.processes.host_resources import shortage
from skyrl.sampling.client import ForwardingClient
from skyrl.storage.db.engine_state import ONLY_SAMPLED, EngineState

T = TypeVar("T")

POLL_S = 2.0
STALE_S = 15.0
"""An engine without a heartbeat for this long counts as gone. A thread of its own writes one every 3 s."""

FRESH_S = 1.0
"""How long an answer about readiness is used again."""


def _mark_exception_as_seen(task: asyncio.Task[Any]) -> None:
    """If all waiters have gone, nobody reads the exception of a failed task, and asyncio would log that."""
    if not task.cancelled():
        task.exception()


class EngineWatch:
    """The row `engine_state` as last read, and what follows from it. `read_servers` reads the rows of the vLLMs that
    this server runs on a Ray cluster; None if it runs none there. `base_model` and `model_context` are as in
    `ContextLimits`."""

    def __init__(
        self,
        read: Callable[[], Awaitable[EngineState]],
        modes: Modes,
        read_servers: Callable[[], Awaitable[list[PlacedServer]]] | None = None,
        base_model: str = "",
        model_context: int | None = None,
    ) -> None:
        self._base_model = base_model
        self._model_context = model_context
        self._read = read
        self._modes = modes
        self._read_servers = read_servers
        self.state = EngineState()
        self.servers: list[PlacedServer] = []
        self.server_urls: set[str] = set()
        """The URLs of `servers` that run. The same set for ever: others hold it."""
        self._activity: tuple[str | None, EngineActivity] = (None, EngineActivity())
        """The text that was decoded last, and what it says."""

    async def refresh(self) -> EngineState:
        self.state = await self._read()
        if self._read_servers is not None:
            self.servers = await self._read_servers()
            urls = {server.url for server in self.servers if server.url is not None}
            self.server_urls.intersection_update(urls)
            self.server_urls.update(urls)
        return self.state

    def why_away(self) -> str:
        """Why no inference server is there, for tenants; empty if that is unknown."""
        return "" if self.state.inference_proxy_url else "; ".join(server.for_tenants for server in self.servers)

    @property
    def missing_servers(self) -> list[str]:
        """A sentence for each vLLM that does not run on the Ray cluster, or whose node does not answer."""
        return [server.sentence for server in self.servers if server.reason]

    def limits(self) -> ContextLimits:
        return ContextLimits(self.state.vocab_size, self.state.max_context, self._base_model, self._model_context)

    def adapters_in(self, own: Path) -> Path:
        """The state directory that holds the adapters' files: `own`, which is this server's, or on a gateway that of
        the server that trains on the same database."""
        return own if self._modes.trains or self.state.state_dir is None else Path(self.state.state_dir)

    def ready_parts(self) -> dict[str, bool]:
        """The parts that this server has, each with whether it can work right now."""
        reasons = self.reasons()
        parts = {"training": self._modes.trains, "sampling": self._modes.own_inference}
        return {
            part: not any(reason.startswith(f"{part}:") for reason in reasons)
            for part, is_here in parts.items()
            if is_here
        }

    def reasons(self) -> list[str]:
        """Why the server cannot train or sample right now; empty when it can."""
        reasons: list[str] = []
        if self._modes.trains and (trouble := self.training_trouble()) is not None:
            reasons.append(f"training: {trouble}")
        if self._modes.own_inference and self.state.inference_proxy_url is None:
            starting = "; ".join(server.sentence for server in self.servers)
            reasons.append(f"sampling: {starting or self._given_up or 'no inference server has been published'}")
        return reasons

    @property
    def _given_up(self) -> str:
        """Why the vLLMs of a base model without an engine are missing, if the launcher has said so. Where there is an
        engine, that is why nothing can be trained."""
        alone = self._modes.manages_inference and not self._modes.trains
        return self.state.reason if alone and self.state.reason != ONLY_SAMPLED else ""

    def training_trouble(self) -> str | None:
        """Why the engine of this database cannot train now; None if it can."""
        state = self.state
        if not state.training_ready:
            return state.reason or "the engine is starting"
        silent_s = time.time() - state.heartbeat_at
        return f"the engine was last heard of {silent_s:.0f} s ago" if silent_s > STALE_S else None

    @property
    def activity(self) -> EngineActivity:
        """What the engine did when it was last heard of."""
        text = self.state.activity
        if text != self._activity[0]:
            self._activity = (text, decode_activity(text))
        return self._activity[1]


class Readiness(Generic[T]):
    """Calls `find` at most once a second, and never twice at a time, however many probes arrive: `/readyz` needs no
    key, and `find` reads the database and may ask another server."""

    def __init__(self, find: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        self._find = find
        self._clock = clock
        self._finding: asyncio.Task[T] | None = None
        self._found: tuple[float, T] | None = None

    async def now(self) -> T:
        """Raises what `find` raises; the next call tries again."""
        if self._found is not None and self._clock() - self._found[0] < FRESH_S:
            return self._found[1]
        if self._finding is None:
            self._finding = asyncio.create_task(self._refresh())
            self._finding.add_done_callback(_mark_exception_as_seen)
        return await asyncio.shield(self._finding)  # the caller may go away while others wait for the same task

    async def _refresh(self) -> T:
        try:
            found = await self._find()
            self._found = (self._clock(), found)
            return found
        finally:
            self._finding = None


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
