"""What tests of several folders share: an S3-compatible server and a PostgreSQL server on loopback; databases."""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from skyrl.db.database import Database
from skyrl.db.migrate import migrate
from tests import databases
from tests.databases import StateDatabases
from tests.grouping import group_scheduling, start_of
from tests.postgres_server import KIND, PostgresServer

# Hypothesis' own profile `ci` tries the same examples in every run, and `--hypothesis-profile others` new ones. Neither
# has a deadline, which a busy machine would miss.
hypothesis.settings.register_profile("others", deadline=None)
hypothesis.settings.load_profile("ci")


@dataclass(frozen=True)
class Bucket:
    """An empty bucket: what goes into `checkpoint_store` and `checkpoint_store_options`."""

    url: str
    options: dict[str, str]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a running server that speaks S3 and keeps what it is given in memory."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would log every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def new_bucket(s3_server: str) -> Callable[[], Bucket]:
    """Makes buckets; `url` has a prefix in its bucket."""
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
        left = [item for item in items if item.get_closest_marker("sqlite")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    if hasattr(config, "workerinput"):  # one of several processes
        items.sort(key=lambda item: start_of(item.nodeid))


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
def everywhere(state_databases: StateDatabases) -> Iterator[None]:
    with databases.everywhere(state_databases):
        yield


@pytest.fixture(autouse=KIND == "postgres")
def none_left(state_databases: StateDatabases, tmp_path: Path) -> Iterator[None]:
    """What a test made goes with it: a database takes megabytes of disk."""
    yield
    state_databases.drop_below(tmp_path)


@pytest.fixture
def database_kind(request: pytest.FixtureRequest) -> str:
    """`ON_BOTH` runs a test with each."""
    return getattr(request, "param", KIND)


@pytest.fixture
def empty_url(database_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database of this kind with nothing in it; SQLite's is where a server with this state directory has it."""
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
        migrate(database)
    return path


@pytest.fixture
def migrated_url(database_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """As `empty_url`, with the tables in it; of either kind, the one of a server with this state directory."""
    if database_kind == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_file"), tmp_path / "skyrl.db")
        yield f"sqlite:///{tmp_path / 'skyrl.db'}"
        return
    of_states: StateDatabases = request.getfixturevalue("state_databases")
    yield of_states.url_of(tmp_path)
    of_states.drop_below(tmp_path)
