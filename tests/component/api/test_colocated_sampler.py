"""Samples that the engine runs itself: vLLM is awake for samples only, cancelled samples do not run, and a vLLM that
dies asleep delays samples only."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from adapter_hosts import HostWithAllAdapters
from api_harness import sample_body
from engine_harness import Harness, Trainer, harness_in, until
from fake_upstream import COMPLETIONS, FakeUpstream, Received, Reply, after, complete, fake_upstream, hang_up, reply
from replicas import SOON_S, group_of
from sqlalchemy import select
from test_forwarding_pictures import IMAGE, generated, requests

from skyrl.base.pictures.picture import digest_of
from skyrl.base.pictures.places import KnownPicture
from skyrl.base.pictures.vision import NoVision, VisionConfig
from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.types.requests import Kind, NewRequest
from skyrl.base.types.weights import BaseWeights
from skyrl.base.wire.results import encode_json
from skyrl.engine.colocated_sampling import ColocatedSampler
from skyrl.http.client import HttpClient
from skyrl.inference.engine_group import EngineGroup
from skyrl.sampling import pictures as generation
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.servers import FixedEndpoint
from skyrl.sampling.service import CANCELLED
from skyrl.storage.db import pictures
from skyrl.storage.db.pictures import CheckedFile, PictureFiles
from skyrl.storage.db.samplers import Sampler, Samplers
from skyrl.storage.db.usage import usage

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


FILE = b"\x89PNG\r\n\x1a\n of a test"
TURN = ["/wake_up", "sample", "/sleep"]


async def test_cancelled_samples_are_not_run_and_the_others_are_counted(tmp_path: Path) -> None:
    async with world(tmp_path / "state") as here:
        harness, vllm = here.harness, here.vllm
        vllm.may_answer.clear()
        first = await here.sample(prompt=[5, 6, 7], num_samples=2)
        await until(lambda: "sample" in vllm.turns)
        kept, cancelled = [await here.sample(prompt=[5, 6, 7], num_samples=2) for _ in range(2)]
        await harness.queued(2)  # the engine has read both samples and has begun neither
        assert await harness.store.end(cancelled, CANCELLED)
        vllm.may_answer.set()
        for request_id in (first, kept):
            assert await here.error_of(request_id) is None
        assert await harness.outcome(cancelled) == CANCELLED
        await until(lambda: vllm.asleep)
        assert vllm.turns == TURN * 2
        counted = Counter[str]()
        for row in harness.database.read(lambda c: c.execute(select(usage)).all()):
            if row.kind.startswith("sampling_"):
                assert (row.tenant, row.session_id, row.base_model) == ("tenant", here.sampler.session_id, "tiny")
                counted[row.kind] += row.amount
        assert counted == {"sampling_prefill": 2 * 3, "sampling_sample": 2 * 2 * 3}


async def test_a_sample_about_a_picture_has_its_file_from_the_database(tmp_path: Path) -> None:
    sight = VisionConfig("qwen3_vl", IMAGE, patch=16, merge=2, min_pixels=32 * 32, max_pixels=256 * 256)
    async with world(tmp_path / "state", sight=sight) as here:
        here.vllm.upstream.controls[generation.PATH] = generated(6)
        digest = digest_of(FILE)
        new = {digest: CheckedFile(KnownPicture("png", 64, 96), FILE)}
        here.harness.database.write(lambda c: pictures.keep(c, here.sampler.tenant, "r", new, new, 2**30))
        named = {"location": f"sha256:{digest}", "format": "png"}
        request_id = await here.sample(prompt={"chunks": [{"tokens": [5]}, named, {"tokens": [6]}]})
        assert await here.error_of(request_id) is None
        (sent,) = requests(here.vllm.upstream)
        assert sent["token_ids"] == [5, IMAGE, 6]
        (part,) = sent["content_parts"]
        assert base64.b64decode(part["url"].partition(",")[2]) == FILE
        unknown = {"location": f"sha256:{'0' * 64}", "format": "png"}
        error = await here.error_of(await here.sample(prompt={"chunks": [{"tokens": [5]}, unknown]}))
        assert error == "prompt.chunks[1]: is not stored on this server any more; send the file"


async def test_waiting_samples_run_in_one_turn_and_vllm_sleeps_while_models_train(tmp_path: Path) -> None:
    async with world(tmp_path / "state") as here:
        here.vllm.may_answer.clear()
        first = await here.sample()
        await until(lambda: "sample" in here.vllm.turns)
        others = [await here.sample() for _ in range(3)]
        await here.harness.queued(3)
        here.vllm.may_answer.set()
        for request_id in (first, *others):
            assert await here.error_of(request_id) is None
        await until(lambda: here.vllm.asleep)
        await here.trainer.step(1)
        assert here.vllm.turns == [*TURN, "/wake_up", *["sample"] * 3, "/sleep"]


async def test_vllm_stays_asleep_if_all_waiting_samples_were_cancelled(tmp_path: Path) -> None:
    async with world(tmp_path / "state") as here:
        here.vllm.may_answer.clear()
        first = await here.sample()
        await until(lambda: "sample" in here.vllm.turns)
        cancelled = await here.sample()
        await here.harness.queued(1)
        assert await here.harness.store.end(cancelled, CANCELLED)
        here.vllm.may_answer.set()
        assert await here.error_of(first) is None
        await here.trainer.step(1)
        await until(lambda: not here.harness.scheduler.waiting)
        assert here.vllm.turns == TURN


@pytest.mark.parametrize("watching_s", [SOON_S, NEVER_S], ids=["noticed by the watch", "noticed by the wake-up"])
async def test_a_vllm_that_dies_asleep_delays_samples_only(tmp_path: Path, watching_s: float) -> None:
    async with world(tmp_path / "state", watching_s=watching_s) as here:
        assert await here.error_of(await here.sample()) is None
        await until(lambda: here.vllm.asleep)
        here.vllm.dead = True
        here.vllm.requested_paths.clear()
        if watching_s == SOON_S:
            await until(lambda: not here.group.ready)
        waiting = await here.sample()
        if watching_s == NEVER_S:
            await until(lambda: "/wake_up" in here.vllm.requested_paths)
        await here.trainer.step(1)
        assert await here.pending(waiting)
        here.vllm.start_again()
        assert await here.error_of(waiting) is None
        await here.trainer.step(2)


@pytest.mark.parametrize("victim", ["/wake_up", "/sleep"])
async def test_a_vllm_that_dies_when_woken_or_put_to_sleep_loses_nothing(tmp_path: Path, victim: str) -> None:
    async with world(tmp_path / "state") as here:
        here.vllm.dies_of = victim
        first = await here.sample()
        await until(lambda: here.vllm.dead)
        await here.trainer.step(1)
        here.vllm.start_again()
        assert await here.error_of(first) is None
        assert await here.error_of(await here.sample()) is None


async def test_samples_fail_with_a_reason_if_vllm_stays_down(tmp_path: Path) -> None:
    async with world(tmp_path / "state", give_up_after_s=0.0) as here:
        here.vllm.dead = True
        error = await here.error_of(await here.sample())
        assert error is not None
        assert error.startswith("gave up after 0 s: vLLM")
        await here.trainer.step(1)
        here.vllm.start_again()
        await until(lambda: here.group.ready)
        assert await here.error_of(await here.sample()) is None


def test_each_absence_is_measured_from_its_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now, group = 0.0, SimpleNamespace(ready=False, reason="gone")
    monkeypatch.setattr("skyrl.engine.colocated_sampling.time", SimpleNamespace(monotonic=lambda: now))
    unused: Any = None
    options: Any = {"sight": unused, "sleeps": True, "give_up_after_s": 10.0}
    sampler = ColocatedSampler(unused, unused, cast(Any, group), LIMITS, "tiny", **options)
    assert not sampler.may_run
    now, group.ready = 5.0, True
    assert sampler.may_run
    now, group.ready = 100.0, False
    assert not sampler.may_run, "the absence begins now, not at the start"
    now = 109.0
    assert not sampler.may_run
    now = 110.0
    assert sampler.may_run, "waiting samples may run, and fail"


async def test_an_engine_that_finds_vllm_asleep_neither_samples_nor_wakes_it(tmp_path: Path) -> None:
    """An engine that restarts after its death finds vLLM asleep. Waking vLLM could take the memory that the trainer
    needs."""
    async with world(tmp_path / "state") as here:
        assert await here.error_of(await here.sample()) is None
        await until(lambda: here.vllm.asleep)
        here.vllm.requested_paths.clear()
        group, _ = group_of(here.vllm.upstream.url, watching_s=1.0)
        watching = asyncio.create_task(group.run())
        await until(lambda: group.ready)
        assert here.vllm.asleep
        assert not set(here.vllm.requested_paths) & {COMPLETIONS, "/wake_up"}
        await group.close()
        await watching
