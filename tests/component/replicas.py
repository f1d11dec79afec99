"""Scripted inference servers for an EngineGroup: they load and unload adapters and report their health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fake_upstream import COMPLETIONS, LOAD, FakeUpstream, Received, Reply, complete, fake_upstream, hang_up, reply

from skyrl.base.types.weights import AdapterVersion
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.full_weights import FullWeightsOfReplicas
from skyrl.inference.replica import Addresses, CallTimeouts, Replica
from skyrl.inference.vllm_plugin.protocol import INCARNATION

UNLOAD = "/v1/unload_lora_adapter"
SOON_S = 0.01
NEVER_S = 1000.0
WELL, ILL, GONE = reply(200, b""), reply(503, b""), hang_up
TIMEOUTS = CallTimeouts(health_s=NEVER_S, load_s=NEVER_S, unload_s=NEVER_S, sleep_s=NEVER_S, warm_up_s=NEVER_S)
"""Timeouts that no answer exceeds, however slow the machine is."""


def set_replies(upstream: FakeUpstream, health: Reply = WELL) -> None:
    """Set the replies of the upstream from now on; every adapter load succeeds."""
    upstream.controls = {
        "/health": health,
        "/is_sleeping": reply(200, {"is_sleeping": False}),
        COMPLETIONS: WELL,
        LOAD: WELL,
        UNLOAD: WELL,
    }


class AdapterDirectories:
    """An AdapterHost that has the files of every adapter."""

    copies = False

    async def bring(self, adapter: AdapterVersion) -> str:
        return f"/adapters/{adapter.name}"


def replica_at(url: str, *, name: str = "", timeouts: CallTimeouts = TIMEOUTS, sidecar: str | None = None) -> Replica:
    return Replica(name or url, Addresses.same(url, sidecar), "key", AdapterDirectories(), timeouts)


def group_of(
    *replicas: str | Replica,
    proxy_url: str | None = None,
    members: Any = None,
    watching_s: float = SOON_S,
    in_use: Sequence[AdapterVersion] = (),
    grace_s: float = NEVER_S,
    weights: FullWeightsOfReplicas | None = None,
    has_all: bool = True,
) -> tuple[EngineGroup, list[str | None]]:
    """A group with short intervals, not yet running; and the list of URLs that it publishes."""
    published: list[str | None] = []

    async def publish(url: str | None) -> None:
        published.append(url)

    async def adapters() -> Sequence[AdapterVersion]:
        return in_use

    group = EngineGroup(
        [replica_at(given) if isinstance(given, str) else given for given in replicas],
        publish,
        adapters,
        proxy_url=proxy_url,
        members=members,
        weights=weights,
        has_all=has_all,
        starting_interval_s=SOON_S,
        watching_interval_s=watching_s,
        grace_s=grace_s,
    )
    return group, published


@dataclass
class Server:
    """An inference server that a test hangs, kills and starts again. Each start loses its adapters. A sample for an
    adapter that it does not have gets 404."""

    upstream: FakeUpstream
    adapters: set[str] = field(default_factory=set)
    starts: int = 1
    dead: bool = False
    dies_of: str = ""
    """The server dies when it gets a load of this adapter."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Loads and unloads in their order, as (path, adapter), even those without an answer."""
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    """While the event is not set, the server answers nothing, like a process after SIGSTOP."""

    def __post_init__(self) -> None:
        self.may_answer.set()
        for path in ("/health", "/is_sleeping", "/sleep", "/wake_up", COMPLETIONS, LOAD, UNLOAD):
            self.upstream.controls[path] = self._answer

    @property
    def url(self) -> str:
        return self.upstream.url

    def replica(self, *, unload_s: float = NEVER_S, health_s: float = NEVER_S, sidecar: str | None = None) -> Replica:
        timeouts = replace(TIMEOUTS, unload_s=unload_s, health_s=health_s)
        return replica_at(self.url, timeouts=timeouts, sidecar=sidecar)

    def hang(self) -> None:
        self.may_answer.clear()

    def restart(self) -> None:
        """Start the server again, without adapters."""
        self.starts += 1
        self.adapters.clear()
        self.dead = False
        self.may_answer.set()

    async def _answer(self, request: Received, writer: asyncio.StreamWriter) -> None:
        path = request.path.partition("?")[0]
        name = request.json.get("lora_name", "") if path in (LOAD, UNLOAD) else ""
        if name:
            self.calls.append((path, name))
        await self.may_answer.wait()
        if path == LOAD and name == self.dies_of:
            self.dead = True
        await (hang_up if self.dead else self._reply(path, name, request))(request, writer)

    def _reply(self, path: str, name: str, request: Received) -> Reply:
        if path == "/health":
            return reply(200, b"", **{INCARNATION.replace("-", "_"): f"start {self.starts}"})
        if path == "/is_sleeping":
            return reply(200, {"is_sleeping": False})
        if path == LOAD:
            self.adapters.add(name)
        if path == UNLOAD:
            if name not in self.adapters:
                return reply(404, {"error": "no such adapter"})
            self.adapters.remove(name)
        if path == COMPLETIONS and "model" in request.json:  # a warm-up names no model, and nobody reads its answer
            known = request.json["model"] in self.adapters
            return complete() if known else reply(404, {"error": "no such model"})
        return WELL


@asynccontextmanager
async def servers(count: int) -> AsyncIterator[list[Server]]:
    async with AsyncExitStack() as stack:
        yield [Server(await stack.enter_async_context(fake_upstream())) for _ in range(count)]


@asynccontextmanager
async def running(group: EngineGroup) -> AsyncIterator[None]:
    watching = asyncio.create_task(group.run())
    try:
        yield
    finally:
        await group.close()
        await watching
