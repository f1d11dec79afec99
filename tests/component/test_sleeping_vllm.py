"""vLLM dies in the engine's loop, asleep or when it is to sleep or to wake: samples wait, training goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from api_harness import asked
from engine_harness import Harness, Trainer, harness_in, until
from fake_upstream import COMPLETIONS, FakeUpstream, Received, Reply, complete, fake_upstream, hang_up, reply

from skyrl.backends.base import ModelLimits
from skyrl.db.samplers import Sampler, Samplers
from skyrl.engine.sampling import ColocatedSampler
from skyrl.futures.kinds import Kind
from skyrl.futures.requests import NewRequest
from skyrl.inference.engine_group import EngineGroup
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.endpoint import FixedEndpoint
from skyrl.sampling.http import HttpTransport
from skyrl.wire.results import encode_json

SOON_S, NEVER_S = 0.01, 1000.0
LIMITS = ModelLimits(1000, 100)


@dataclass
class Vllm:
    """One that sleeps and wakes, on a server that a test kills and starts again. Who samples from it while it sleeps
    gets an error."""

    upstream: FakeUpstream
    asleep: bool = False
    dead: bool = False
    dies_of: str = ""
    asked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for path in ("/health", "/is_sleeping", "/sleep", "/wake_up", COMPLETIONS):
            self.upstream.controls[path] = self._answer

    async def _answer(self, request: Received, writer: asyncio.StreamWriter) -> None:
        path = request.path.partition("?")[0]
        self.asked.add(path)
        self.dead = self.dead or path == self.dies_of
        await (hang_up if self.dead else self._reply(path, request))(request, writer)

    def _reply(self, path: str, request: Received) -> Reply:
        if path in ("/sleep", "/wake_up"):
            self.asleep = path == "/sleep"
        if path == "/is_sleeping":
            return reply(200, {"is_sleeping": self.asleep})
        if path == COMPLETIONS:
            if self.asleep:
                return reply(500, "asleep")
            return complete() if "model" in request.json else reply(200, b"")  # a warm-up, whose answer nobody reads
        return reply(200, b"")

    def start_again(self) -> None:
        self.asleep = self.dead = False
        self.dies_of = ""


@dataclass
class World:
    """An engine whose samples take turns with training, one model in training, and a sampling session."""

    harness: Harness
    vllm: Vllm
    group: EngineGroup
    trainer: Trainer
    sampler: Sampler
    sent: int = 0

    async def sample(self) -> str:
        body = encode_json(asked(self.sampler.id, self.sent))
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
async def world(state_dir: Path, *, watching_s: float = SOON_S, patience_s: float = NEVER_S) -> AsyncIterator[World]:
    async with fake_upstream() as upstream, harness_in(state_dir) as harness:
        vllm = Vllm(upstream)
        group = EngineGroup(
            [upstream.url], "key", lambda _: None, starting_interval_s=SOON_S, watching_interval_s=watching_s
        )
        watching = asyncio.create_task(group.run())
        client = ForwardingClient(HttpTransport(), FixedEndpoint(upstream.url), api_key=None, deadline_s=NEVER_S)
        colocated = ColocatedSampler(
            harness.database,
            client,
            group,
            LIMITS,
            "tiny",
            state_dir=harness.config.state_dir,
            sleeps=True,
            patience_s=patience_s,
        )
        await until(lambda: group.ready)
        await harness.start(lambda h: setattr(h.engine, "_sampler", colocated))
        trainer = await Trainer.create(harness)
        sampler = Sampler(f"{trainer.session.id}:sample:0", trainer.session.id, "tenant", "tiny", None, None, None)
        await Samplers(harness.database, harness.writer).create(sampler, 0)
        yield World(harness, vllm, group, trainer, sampler)
        await harness.stop()
        await colocated.close()
        await group.close()
        await watching


@pytest.mark.parametrize("watching_s", [SOON_S, NEVER_S], ids=["noticed by the watch", "noticed by who wakes it"])
async def test_a_vllm_that_dies_in_its_sleep_holds_up_samples_alone(tmp_path: Path, watching_s: float) -> None:
    async with world(tmp_path / "state", watching_s=watching_s) as here:
        assert await here.error_of(await here.sample()) is None
        await until(lambda: here.vllm.asleep)
        here.vllm.dead = True
        here.vllm.asked.clear()
        if watching_s == SOON_S:
            await until(lambda: not here.group.ready)
        waiting = await here.sample()
        if watching_s == NEVER_S:
            await until(lambda: "/wake_up" in here.vllm.asked)
        await here.trainer.step(1)
        assert await here.pending(waiting)
        here.vllm.start_again()
        assert await here.error_of(waiting) is None
        await here.trainer.step(2)


@pytest.mark.parametrize("victim", ["/wake_up", "/sleep"])
async def test_a_vllm_that_dies_of_waking_or_of_going_to_sleep_costs_nothing(tmp_path: Path, victim: str) -> None:
    async with world(tmp_path / "state") as here:
        here.vllm.dies_of = victim
        first = await here.sample()
        await until(lambda: here.vllm.dead)
        await here.trainer.step(1)
        here.vllm.start_again()
        assert await here.error_of(first) is None
        assert await here.error_of(await here.sample()) is None


async def test_samples_of_a_vllm_that_stays_away_fail_and_say_why(tmp_path: Path) -> None:
    async with world(tmp_path / "state", patience_s=0.0) as here:
        here.vllm.dead = True
        error = await here.error_of(await here.sample())
        assert error is not None
        assert error.startswith("gave up after 0 s: vLLM")
        await here.trainer.step(1)
        here.vllm.start_again()
        await until(lambda: here.group.ready)
        assert await here.error_of(await here.sample()) is None


def test_an_absence_is_counted_from_its_own_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    now, group = 0.0, SimpleNamespace(ready=False, reason="gone")
    monkeypatch.setattr("skyrl.engine.sampling.time", SimpleNamespace(monotonic=lambda: now))
    nobody: Any = None
    options: Any = {"state_dir": Path("/nowhere"), "sleeps": True, "patience_s": 10.0}
    sampler = ColocatedSampler(nobody, nobody, cast(Any, group), LIMITS, "tiny", **options)
    assert not sampler.may_run
    now, group.ready = 5.0, True
    assert sampler.may_run
    now, group.ready = 100.0, False
    assert not sampler.may_run, "it is away since now, and not since the beginning"
    now = 109.0
    assert not sampler.may_run
    now = 110.0
    assert sampler.may_run, "what waits is to fail"


async def test_an_engine_that_finds_vllm_asleep_neither_asks_it_for_a_sample_nor_wakes_it(tmp_path: Path) -> None:
    """As one does that starts again after its death: the trainer may need the memory."""
    async with world(tmp_path / "state") as here:
        assert await here.error_of(await here.sample()) is None
        await until(lambda: here.vllm.asleep)
        here.vllm.asked.clear()
        group = EngineGroup([here.vllm.upstream.url], "key", lambda _: None, starting_interval_s=SOON_S)
        watching = asyncio.create_task(group.run())
        await until(lambda: group.ready)
        assert here.vllm.asleep
        assert not here.vllm.asked & {COMPLETIONS, "/wake_up"}
        await group.close()
        await watching
