"""Fixtures of several tests: worlds with checkpoints; an API process with its own database and upstream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_harness import BASE, Api, Serve
from blocking import noted_waits
from checkpoint_world import World, world_in
from engine_harness import NEVER_S, Harness, harness_in
from fake_upstream import FakeUpstream, fake_upstream
from two_models import ENTRIES, JUDGE, STUDENT, TEACHER, VOCABULARY, serving

import skyrl.api.server
from skyrl.api.app import create_app
from skyrl.api.server import open_services
from skyrl.base.config.server import ServerConfig
from skyrl.engine import sweeping
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import ONLY_SAMPLED, publish_training, publish_url


@pytest.fixture(autouse=True)
def no_loop_waits() -> Iterator[None]:
    """Fail the test if code of skyrl waits for the database or for a thread on an event loop."""
    with noted_waits() as found:
        yield
    assert not found, "\n".join(found)


@pytest.fixture(autouse=True)
def sweeps_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tests sweep. The engine's own sweep comes every ten seconds, so it would run in the middle of a slow test.
    The end-to-end tests of lifecycle have it."""
    monkeypatch.setattr(sweeping, "SWEEP_S", NEVER_S)


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    """An engine that takes snapshots only when a test, a load or a stop asks for them."""
    async with harness_in(tmp_path / "state") as harness:
        await harness.start()
        yield harness


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_in(tmp_path / "state") as world:
        yield world


@pytest.fixture
def on_s3(new_bucket: Callable[[], Any]) -> dict[str, Any]:
    bucket = new_bucket()
    return {"checkpoint_store": bucket.url, "checkpoint_store_options": bucket.options}


@pytest.fixture(params=["local", "s3"])
async def each_world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """The same world on each kind of checkpoint store."""
    flags = request.getfixturevalue("on_s3") if request.param == "s3" else {}
    async with world_in(tmp_path / "state", **flags) as world:
        yield world


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with fake_upstream() as server:
        yield server


@pytest.fixture
def database(migrated_url: str, upstream: FakeUpstream) -> Iterator[Database]:
    """The database of the API process. The upstream is published there, as the engine publishes it."""
    database = Database(migrated_url)
    database.write(lambda c: publish_url(c, upstream.url))
    database.write(lambda c: publish_training(c, ready=True, reason="", vocab_size=1000, max_context=100))
    yield database
    database.close()


@pytest.fixture
def serve(tmp_path: Path, database: Database) -> Serve:
    """Starts an API process on the database. A second call after the first has ended is a restart."""

    @asynccontextmanager
    async def start(*, cuda: bool = False, **options: Any) -> AsyncIterator[Api]:
        config = ServerConfig(**{"base_model": BASE, "state_dir": tmp_path, "database_url": database.url} | options)
        async with open_services(Runtime(config, tmp_path, None, "key", cuda=cuda)) as services:
            transport = httpx.ASGITransport(create_app(services), raise_app_exceptions=False)
            headers = {"X-API-Key": "tml-one"}
            async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as http:
                yield Api(services, http)

    return start


@pytest.fixture
async def api(serve: Serve) -> AsyncIterator[Api]:
    async with serve() as running:
        yield running


@pytest.fixture
async def upstreams() -> AsyncIterator[dict[str, FakeUpstream]]:
    """A server for each of several base models, by its name."""
    async with fake_upstream() as student, fake_upstream() as teacher, fake_upstream() as judge:
        yield {STUDENT: student, TEACHER: teacher, JUDGE: judge}


@pytest.fixture
def shared(migrated_url: str, upstreams: dict[str, FakeUpstream]) -> Iterator[Database]:
    """The database of an API process with several base models. Their upstreams are published there."""
    database = Database(migrated_url)
    for name, vocabulary in VOCABULARY.items():
        trains, url = name == STUDENT, upstreams[name].url
        reason = "" if trains else ONLY_SAMPLED
        database.write(lambda c, name=name, url=url: publish_url(c, url, name))
        database.write(
            lambda c, name=name, trains=trains, reason=reason, size=vocabulary: publish_training(
                c, ready=trains, reason=reason, vocab_size=size, max_context=100, key=name
            )
        )
    yield database
    database.close()


@pytest.fixture
async def two_models(shared: Database, tmp_path: Path, upstreams: dict[str, FakeUpstream]) -> AsyncIterator[Api]:
    """A student, a teacher that is only sampled from, and a judge that somebody else runs."""
    judge = {"base_model": JUDGE, "uses": ["sample"], "external_inference_url": upstreams[JUDGE].url}
    async with serving(shared, tmp_path, [*ENTRIES, judge]) as api:
        yield api


@pytest.fixture
def drain_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends without waiting for running samples."""
    monkeypatch.setattr(skyrl.api.server, "DRAIN_S", 0.05)
