"""Two API processes on one database, both run inside the test: which process forwards a sample, which processes hear of
its end, and when a process counts as dead."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from api_harness import BASE, LONG_S, Api, sample_body, session_of, tokens
from engine_harness import until
from fake_upstream import FakeUpstream, after, complete, never
from sqlalchemy import event, insert, select, text, update

import skyrl.api.server
import skyrl.api.services
import skyrl.storage.db.sessions
from skyrl.api.app import create_app
from skyrl.api.server import open_services
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.requests import Kind, NewRequest
from skyrl.runtime.processes.runtime import Runtime
from skyrl.sampling.service import MISSES, TURNS_BETWEEN, SampleOwnership
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import SETTLE, Outcome, futures, settlement
from skyrl.storage.db.processes import processes
from skyrl.storage.db.sessions import LONG_LOOK_S, sessions
from tests.postgres_server import ON_BOTH

pytestmark = [ON_BOTH, pytest.mark.usefixtures("drain_at_once")]

NEVER_S = 3600.0
TIMEOUT_S = 300.0


@pytest.fixture(autouse=True)
def no_periodic_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests call the periodic work themselves."""
    monkeypatch.setattr(skyrl.api.server, "BEAT_S", NEVER_S)
    monkeypatch.setattr(skyrl.api.server, "SESSION_CHECK_S", NEVER_S)


@pytest.fixture
def ownerships(monkeypatch: pytest.MonkeyPatch) -> list[SampleOwnership]:
    """The SampleOwnership of each process, in the order of their starts."""
    instances: list[SampleOwnership] = []

    class RecordedOwnership(SampleOwnership):
        def __init__(self, *parts: Any, **options: Any) -> None:
            super().__init__(*parts, **options)
            instances.append(self)

    monkeypatch.setattr(skyrl.api.services, "SampleOwnership", RecordedOwnership)
    return instances


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short path, for the sockets."""
    with TemporaryDirectory(prefix="skyrl-test-") as path:
        yield Path(path)


Start = Callable[..., Any]


@pytest.fixture
def start(database: Database, tmp_path: Path, directory: Path) -> Start:
    """Starts the API process with this name, and with these options."""

    @asynccontextmanager
    async def named(name: str, **given: Any) -> AsyncIterator[Api]:
        options: dict[str, Any] = {"base_model": BASE, "state_dir": tmp_path, "database_url": database.url} | given
        config = ServerConfig(**options)
        own = directory / name
        own.mkdir(exist_ok=True)
        async with open_services(Runtime(config, own, None, "key", name)) as services:
            transport = httpx.ASGITransport(create_app(services), raise_app_exceptions=False)
            headers = {"X-API-Key": "tml-one"}
            async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as http:
                yield Api(services, http)

    return named


@pytest.fixture
async def two(start: Start, ownerships: list[SampleOwnership]) -> AsyncIterator[tuple[Api, Api]]:
    async with AsyncExitStack() as running:
        first, second = [await running.enter_async_context(start(name)) for name in ("first", "second")]
        await ownerships[0].round()  # the first process, which started earlier, learns of the second one
        yield first, second


def owners(database: Database) -> list[str | None]:
    return database.read(lambda c: list(c.execute(select(futures.c.owner).order_by(futures.c.n)).scalars()))


def set_owner(database: Database, request_id: str, owner: str | None) -> None:
    database.write(lambda c: c.execute(update(futures).where(futures.c.id == request_id).values(owner=owner)))


def in_flight(api: Api) -> int:
    return api.services.sampling.in_flight


async def test_a_sample_repeated_at_the_other_process_is_forwarded_once(
    two: tuple[Api, Api], upstream: FakeUpstream, database: Database
) -> None:
    first, second = two
    sampler = await first.sampler()
    asking = [(first, second)[turn % 2].sample(sampler, turn // 2) for turn in range(20)]
    promises = await asyncio.gather(*asking)
    assert promises[::2] == promises[1::2]
    for promise in promises:
        assert tokens(await second.result(promise["request_id"])) == [[0, 1, 2]]
    assert len(upstream.completions) == 10
    assert len(owners(database)) == 10
    other = await second.post("asample", sample_body(sampler, 3, prompt=[9]))
    assert other.status_code == 400
    assert other.json()["field"] == "seq_id"


async def test_a_process_hears_of_an_end_without_reading_the_database(
    monkeypatch: pytest.MonkeyPatch,
    start: Start,
    ownerships: list[SampleOwnership],
    upstream: FakeUpstream,
    database: Database,
) -> None:
    if database.is_sqlite:
        pytest.skip("SQLite tells nobody; the case on PostgreSQL runs")
    monkeypatch.setattr(skyrl.api.server, "SAFETY_POLL_S", NEVER_S)
    go = asyncio.Event()
    upstream.default = after(go, complete())
    listening = text(
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
    )
    async with start("first") as first, start("second") as second:
        await ownerships[0].round()
        await until(lambda: database.read(lambda c: c.execute(listening).scalar_one()) == 2)
        sampler = await first.sampler()
        assert (await second.post("asample", sample_body(sampler, 0))).status_code == 200, (
            "the second process knows the session"
        )
        request_id = (await first.sample(sampler, 1))["request_id"]
        poll = asyncio.create_task(second.result(request_id))
        await until(lambda: second.services.futures.pending == 2)
        go.set()
        assert tokens(await asyncio.wait_for(poll, LONG_S)) == [[0, 1, 2]]
        await first.finish(sampler)
        while (answer := await second.post("asample", sample_body(sampler, 2))).status_code != 404:
            assert answer.status_code == 200
            await asyncio.sleep(0.001)  # only this test's own tasks run, because the poll is answered from memory


async def test_a_sample_is_recorded_while_another_process_commits(
    two: tuple[Api, Api], upstream: FakeUpstream, database: Database
) -> None:
    if database.is_sqlite:
        pytest.skip("SQLite has one writer at a time; the case on PostgreSQL runs")
    first, _ = two
    go = asyncio.Event()
    upstream.default = after(go, complete())
    sampler = await first.sampler()
    with database.writer.begin():
        promise = await asyncio.wait_for(first.sample(sampler, 1), LONG_S)
        await until(lambda: len(upstream.completions) == 1)
        go.set()
        assert (await first.post("asample", sample_body(sampler, 1))).json() == promise
        assert first.services.futures.is_pending(promise["request_id"]), "its end waits, because ends have an order"
    assert tokens(await first.result(promise["request_id"])) == [[0, 1, 2]]


async def test_where_the_engine_samples_left_samples_are_for_others_to_forward(
    start: Start, ownerships: list[SampleOwnership], upstream: FakeUpstream, database: Database
) -> None:
    """A server beside a gateway with a vLLM of its own. Without a gateway they fail."""
    colocated = {"backend_config": {"trainer.placement.colocate_all": True}}
    async with start("gateway") as gateway, start("trainer", **colocated) as trainer:
        for ownership in ownerships:
            await ownership.round()
        upstream.default = never
        sampler = await gateway.sampler()
        left = (await gateway.sample(sampler, 1))["request_id"]
        await upstream.until(lambda server: server.busy == 1)
        set_owner(database, left, "gone/0")
        await ownerships[1].round()
        assert owners(database) == ["gone/0"]
        for _ in range(MISSES):  # the gateway beats no more
            await ownerships[1].round()
        assert "now samples in its engine" in (await trainer.result(left)).text


async def test_one_process_takes_over_the_samples_of_a_silent_process(
    two: tuple[Api, Api], ownerships: list[SampleOwnership], upstream: FakeUpstream, database: Database
) -> None:
    first, second = two
    upstream.default = never
    sampler = await first.sampler()
    left = (await first.sample(sampler, 1))["request_id"]
    poll = asyncio.create_task(second.result(left))
    await until(lambda: second.services.futures.pending == 1)
    await upstream.until(lambda server: server.busy == 1)
    dead = {"id": "dead/0", "started_at": 1.0, "heartbeat_at": 1.0}
    database.write(lambda c: c.execute(insert(processes), dead))
    set_owner(database, left, "dead/0")
    for _ in range(MISSES):
        await ownerships[1].round()
        assert in_flight(second) == 0
        await ownerships[0].round()
    upstream.default = complete()
    await ownerships[1].round()
    assert owners(database) == ["second/0"]
    assert tokens(await asyncio.wait_for(poll, LONG_S)) == [[0, 1, 2]]
    await ownerships[0].round()
    assert in_flight(first) == 0, "the first process knows that it lost the sample"
    assert await poll_of(first, left) == (await poll).content


async def poll_of(api: Api, request_id: str) -> bytes:
    return (await asyncio.wait_for(api.result(request_id), LONG_S)).content


async def test_a_process_with_heartbeats_or_not_observed_long_enough_keeps_its_samples(
    two: tuple[Api, Api], ownerships: list[SampleOwnership], upstream: FakeUpstream, database: Database
) -> None:
    upstream.default = never
    first, _ = two
    await first.sample(await first.sampler(), 1)
    for _ in range(3):
        for _ in range(MISSES):
            await ownerships[1].round()
        await ownerships[0].round()
    await ownerships[1].round()
    assert owners(database) == ["first/0"]
    assert in_flight(first) == 1


async def test_the_samples_of_a_stopped_process_are_taken_over_at_the_next_round(
    start: Start, ownerships: list[SampleOwnership], upstream: FakeUpstream, database: Database
) -> None:
    upstream.default = never
    async with start("second") as second:
        async with start("first") as first:
            await ownerships[0].round()
            promise = await first.sample(await first.sampler(), 1)
        assert in_flight(second) == 0
        upstream.default = complete()
        await ownerships[0].round()
        assert owners(database) == ["second/0"]
        assert tokens(await second.result(promise["request_id"])) == [[0, 1, 2]]


async def test_a_sample_of_an_unknown_owner_is_taken_over_at_the_next_round(
    two: tuple[Api, Api], ownerships: list[SampleOwnership], upstream: FakeUpstream, database: Database
) -> None:
    """The owner was stopped, declared dead, went on and was killed; or one round of it failed."""
    upstream.default = never
    first, second = two
    request_id = (await first.sample(await first.sampler(), 1))["request_id"]
    await until(lambda: upstream.busy == 1)
    set_owner(database, request_id, "gone/0")
    upstream.default = complete()
    await ownerships[1].round()
    assert owners(database) == ["second/0"]
    assert tokens(await second.result(request_id)) == [[0, 1, 2]]


@pytest.fixture
def periodic_work(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    """The periodic work of a process, by name; the test calls it."""
    actions: dict[str, Callable[[], Any]] = {}

    async def kept(name: str, _: float, action: Callable[[], Any], **_options: Any) -> None:
        actions[name] = action

    monkeypatch.setattr(skyrl.api.server, "repeat", kept)
    return actions


async def settle() -> None:
    """Let every task run until it waits for another task."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_single_process_on_sqlite_writes_no_heartbeats(
    start: Start, periodic_work: dict[str, Callable[[], Any]], database: Database
) -> None:
    def beats() -> float:
        return database.read(lambda c: c.execute(select(processes.c.heartbeat_at)).scalar_one())

    async with start("first"):
        await settle()
        before = beats()
        await periodic_work["looking after the other API processes"]()
        assert (beats() == before) is database.is_sqlite


async def test_the_samples_of_the_process_before_are_forwarded_over_many_turns(
    start: Start, upstream: FakeUpstream
) -> None:
    upstream.default = never
    async with start("first") as api:
        sampler = await api.sampler()
        ids = [(await api.sample(sampler, number))["request_id"] for number in range(20)]
    async with start("first") as api:
        assert all(api.services.futures.forwards(request_id) for request_id in ids), "polls may come"
        flying = [in_flight(api)]
        while flying[-1] < 20:
            await asyncio.sleep(0)
            flying.append(in_flight(api))
        turns = [turn for turn, (before, now) in enumerate(itertools.pairwise(flying)) if now > before]
        assert min(later - turn for turn, later in itertools.pairwise(turns)) >= TURNS_BETWEEN
        assert max(now - before for before, now in itertools.pairwise(flying)) == 1
    upstream.default = complete()
    async with start("first") as api:
        for request_id in ids:
            assert tokens(await api.result(request_id)) == [[0, 1, 2]]


async def test_on_sqlite_the_samples_of_a_process_of_another_name_are_forwarded(
    start: Start, periodic_work: dict[str, Callable[[], Any]], upstream: FakeUpstream, database: Database
) -> None:
    """The state directory of a killed process was copied."""
    upstream.default = never
    async with start("first") as first:
        request_id = (await first.sample(await first.sampler(), 1))["request_id"]
    database.write(lambda c: c.execute(insert(processes), {"id": "first/0", "started_at": 1.0, "heartbeat_at": 1.0}))
    upstream.default = complete()
    async with start("second") as second:
        await settle()
        for _ in range(MISSES):
            await periodic_work["looking after the other API processes"]()
        assert len(upstream.completions) == 1, "a round sends heartbeats, and does not wait for samples that were left"
        assert second.services.admission.requests == 1, "they count from then on"
        await periodic_work["forwarding samples that were left"]()
        assert tokens(await second.result(request_id)) == [[0, 1, 2]]


async def test_a_sample_without_owner_is_forwarded_at_the_next_start(
    start: Start, upstream: FakeUpstream, database: Database
) -> None:
    """The row is from a version without owners."""
    upstream.default = never
    async with start("first") as first:
        request_id = (await first.sample(await first.sampler(), 1))["request_id"]
    set_owner(database, request_id, None)
    upstream.default = complete()
    async with start("second") as second:
        assert tokens(await second.result(request_id)) == [[0, 1, 2]]


async def test_a_process_finds_its_own_sample_that_is_not_in_memory(
    two: tuple[Api, Api], ownerships: list[SampleOwnership], upstream: FakeUpstream
) -> None:
    """The connection broke at the commit of the sample, and the client repeats the sample at the other process."""
    first, second = two
    upstream.default = never
    sampler = await first.sampler()
    promise = await first.sample(sampler, 1)
    first.services.sampling.cancel(first.services.futures.drop_session(session_of(sampler)))
    assert await second.sample(sampler, 1) == promise
    assert in_flight(second) == 0, "the sample belongs to the other process"
    await until(lambda: in_flight(first) == 0)
    upstream.default = complete()
    await ownerships[0].round()
    assert tokens(await second.result(promise["request_id"])) == [[0, 1, 2]]


async def test_a_sample_can_be_cancelled_or_ended_at_the_other_process(
    two: tuple[Api, Api], ownerships: list[SampleOwnership], upstream: FakeUpstream, database: Database
) -> None:
    first, second = two
    upstream.default = never
    sampler = await first.sampler()
    cancelled, left = [(await first.sample(sampler, number))["request_id"] for number in (1, 2)]
    waiting = asyncio.create_task(first.result(cancelled))
    await second.post("cancel_future", {"request_id": cancelled})
    await ownerships[0].round()
    assert (await asyncio.wait_for(waiting, LONG_S)).json()["error"] == "cancelled by the client"
    await until(lambda: in_flight(first) == 1)

    await second.finish(sampler)
    await first.services.session_life.check()
    await until(lambda: in_flight(first) == 0)
    assert (await first.post("asample", sample_body(sampler, 3))).status_code == 404
    ended = [settlement(left, Outcome(error="the session has ended"), time.time())]  # written as the engine writes it
    database.write(lambda c: SETTLE.execute(c, ended))
    assert (await first.result(left)).json() == (await second.result(left)).json()


async def test_both_processes_know_a_new_project(two: tuple[Api, Api]) -> None:
    first, second = two
    session = session_of(await first.sampler())
    key = first.services.access.caller("tml-one").tenant
    assert await second.services.sessions.find(session, key) is not None
    await first.http.put(f"/api/v1/sessions/{session}/project", json={"project_id": "p"})
    await second.services.session_life.check()
    known = await second.services.sessions.find(session, key)
    assert known is not None
    assert known.project_id == "p"


class Clock:
    """Both clocks of the processes, which a test advances."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self._began = time.time() - self.now

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self._began + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clocks = SimpleNamespace(monotonic=clock.monotonic, time=clock.time)
    for module in (skyrl.storage.db.sessions, skyrl.storage.db.sessions):
        monkeypatch.setattr(module, "time", clocks)
    return clock


def status_of(database: Database, session_id: str) -> str:
    return database.read(lambda c: c.execute(select(sessions.c.status).where(sessions.c.id == session_id)).scalar_one())


async def pass_time(clock: Clock, seconds: float, *apis: Api) -> None:
    for _ in range(int(seconds // 10)):
        clock.now += 10
        for api in apis:
            await api.services.session_life.check()


async def test_a_session_with_heartbeats_at_one_process_lives_at_both(
    clock: Clock, two: tuple[Api, Api], database: Database
) -> None:
    first, second = two
    session = session_of(await first.sampler())
    for _ in range(3):
        await pass_time(clock, TIMEOUT_S - 50, first, second)
        assert (await second.post("session_heartbeat", {"session_id": session})).status_code == 200
    assert status_of(database, session) == "active"
    await pass_time(clock, TIMEOUT_S + 20, first, second)
    assert status_of(database, session) == "expired"
    for api in two:
        assert (await api.post("session_heartbeat", {"session_id": session})).status_code == 410


async def test_no_session_expires_for_the_time_in_which_the_process_did_not_run(
    clock: Clock, two: tuple[Api, Api], database: Database
) -> None:
    first, second = two
    session = session_of(await first.sampler())
    await pass_time(clock, 20, first, second)
    clock.now += max(TIMEOUT_S, LONG_LOOK_S) + 100
    await pass_time(clock, 20, first, second)
    assert status_of(database, session) == "active"


async def test_the_search_for_silent_sessions_reads_no_metadata(two: tuple[Api, Api], database: Database) -> None:
    """There may be thousands of sessions with 16 KiB of metadata each."""
    first, _ = two
    await first.sampler()
    asked_for: list[str] = []
    reader = first.services.sessions._database.reader
    event.listen(reader, "before_cursor_execute", lambda *call: asked_for.append(call[2]))
    await first.services.sessions.look(TIMEOUT_S)
    asked_for = [query for query in asked_for if "FROM sessions" in query]
    assert len(asked_for) == 2, "old heartbeats, and all ids"
    assert not [query for query in asked_for if "user_metadata" in query]


async def test_a_heartbeat_at_the_last_moment_counts(two: tuple[Api, Api], database: Database) -> None:
    first, second = two
    session = session_of(await first.sampler())
    (silent, seen), *_ = (await first.services.sessions.look(-1.0)).silent
    await second.post("session_heartbeat", {"session_id": session})
    await first.services.session_life.close(silent, "expired", None, None, silent_since=seen)
    assert status_of(database, session) == "active"
    assert (await first.post("session_heartbeat", {"session_id": session})).status_code == 200


async def test_commands_without_a_number_get_different_numbers(two: tuple[Api, Api], database: Database) -> None:
    unnumbered = NewRequest(Kind.OPTIM_STEP, "tenant", "s1", b"{}", model_id="m", numbered=True)
    recorded = await asyncio.gather(*(two[turn % 2].services.futures.record(unnumbered) for turn in range(20)))
    assert all(new for _, new in recorded)
    numbers = database.read(lambda c: list(c.execute(select(futures.c.seq_id).order_by(futures.c.n)).scalars()))
    assert numbers == list(range(20))
