"""The crash ledger: it tells the next engine which commands ran when earlier engines died."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy.exc import DataError, OperationalError

from skyrl.engine.crash_ledger import CrashLedger


class Died(BaseException):
    """Stands for the death of the engine process: no code catches it."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "running.json"


def die(file: Path, *keys: str, error: BaseException | None = None) -> None:
    """An engine that dies while it runs the commands `keys`."""
    error = error or Died()
    ledger = CrashLedger(file)
    with pytest.raises(type(error)), ledger.running(keys):
        raise error
    ledger.close()


def counts(file: Path) -> dict[str, int]:
    ledger = CrashLedger(file)
    ledger.close()
    return ledger.counts


def test_deaths_are_counted_for_the_commands_that_ran_and_no_others(file: Path) -> None:
    assert counts(file) == {}
    ledger = CrashLedger(file)
    with ledger.running(["done"]):
        pass
    ledger.close()
    die(file, "a", "b")
    assert counts(file) == {"a": 1, "b": 1}
    die(file, "b")
    assert counts(file) == {"a": 1, "b": 2}, "an engine that runs nothing adds no death"


def test_the_end_of_one_command_leaves_the_others_running(file: Path) -> None:
    ledger = CrashLedger(file)
    with ledger.running(["a", "b"]):
        with ledger.running(["save"]):
            pass
        assert counts(file) == {"a": 1, "b": 1}
    ledger.close()


def test_a_command_that_ends_well_loses_its_earlier_deaths(file: Path) -> None:
    die(file, "a", "b")
    ledger = CrashLedger(file)
    with ledger.running(["a"]):
        pass
    assert ledger.counts == {"b": 1}
    ledger.forget_all_but(["c"])
    ledger.close()
    assert counts(file) == {}


def test_a_short_list_replaces_a_long_one_completely(file: Path) -> None:
    die(file, *(f"request-{number}" for number in range(500)))
    ledger = CrashLedger(file)
    assert len(ledger.counts) == 500
    ledger.forget_all_but([])
    ledger.close()
    assert counts(file) == {}


def test_an_engine_that_is_told_to_end_counts_no_death(file: Path) -> None:
    die(file, "a")
    ledger = CrashLedger(file)
    with ledger.running(["a"]):
        ledger.stop_recording()
        with ledger.running(["b"]):
            assert counts(file) == {"a": 1}
    ledger.close()


def test_a_database_error_counts_no_death_but_bad_data_does(file: Path) -> None:
    die(file, "a", error=OperationalError("", None, Exception("disk is full")))
    assert counts(file) == {}
    die(file, "a", error=DataError("", None, Exception("too big")))
    assert counts(file) == {"a": 1}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"running": 1}', '{"running": 1, "deaths": {}}', "\xff"])
def test_a_damaged_ledger_counts_no_death(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_bytes(content.encode("latin-1"))
    assert counts(file) == {}


def test_commands_run_although_the_full_disk_takes_no_ledger(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    ledger = CrashLedger(file)
    monkeypatch.setattr("os.pwrite", full)
    with ledger.running(["a"]):
        pass
    ledger.close()
    assert counts(file) == {}


def test_what_begins_while_the_engine_dies_is_not_to_blame(tmp_path: Path) -> None:
    """A lost device fails whatever runs next, until the engine has ended."""
    file = tmp_path / "running"
    dying = CrashLedger(file)
    for key in ("culprit", "next"):
        with pytest.raises(SystemExit), dying.running([key]):
            raise SystemExit
    dying.close()
    assert CrashLedger(file).counts == {"culprit": 1}
