"""A database that is locked, full, read-only or unreachable: no answer claims something false, and work goes on
afterwards."""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from adapter_hosts import HostWithAllAdapters
from api_harness import Api, Serve, sample_body, tokens
from fake_upstream import FakeUpstream, after, complete, hang_up
from sqlalchemy import Engine, event, func, make_url, select
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError

from skyrl.base.types.requests import Command, Kind
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.engine.command_log import failed
from skyrl.http.client import HttpClient
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.servers import EndpointUnknown, EngineEndpoint
from skyrl.storage.db import database as database_module
from skyrl.storage.db import futures as rows
from skyrl.storage.db.claims import claim, read_claim
from skyrl.storage.db.database import Database, Fence, RetryingDatabase, postgres_conninfo
from skyrl.storage.db.engine_publisher import EngineStatePublisher
from skyrl.storage.db.engine_state import EngineState, read_state
from skyrl.storage.db.faults import is_transient
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.row_statements import Group, RowConnection
from skyrl.storage.db.sessions import sessions
from skyrl.storage.doorbell import Doorbell
from tests.component.api.test_forwarding_failures import JOB
from tests.databases import hold_records
from tests.postgres_server import ON_BOTH, ON_POSTGRES, ON_SQLITE, PostgresServer

SERVER_NAMES = ("idle", "interval", "count")
LARGE = {"unknown": "x" * 200_000}
"""A body that does not fit into the free pages of a small file; bodies are stored unchanged."""


@pytest.fixture
def short_lock_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write waits only briefly for the lock."""
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_MS", 50)


@contextmanager
def locked(database: Database) -> Iterator[None]:
    with database.writer.begin() as connection:
        hold_records(connection)
        yield


class Connections:
    """The SQLite connections of this process. A fault is applied to all open and all new connections, as a failing disk
    would."""

    def __init__(self) -> None:
        self._all: list[sqlite3.Connection] = []
        self._fault: str | None = None

    def note(self, connection: sqlite3.Connection, _: object) -> None:
        self._all.append(connection)
        if self._fault is not None:
            connection.execute(f"PRAGMA {self._fault}").fetchall()

    @contextmanager
    def faulty(self, fault: str, cured: str) -> Iterator[None]:
        self._fault = fault
        self._tell(fault)
        yield
        self._fault = None
        self._tell(cured)

    def _tell(self, pragma: str) -> None:
        for connection in self._all:
            connection.execute(f"PRAGMA {pragma}").fetchall()

    def full(self) -> AbstractContextManager[None]:
        """The database file may not grow by a single page."""
        return self.faulty("max_page_count=1", "max_page_count=1000000")

    def read_only(self) -> AbstractContextManager[None]:
        return self.faulty("query_only=1", "query_only=0")


@pytest.fixture
def connections(database: Database) -> Iterator[Connections]:
    """Connections that are opened after the fixtures."""
    noted = Connections()
    event.listen(Engine, "connect", noted.note)
    yield noted
    event.remove(Engine, "connect", noted.note)


@contextmanager
def read_only_server(server: PostgresServer, database: Database) -> Iterator[None]:
    name = make_url(database.url).database
    assert name is not None

    def set_to(value: str) -> None:
        server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {value}")
        server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")

    set_to("on")
    yield
    set_to("off")


def count(database: Database, table: Any) -> int:
    return database.read(lambda c: c.execute(select(func.count()).select_from(table)).scalar_one())


def assert_asked_to_come_again(answer: httpx.Response, caplog: pytest.LogCaptureFixture) -> None:
    assert answer.status_code == 503, answer.text
    sentence = "the database cannot be used now; send the request again"
    assert (answer.json()["detail"], answer.json()["field"]) == (sentence, None)
    assert float(answer.headers["Retry-After"]) > 0
    assert "Traceback" not in caplog.text


async def retried(send: Callable[[], Any]) -> httpx.Response:
    """Send the request again while the answer is 503, as a client does."""
    deadline = time.monotonic() + 120
    while (answer := await send()).status_code == 503:
        assert time.monotonic() < deadline, "the answer stays 503"
        await asyncio.sleep(0.05)
    return answer


@ON_BOTH
@pytest.mark.usefixtures("short_lock_wait")
async def test_each_kind_of_writing_request_gets_503_while_the_write_lock_is_held(
    serve: Serve, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as api:
        sampler = await api.sampler()
        model = {"session_id": sampler.partition(":")[0], "model_seq_id": 0, "base_model": "acme/base"}
        sent = {"create_session": {}, "asample": sample_body(sampler, 1), "create_model": model}
        with locked(database):
            for path, body in sent.items():
                assert_asked_to_come_again(await api.post(path, body), caplog)
            assert (await api.http.get("/api/v1/sessions")).status_code == 200, "requests that only read are answered"
        assert count(database, sessions) == 1
        assert count(database, rows.futures) == 0
        for path, body in sent.items():
            assert (await api.post(path, body)).status_code == 200


@ON_POSTGRES
def test_both_ends_of_every_connection_notice_a_host_that_is_gone(empty_url: str) -> None:
    """Without a word from it, and also while one waits for the other's answer; a URL may say how soon."""
    waits = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 2}

    def options_of(connection: Any) -> dict[int, int]:
        with socket.socket(fileno=os.dup(connection.fileno())) as link:
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            return {option: link.getsockopt(socket.IPPROTO_TCP, option) for option in waits}

    with closing(Database(empty_url)) as database, closing(Database(f"{empty_url}?keepalives_idle=7")) as own:
        with database.reader.connect() as reader, database.writer.connect() as writer:
            for each in (reader, writer):
                shown = [each.exec_driver_sql(f"SHOW tcp_keepalives_{name}").scalar() for name in SERVER_NAMES]
                assert shown == ["10", "5", "2"]
                assert options_of(each.connection.driver_connection) == waits
        with closing(database.connect_driver()) as driver:
            assert options_of(driver) == waits
        with psycopg.connect(postgres_conninfo(database.url)) as notices:
            assert options_of(notices) == waits
        with closing(own.connect_driver()) as driver, psycopg.connect(postgres_conninfo(own.url)) as notices:
            for each in (driver, notices):
                assert options_of(each) == waits | {socket.TCP_KEEPIDLE: 7}


@ON_POSTGRES
def test_a_process_that_hangs_in_a_write_holds_up_no_other_process(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one on a machine that is suspended. It writes nothing when it goes on, and can write again."""
    with closing(Database(empty_url)) as other:
        other.write(lambda c: c.exec_driver_sql("CREATE TABLE numbers (n INT)"))
        monkeypatch.setattr(database_module, "IDLE_WRITER_MS", 1_000)
        hanging = Database(empty_url)
        connection = hanging.writer.connect()
        connection.exec_driver_sql("INSERT INTO numbers VALUES (1)")
        other.write(lambda c: c.exec_driver_sql("INSERT INTO numbers VALUES (2)"))
        with pytest.raises(DBAPIError) as ended:
            connection.commit()
        assert is_transient(ended.value)
        connection.close()
        hanging.write(lambda c: c.exec_driver_sql("INSERT INTO numbers VALUES (3)"))
        hanging.close()
        numbers = other.read(lambda c: c.exec_driver_sql("SELECT n FROM numbers ORDER BY n").scalars().all())
    assert numbers == [2, 3]


@ON_SQLITE
async def test_a_request_on_a_full_disk_gets_503_and_leaves_nothing_stored(
    serve: Serve, database: Database, connections: Connections, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as api:
        sampler = await api.sampler()
        assert (await api.sample(sampler, 0))["request_id"]
        with connections.full():
            answer = await api.post("asample", sample_body(sampler, 5_000) | LARGE)
            assert_asked_to_come_again(answer, caplog)
            seq_id, refused = 1, None
            while refused is None and seq_id < 2_000:  # until the free pages of the file are used up
                answer = await api.post("asample", sample_body(sampler, seq_id))
                refused = answer if answer.status_code != 200 else None
                seq_id += 1
            assert refused is not None
            assert_asked_to_come_again(refused, caplog)
            stored = count(database, rows.futures)
        assert stored == seq_id - 1, "acknowledged samples are stored, refused samples are not"
        assert (await api.post("asample", sample_body(sampler, 5_000) | LARGE)).status_code == 200
        promise = await api.sample(sampler, seq_id - 1)
        assert tokens(await api.result(promise["request_id"])) == [[0, 1, 2]]


@ON_BOTH
async def test_requests_get_503_while_the_database_is_read_only(
    serve: Serve,
    database: Database,
    connections: Connections,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if database.is_sqlite:
        read_only = connections.read_only()
    else:
        read_only = read_only_server(request.getfixturevalue("postgres"), database)
    async with serve() as api:
        sampler = await api.sampler()
        assert (await api.sample(sampler, 0))["request_id"]
        with read_only:
            assert_asked_to_come_again(await api.post("asample", sample_body(sampler, 1)), caplog)
            assert_asked_to_come_again(await api.post("create_session", {}), caplog)
        answer = await retried(lambda: api.post("asample", sample_body(sampler, 1)))
        assert tokens(await api.result(answer.json()["request_id"])) == [[0, 1, 2]]


@ON_POSTGRES
async def test_acknowledged_samples_survive_an_outage_of_postgresql(
    serve: Serve, upstream: FakeUpstream, postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    async with serve() as api:
        sampler = await api.sampler()
        early = [await api.sample(sampler, seq_id) for seq_id in range(20)]
        postgres.stop()
        assert_asked_to_come_again(await api.post("asample", sample_body(sampler, 20)), caplog)
        hearing = [asyncio.create_task(api.result(promise["request_id"])) for promise in early]
        go.set()
        sending = [
            asyncio.create_task(retried(lambda seq_id=seq_id: api.post("asample", sample_body(sampler, seq_id))))
            for seq_id in range(20, 40)
        ]
        await asyncio.sleep(0)
        assert not any(task.done() for task in hearing)
        await asyncio.to_thread(postgres.start)
        late = [answer.json() for answer in await asyncio.gather(*sending)]
        assert len({promise["request_id"] for promise in early + late}) == 40
        for task in hearing:
            assert tokens(await task) == [[0, 1, 2]]
        for promise in early + late:
            assert tokens(await api.result(promise["request_id"])) == [[0, 1, 2]]


@ON_POSTGRES
async def test_a_sample_that_reads_its_endpoint_waits_for_postgresql(
    serve: Serve, upstream: FakeUpstream, database: Database, postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM dies while PostgreSQL is unreachable: the sample cannot read where the next vLLM is, and waits."""
    go = asyncio.Event()
    upstream.default = after(go, hang_up)
    async with serve() as api:
        sampler = await api.sampler()
        promises = [await api.sample(sampler, seq_id) for seq_id in range(10)]
        await upstream.until(lambda server: server.busy == 10)
        postgres.stop()
        hearing = [asyncio.create_task(api.result(promise["request_id"])) for promise in promises]
        upstream.default = complete()
        go.set()
        deadline = time.monotonic() + 120
        while "the inference server's address cannot be read" not in caplog.text:
            assert time.monotonic() < deadline, "no sample looked for its endpoint"
            await asyncio.sleep(0.05)
        assert not any(task.done() for task in hearing)
        await asyncio.to_thread(postgres.start)
        for task in hearing:
            assert tokens(await task) == [[0, 1, 2]]
    assert "Traceback" not in caplog.text


class UnreachableDatabase:
    """A database that does not answer, with the errors of the driver."""

    def __init__(self) -> None:
        self.reads = 0
        self.back: EngineState | None = None

    async def __call__(self) -> EngineState:
        self.reads += 1
        await asyncio.sleep(0)
        if self.back is None:
            secret = "connection to 10.1.2.3 port 5544 failed: FATAL: password of skyrl"
            raise OperationalError("SELECT secret", {}, psycopg.OperationalError(secret))
        return self.back


async def test_samples_share_one_read_of_the_endpoint_and_hide_database_errors(
    upstream: FakeUpstream,
) -> None:
    away = UnreachableDatabase()
    endpoint = EngineEndpoint(away)
    looks = await asyncio.gather(*(endpoint.resolve() for _ in range(100)), return_exceptions=True)
    assert away.reads == 1
    assert {type(look) for look in looks} == {EndpointUnknown}
    client = ForwardingClient(HttpClient(), endpoint, HostWithAllAdapters(), api_key=None, deadline_s=0.3)
    with pytest.raises(FailedRequest) as failed:
        await client.sample(JOB)
    assert failed.value.message == "gave up after 0.3 s: the server's database cannot be used now"
    assert failed.value.category is ErrorCategory.SERVER
    assert await client.probe() == "the server's database cannot be used now"
    away.back = EngineState(inference_proxy_url=upstream.url)
    assert await client.probe() is None
    await client.close()


async def test_the_text_of_an_internal_error_reaches_the_log_only(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that no process waits for, during a sample and during a training command."""
    mistake = ProgrammingError("SELECT secret", {}, Exception('relation "secret" at 10.1.2.3:5544'))

    async def broken(*_: Any) -> None:
        raise mistake

    async with serve() as api:
        sampler = await api.sampler()
        monkeypatch.setattr(EngineEndpoint, "resolve", broken)
        promise = await api.sample(sampler, 0)
        answer = (await api.result(promise["request_id"])).json()
    request_id = promise["request_id"]
    expected = f"the server could not compute this sample; its log says why, under request {request_id}"
    assert answer == {"error": expected, "category": "server"}
    assert "10.1.2.3" in caplog.text, "the log names the address"
    command = Command(1, "r7", Kind.FORWARD, "t", "s", "m", 1, None, None, "proto", 10)
    of_training = failed(mistake, command)
    assert of_training.error == "the server failed while it ran this command; the server's log says why, under r7"


@ON_POSTGRES
async def test_no_route_reveals_the_address_of_the_database(
    serve: Serve, postgres: PostgresServer, database: Database
) -> None:
    """Each of these requests reads or writes the database. It gets 503, or an answer that needs no database, and never
    the words of the driver."""
    url = make_url(database.url)
    async with serve() as api:
        sampler = await api.sampler()
        session = sampler.partition(":")[0]
        unknown = "0" * 32
        postgres.stop()
        answers = [await api.http.get(path) for path in READS]
        answers += [
            await api.http.get(f"/api/v1/sessions/{session}"),
            await api.http.get(f"/api/v1/samplers/{sampler}"),
        ]
        for path, body in {
            "create_session": {},
            "asample": sample_body(sampler, 1),
            "retrieve_future": {"request_id": unknown},
            "cancel_future": {"request_id": unknown},
            "session_heartbeat": {"session_id": session},
            f"sessions/{session}/finish": {},
            "weights_info": {"tinker_path": "tinker://x:train:0/weights/a"},
        }.items():
            answers.append(await api.post(path, body))
        await asyncio.to_thread(postgres.start)
    assert sum(answer.status_code == 503 for answer in answers) >= 8, [a.status_code for a in answers]
    for answer in answers:
        assert answer.status_code in (200, 404, 408, 410, 503), answer.text
        text_of_answer = answer.text.lower()
        for secret in (str(url.port), "psycopg", "sqlalche", "connection failed", str(url.database)):
            assert secret not in text_of_answer, answer.request.url


READS = (
    "/readyz",
    "/statusz",
    "/api/v1/sessions",
    "/api/v1/training_runs",
    "/api/v1/checkpoints",
    "/api/v1/sessions/search?q=a",
)


@ON_POSTGRES
async def test_a_stored_sample_whose_commit_seemed_lost_is_forwarded_when_sent_again(
    serve: Serve, upstream: FakeUpstream, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RowConnection._on_postgres
    lost = 0

    def commit_and_lose_the_answer(connection: RowConnection, driver: Any, group: Group) -> list[int]:
        nonlocal lost
        real(connection, driver, group)
        lost += 1
        driver.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    async with serve() as api:
        sampler = await api.sampler()
        with monkeypatch.context() as broken:
            broken.setattr(RowConnection, "_on_postgres", commit_and_lose_the_answer)
            assert (await api.post("asample", sample_body(sampler, 1))).status_code == 503
        assert lost >= 1
        assert not upstream.completions
        assert count(database, rows.futures) == 1
        promise, again = await asyncio.gather(api.sample(sampler, 1), api.sample(sampler, 1))
        assert promise["request_id"] == again["request_id"]
        assert tokens(await api.result(promise["request_id"])) == [[0, 1, 2]]
        assert len(upstream.completions) == 1, "one of the two processes forwards the sample"
        assert count(database, rows.futures) == 1


@ON_BOTH
async def test_a_nul_in_text_is_stored_or_refused_with_the_field_name(api: Api, database: Database) -> None:
    answer = await api.post("create_session", {"display_name": "a\0b"})
    if database.is_sqlite:
        assert answer.status_code == 200
        return
    assert answer.status_code == 400, answer.text
    assert answer.json()["field"] == "display_name"
    assert "U+0000" in answer.json()["detail"]
    unknown = await api.http.get("/api/v1/sessions/a%00b")
    assert unknown.status_code in (400, 404), unknown.text


@ON_BOTH
def test_an_error_with_a_nul_can_be_stored(database: Database) -> None:
    outcome = Outcome(error="stop: 'a\0b' is too long", error_category="user")
    new = dict.fromkeys(rows.RECORD.parameters) | {
        "id": "r1",
        "kind": "EXTERNAL",
        "tenant": "t",
        "session_id": "s",
        "digest": b"d",
        "body_format": "json",
        "status": "pending",
        "created_at": 0.0,
    }
    database.write(lambda c: rows.RECORD.execute(c, [new]))
    database.write(lambda c: rows.SETTLE.execute(c, [rows.settlement("r1", outcome, 1.0)]))
    stored = database.read(lambda c: rows.find(c, "r1"))
    assert stored is not None
    assert stored.outcome == outcome


@ON_BOTH
@pytest.mark.usefixtures("short_lock_wait")
def test_the_engine_repeats_a_write_until_the_database_is_free(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    retrying_database = RetryingDatabase(database.url)
    lock = database.writer.begin()
    lock.__enter__()
    waited: list[float] = []

    def release_lock(seconds: float) -> bool:
        waited.append(seconds)
        if len(waited) == 3:
            lock.__exit__(None, None, None)
        return False

    monkeypatch.setattr(retrying_database._stopped_retrying, "wait", release_lock)
    assert retrying_database.write(lambda c: c.execute(select(1)).scalar()) == 1
    assert len(waited) == 3
    assert waited == sorted(waited)
    assert "tried again" in caplog.text
    with locked(database):
        retrying_database.stop_retrying()
        with pytest.raises(Exception, match="lock"):
            retrying_database.write(lambda c: c.execute(select(1)))
    retrying_database.close()


def test_a_programming_error_is_raised_at_once(database: Database) -> None:
    retrying_database = RetryingDatabase(database.url)
    with pytest.raises(Exception, match="no such table|does not exist"):
        retrying_database.read(lambda c: c.exec_driver_sql("SELECT 1 FROM nowhere"))
    retrying_database.close()


@pytest.mark.usefixtures("short_lock_wait")
async def test_the_next_heartbeat_publishes_an_endpoint_that_could_not_be_published(
    database: Database, tmp_path: Path
) -> None:
    own, api = Database(database.url), Doorbell(tmp_path / "nobody.sock")
    database.write(lambda c: claim(c, "server", read_claim(c)))
    state = EngineStatePublisher(own, api, Fence("server"))
    with locked(database):
        await state.publish_url("http://127.0.0.1:1")
    assert database.read(read_state).inference_proxy_url != "http://127.0.0.1:1"
    state.beat(None)
    assert database.read(read_state).inference_proxy_url == "http://127.0.0.1:1"
    generation = database.read(read_state).generation
    state.beat(None)
    assert database.read(read_state).generation == generation, "the endpoint is published once"
    api.close()
    own.close()
