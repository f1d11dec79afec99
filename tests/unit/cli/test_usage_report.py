"""Usage by day, run and base model: as lines, as a table, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skyrl.api.ui.usage_csv import as_csv
from skyrl.base.types.weights import AdapterVersion, BaseWeights
from skyrl.cli.main import app
from skyrl.storage.db import usage_report
from skyrl.storage.db.database import Database
from skyrl.storage.db.usage import UsageKey, UsageKind, add, bucket_of, sample_amounts
from skyrl.storage.db.usage_report import UsageLine, last_days, report
from tests.databases import make_tables, url_of
from tests.postgres_server import ON_BOTH

TODAY = date(2026, 7, 1)
RUN = "s1:train:0"


@pytest.fixture(autouse=True)
def the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run across midnight."""
    monkeypatch.setattr(usage_report, "today", lambda: TODAY)


def hour(day: date, number: int) -> int:
    return bucket_of(datetime(day.year, day.month, day.day, number, tzinfo=UTC).timestamp())


def fill(database: Database) -> None:
    """Two tenants, two runs, two days; and kinds that are no tokens."""
    yesterday = TODAY - timedelta(days=1)
    amounts: dict[UsageKey, float] = {
        UsageKey("a", hour(TODAY, 0), "s1", RUN, "tiny", UsageKind.TRAINING): 10,
        UsageKey("a", hour(TODAY, 1), "s1", RUN, "tiny", UsageKind.TRAINING): 5,
        UsageKey("a", hour(TODAY, 1), "s2", RUN, "tiny", UsageKind.SAMPLE): 7,
        UsageKey("a", hour(TODAY, 1), "s2", "", "tiny", UsageKind.PREFILL): 3,
        UsageKey("a", hour(TODAY, 1), "", "", "tiny", UsageKind.STORAGE): 99,
        UsageKey("a", hour(TODAY, 1), "s1", RUN, "tiny", UsageKind.CHECKPOINT): 1,
        UsageKey("a", hour(yesterday, 23), "s1", RUN, "tiny", UsageKind.PREFILL_CACHED): 2,
        UsageKey("b", hour(TODAY, 1), "s3", "s3:train:0", "tiny", UsageKind.TRAINING): 100,
    }
    database.write(lambda c: add(c, amounts))


@pytest.fixture
def database(empty_url: str) -> Iterator[Database]:
    database = Database(empty_url)
    make_tables(database)
    fill(database)
    yield database
    database.close()


def line(day: date, tenant: str, run: str, **amounts: int) -> UsageLine:
    none = {"trained": 0, "sampled": 0, "prompt": 0, "cached": 0, "computed": amounts.get("prompt", 0)}
    return UsageLine(day.isoformat(), tenant, run, "tiny", **(none | amounts))


@ON_BOTH
def test_a_line_sums_a_days_tokens_of_one_run_over_hours_and_sessions(database: Database) -> None:
    assert database.read(lambda c: report(c, *last_days(7))) == [
        line(TODAY - timedelta(days=1), "a", RUN, cached=2),
        line(TODAY, "a", "", prompt=3),
        line(TODAY, "a", RUN, trained=15, sampled=7),
        line(TODAY, "b", "s3:train:0", trained=100),
    ]


@ON_BOTH
def test_a_report_can_be_of_one_tenant_one_run_and_one_day(database: Database) -> None:
    today = database.read(lambda c: report(c, *last_days(1), tenant="a"))
    assert [(one.run, one.trained, one.prompt) for one in today] == [("", 0, 3), (RUN, 15, 0)]
    assert database.read(lambda c: report(c, *last_days(7), tenant="b", run=RUN)) == []


def test_samples_count_for_the_run_whose_adapter_they_come_from() -> None:
    counts = {"prompt": 5, "cached": 2, "sampled": 3}
    from_adapter = sample_amounts("a", "s1", "tiny", AdapterVersion.of(RUN, 2), **counts, again=9)
    assert {(key.model_id, key.kind): amount for key, amount in from_adapter.items()} == {
        (RUN, UsageKind.PREFILL): 3,
        (RUN, UsageKind.PREFILL_CACHED): 2,
        (RUN, UsageKind.PREFILL_AGAIN): 9,
        (RUN, UsageKind.SAMPLE): 3,
    }
    assert {key.model_id for key in sample_amounts("a", "s1", "tiny", BaseWeights(), **counts)} == {""}


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    database = Database(url_of(tmp_path))
    make_tables(database)
    fill(database)
    database.close()
    return tmp_path


def printed(state_dir: Path, *options: str) -> str:
    place = ["--state-dir", str(state_dir), "--database-url", url_of(state_dir)]
    result = CliRunner().invoke(app, ["usage", *place, *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_prints_a_table_with_sums(state_dir: Path) -> None:
    head, *lines, sums = printed(state_dir).splitlines()
    amounts = ["TRAINED", "SAMPLED", "PROMPT", "CACHED", "COMPUTED"]
    assert head.split() == ["DAY", "TENANT", "RUN", "BASE", "MODEL", *amounts]
    assert lines[1].split() == [TODAY.isoformat(), "a", "-", "tiny", "0", "0", "3", "0", "3"], (
        "the base model has no run"
    )
    assert sums.split() == ["all", "115", "7", "3", "2", "3"]


def test_the_command_prints_json_and_csv_of_the_same_lines(state_dir: Path) -> None:
    as_json = json.loads(printed(state_dir, "--format", "json", "--tenant", "a", "--days", "1"))
    rows = list(csv.DictReader(io.StringIO(printed(state_dir, "--format", "csv", "--tenant", "a", "--days", "1"))))
    assert [row["run"] for row in rows] == [one["run"] for one in as_json] == ["", RUN]
    assert [int(row["trained"]) for row in rows] == [one["trained"] for one in as_json] == [0, 15]


def test_a_cell_that_a_spreadsheet_would_run_is_text() -> None:
    _, row = as_csv(["run", "trained"], [{"run": "=HYPERLINK(1)", "trained": -1}]).splitlines()
    assert row == "'=HYPERLINK(1),-1"
    assert as_csv(["run"], []) == "run\r\n", "the names are there without a line, too"
