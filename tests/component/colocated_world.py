"""An engine that runs samples itself, between turns of training, on a vLLM that sleeps during training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapter_hosts import HostWithAllAdapters
from api_harness import sample_body
from engine_harness import Harness, Trainer, harness_in, until
from fake_upstream import COMPLETIONS, FakeUpstream, Received, Reply, after, complete, fake_upstream, hang_up, reply
from replicas import SOON_S, group_of

from skyrl.base.pictures.vision import NoVision, VisionConfig
from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.types.requests import Kind, NewRequest
from skyrl.base.types.weights import BaseWeights
from skyrl.base.wire.results import encode_json
from skyrl.engine.colocated_sampling import ColocatedSampler
from skyrl.http.client import HttpClient
from skyrl.inference.engine_group import EngineGroup
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.servers import FixedEndpoint
from skyrl.storage.db.pictures import PictureFiles
from skyrl.storage.db.samplers import Sampler, Samplers

NEVER_S = 1000.0
LIMITS = ContextLimits(1000, 100)
TEXT_ONLY = NoVision("it is a model of text")


@dataclass
class Vllm:
    """A vLLM that sleeps and wakes, on a server that a test kills and starts again. A sample during sleep fails with
    500."""

    upstream: FakeUpstream
    asleep: bool = False
    dead: bool = False
    dies_of: str = ""
    requested_paths: list[str] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    """Wake-ups, samples and sleeps, in their order."""
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    """Samples wait for this event, which is set at first."""

    def __post_init__(self) -> None:
        self.may_answer.set()
        for path in ("/health", "/is_sleeping", "/sleep", "/wake_up", COMPLETIONS):
            self.upstream.controls[path] = self._answer

    async def _answer(self, request: Received, writer: asyncio.StreamWriter) -> None:
        path = request.path.partition("?")[0]
        self.requested_paths.append(path)
        self.dead = self.dead or path == self.dies_of
        await (hang_up if self.dead else self._reply(path, request))(request, writer)

    def _reply(self, path: str, request: Received) -> Reply:
        if path in ("/sleep", "/wake_up"):
            self.turns.append(path)
            self.asleep = path == "/sleep"
        if path == "/is_sleeping":
            return reply(200, {"is_sleeping": self.asleep})
        if path == COMPLETIONS and "model" in request.json:  # a warm-up names no model, and nobody reads its answer
            self.turns.append("sample")
            return reply(500, "asleep") if self.asleep else after(self.may_answer, complete())
        return reply(200, b"")

    def start_again(self) -> None:
        self.asleep = self.dead = False
        self.dies_of = ""


@dataclass
class World:
    """An engine whose samples take turns with training, one model in training, and one sampling session."""

    harness: Harness
    vllm: Vllm
    group: EngineGroup
    trainer: Trainer
    sampler: Sampler
    sent: int = 0

    async def sample(self, **fields: Any) -> str:
        body = encode_json(sample_body(self.sampler.id, self.sent, **fields))
        ids = (self.sampler.tenant, self.sampler.session_id)
        request = NewRequest(Kind.SAMPLE, *ids, body, "json", None, None, self.sampler.id, self.sent)
        self.sent += 1
        request_id, _ = await self.harness.store.record(request)
        self.harness.engine.ring()
        return request_id

    async def error_of(self, request_id: str) -> str | None:
        return (await self.harness.outcome(request_id)).error

    async def pending(self, request_id: str) -> bool:
        query = f"SELECT status FROM futures WHERE id = '{request_id}'"
        return await self.harness.database.read_async(lambda c: c.exec_driver_sql(query).scalar_one()) == "pending"


@asynccontextmanager
async def world(
    state_dir: Path,
    *,
    watching_s: float = SOON_S,
    give_up_after_s: float = NEVER_S,
    sight: VisionConfig | NoVision = TEXT_ONLY,
) -> AsyncIterator[World]:
    async with fake_upstream() as upstream, harness_in(state_dir) as harness:
        vllm = Vllm(upstream)
        group, published = group_of(upstream.url, watching_s=watching_s)
        watching = asyncio.create_task(group.run())
        client = ForwardingClient(
            HttpClient(),
            FixedEndpoint(upstream.url),
            HostWithAllAdapters(),
            api_key=None,
            deadline_s=NEVER_S,
            pictures=PictureFiles(harness.database),
        )
        colocated = ColocatedSampler(
            harness.database,
            client,
            group,
            LIMITS,
            "tiny",
            sight=sight,
            sleeps=True,
            give_up_after_s=give_up_after_s,
        )
        await until(lambda: published == [upstream.url])
        await harness.start(group=group, sampler=colocated)
        trainer = await Trainer.create(harness)
        sampler = Sampler(f"{trainer.session.id}:sample:0", trainer.session.id, "tenant", "tiny", None, BaseWeights())
        await Samplers(harness.database, harness.writer).create(sampler, 0)
        yield World(harness, vllm, group, trainer, sampler)
        await harness.stop()
        await colocated.close()
        await group.close()
        await watching
