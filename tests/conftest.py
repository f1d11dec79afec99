"""Fixtures for tests of several folders: an S3-compatible server and a PostgreSQL server on loopback, and databases."""

from __future__ import annotations

import functools
import gc
import logging
import os
import secrets
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from skyrl.storage.db.database import Database
from skyrl.storage.db.writer import GroupCommitWriter
from tests import databases
from tests.databases import StateDatabases, make_tables
from tests.grouping import group_scheduling, start_position
from tests.postgres_server import KIND, PostgresServer
from tests.slow import RUNS_SLOW_TESTS

# Hypothesis' own profile `ci` tries the same examples in every run; `--hypothesis-profile others` tries new ones.
# Neither profile has a deadline, because a busy machine would miss it.
hypothesis.settings.register_profile("others", deadline=None)
hypothesis.settings.load_profile("ci")

# A client whose server has ended warns until the process ends, also when pytest has closed the log.
logging.getLogger("tinker.lib.internal_client_holder").setLevel(logging.ERROR)

os.environ.setdefault("SKYRL_THREADS", "1")  # of servers: tests run side by side, one on each core

_new_context, _kept_context = ssl.create_default_context, functools.cache(ssl.create_default_context)


def _context(*arguments: Any, **named: Any) -> ssl.SSLContext:
    """Every client of httpx reads the public certificates, also for plain HTTP: 25 ms of CPU. Here one does."""
    make = _kept_context if not arguments and named.keys() == {"cafile"} else _new_context
    return make(*arguments, **named)


ssl.create_default_context = _context

gc.disable()  # until all tests are collected: their imports make millions of objects, and no garbage


@dataclass(frozen=True)
class Bucket:
    """An empty bucket: the values of `checkpoint_store` and `checkpoint_store_options` for it."""

    url: str
    options: dict[str, str]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a running S3 server that keeps its objects in memory."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # below this level werkzeug logs every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def new_bucket(s3_server: str) -> Callable[[], Bucket]:
    """A function that makes a bucket. The `url` of the bucket names a prefix in it."""
    import boto3

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}

    def make() -> Bucket:
        name = f"bucket-{secrets.token_hex(4)}"
        client = boto3.client("s3", endpoint_url=s3_server, region_name="us-east-1", **keys)
        client.create_bucket(Bucket=name)
        client.close()
        return Bucket(f"s3://{name}/some/prefix", {"endpoint": s3_server, "region": "us-east-1", **keys})

    return make


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if KIND == "postgres":
        deselected = [item for item in items if item.get_closest_marker("sqlite")]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]
    if not RUNS_SLOW_TESTS:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow; make test-slow runs it"))
    if hasattr(config, "workerinput"):  # this is a worker of pytest-xdist
        items.sort(key=lambda item: start_position(item.nodeid))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude the imported modules, which live until the end, from garbage collection: a tenth of the tests' time. The
    little garbage among them stays, too: looking for it takes half a second in each process."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return group_scheduling(config, log)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def state_databases(postgres: PostgresServer) -> StateDatabases:
    return StateDatabases(postgres)


@pytest.fixture(scope="session", autouse=KIND == "postgres")
def one_database_per_state_directory(state_databases: StateDatabases) -> Iterator[None]:
    with databases.used_by_every_server(state_databases):
        yield


@pytest.fixture(autouse=KIND == "postgres")
def drop_databases_of_the_test(state_databases: StateDatabases, tmp_path: Path) -> Iterator[None]:
    """Drops the databases that a test made: each takes megabytes of disk."""
    yield
    state_databases.drop_below(tmp_path)


@pytest.fixture
def database_kind(request: pytest.FixtureRequest) -> str:
    """sqlite or postgres. `ON_BOTH` runs a test with each."""
    return getattr(request, "param", KIND)


@pytest.fixture
def empty_url(database_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty database of this kind. A SQLite file lies where a server with the state directory `tmp_path` has it."""
    if database_kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'skyrl.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = server.new_database()
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("database") / "skyrl.db"
    with closing(Database(f"sqlite:///{path}")) as database:
        make_tables(database)
    return path


@pytest.fixture
def migrated_url(database_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database with tables and no rows. A server with the state directory `tmp_path` uses it."""
    if database_kind == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_file"), tmp_path / "skyrl.db")
        yield f"sqlite:///{tmp_path / 'skyrl.db'}"
        return
    state_databases: StateDatabases = request.getfixturevalue("state_databases")
    yield state_databases.url_of(tmp_path)
    state_databases.drop_below(tmp_path)


@pytest.fixture
def database(migrated_url: str) -> Iterator[Database]:
    """`migrated_url`, opened. Folders and files with another database have a fixture of this name, too."""
    with closing(Database(migrated_url)) as opened:
        yield opened


@pytest.fixture
async def writer(database: Database) -> AsyncIterator[GroupCommitWriter]:
    """The writer of the test's `database`."""
    writer = GroupCommitWriter(database)
    yield writer
    await writer.close()
