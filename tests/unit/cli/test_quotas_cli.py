"""`skyrl quotas` sets, lists and clears the quotas of single tenants; cases that it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert
from typer.testing import CliRunner, Result

from skyrl.cli.main import app
from skyrl.storage.db import keys, quotas
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.database import Database, shown_url
from skyrl.storage.db.futures import futures
from skyrl.storage.db.models import models
from skyrl.storage.db.sessions import sessions
from tests.databases import make_tables, url_of

HEAD = ["TENANT", "REQUESTS IN FLIGHT", "TOKENS PER MINUTE", "MODELS", "STORED BYTES", "OWN QUOTAS"]


class Operator:
    """Runs `skyrl quotas` against one state directory, which has one tenant."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.database = Database(url_of(state_dir))
        make_tables(self.database)
        self.tenant = self.new_tenant()

    def new_tenant(self) -> str:
        _, key = self.database.write(lambda c: keys.create(c, tenant=None, name="", scopes=("train",), expires_at=None))
        return key.tenant

    def run(self, *arguments: str) -> Result:
        command, *rest = arguments
        options = ["--state-dir", str(self.state_dir), "--database-url", url_of(self.state_dir)]
        return CliRunner().invoke(app, ["quotas", command, *options, *rest])

    def run_ok(self, *arguments: str) -> str:
        result = self.run(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    def listed(self, *arguments: str) -> dict[str, list[str]]:
        """The lines of `skyrl quotas list` by their first cell, without the head."""
        head, *lines = [re.split(r" {2,}", line) for line in self.run_ok("list", *arguments).splitlines()]
        assert head == HEAD
        return {line[0]: line[1:] for line in lines}

    @property
    def database_name(self) -> str:
        """The name of the database in messages."""
        return str(self.database.file or shown_url(self.database.url))

    @property
    def exceptions(self) -> Any:
        return self.database.read(quotas.exceptions).get(self.tenant)


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    for name in ("STATE_DIR", "DATABASE_URL", "QUOTA_MODELS"):
        monkeypatch.delenv(f"SKYRL_{name}", raising=False)
    (tmp_path / "state").mkdir()
    operator = Operator(tmp_path / "state")
    yield operator
    operator.database.close()


def refusal(done: Result) -> str:
    """The one line of stderr that gives the reason."""
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line.removeprefix("skyrl quotas: ")


def test_set_and_clear_change_only_the_named_quotas(operator: Operator) -> None:
    operator.run_ok("set", operator.tenant, "--tokens-per-minute", "100000", "--models", "0")
    assert operator.exceptions == (None, 100_000, 0, None)
    operator.run_ok("set", operator.tenant, "--tokens-per-minute", "unlimited", "--stored-bytes", str(2**40))
    assert operator.exceptions == (None, -1, 0, 2**40), "set keeps the quotas that it does not name"
    operator.run_ok("set", operator.tenant, "--models", "default")
    assert operator.exceptions == (None, -1, None, 2**40)
    operator.run_ok("clear", operator.tenant)
    assert operator.exceptions is None
    message = refusal(operator.run("clear", operator.tenant))
    assert message.startswith(f"{operator.tenant} has no quotas of its own in the database ")
    assert message.endswith(operator.database_name)
    done = operator.run("set", operator.tenant, "--models", "3")
    assert done.stderr.endswith(f"{operator.database_name}\n"), "the message names the database"


def test_list_shows_the_use_and_the_limit_of_every_tenant(operator: Operator) -> None:
    other = operator.new_tenant()
    at = {"created_at": 1.0}
    session = {"id": "s", "tenant": other, "status": "active", "heartbeat_at": 1, "tags": [], "sdk_version": ""}
    adapter: dict[str, Any] = {
        "base_model": "tiny",
        "lora_rank": 1,
        "lora_alpha": 1,
        "seed": 1,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": True,
    }
    model = {"session_id": "s", "tenant": other, "sampler_version": 0, "next_seq": 1, "last_request_at": 1} | adapter
    open_model, closed_model = model | {"id": "a", "model_seq_id": 0, "status": "ready"}, {"id": "b", "model_seq_id": 1}
    saved = {"tenant": other, "model_id": "a", "kind": "weights", "public": False, "store_key": "k"} | adapter
    kept, expired = saved | {"name": "n", "size_bytes": 700}, {"name": "m", "size_bytes": 99, "expires_at": 2.0}
    sample = {"kind": "EXTERNAL", "tenant": other, "session_id": "s", "digest": b"", "body_format": "json"}
    pending, ended = sample | {"id": "x", "status": "pending"}, {"id": "y", "status": "done"}

    def add(connection: Any) -> None:
        connection.execute(insert(sessions), session | at)
        connection.execute(insert(models), [open_model | at, open_model | closed_model | at | {"status": "closed"}])
        connection.execute(insert(checkpoints), kept | at)
        connection.execute(insert(checkpoints), kept | expired | at)
        connection.execute(insert(futures), [pending | at, pending | ended | at])

    operator.database.write(add)
    operator.run_ok("set", operator.tenant, "--models", "unlimited")
    config = operator.state_dir / "skyrl.toml"
    config.write_text("quota_models = 4\nquota_tokens_per_minute = 1000\n")
    assert operator.listed("--config", str(config)) == {
        "every": ["unlimited", "1000", "4", "unlimited"],
        other: ["1 of unlimited", "1000", "1 of 4", "700 of unlimited", "no"],
        operator.tenant: ["0 of unlimited", "1000", "0 of unlimited", "0 of unlimited", "yes"],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give at least one of --requests-in-flight, --tokens-per-minute, --models, --stored-bytes"),
        (["--models", "-1"], "--models: '-1' is not a number from 0 to 2147483647, unlimited, or default"),
        (["--tokens-per-minute", "0"], "--tokens-per-minute: '0' is not a number from 1 to 9223372036854775807"),
        (["--requests-in-flight", "0"], "--requests-in-flight: '0' is not a number from 1 to 2147483647"),
        (["--requests-in-flight", str(2**31)], f"--requests-in-flight: '{2**31}' is not a number"),
        (["--stored-bytes", "9" * 5_000], f"--stored-bytes: '{'9' * 5_000}' is not a number"),
        (["--stored-bytes", "1e9"], "--stored-bytes: '1e9' is not a number from 0 to"),
    ],
)
def test_bad_numbers_are_refused_in_one_line_and_change_nothing(
    operator: Operator, arguments: list[str], message: str
) -> None:
    assert refusal(operator.run("set", operator.tenant, *arguments)).startswith(message)
    assert operator.exceptions is None


def test_unknown_tenants_are_refused(operator: Operator) -> None:
    assert "is not a tenant as" in refusal(operator.run("set", "team-a", "--models", "1"))
    message = refusal(operator.run("set", "0" * 32, "--models", "1"))
    assert message.startswith(f"{'0' * 32} has no key, session or checkpoint in the database ")
    assert message.endswith(operator.database_name)
