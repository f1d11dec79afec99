"""What the next engine learns of what the last one was running."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy.exc import DataError, OperationalError

from skyrl.engine.crash_ledger import CrashLedger


class Died(BaseException):
    """Nothing after this point happens."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "running.json"


def die(file: Path, *keys: str, error: BaseException | None = None) -> None:
    """An engine that ends while it runs these."""
    error = error or Died()
    deaths = CrashLedger(file)
    with pytest.raises(type(error)), deaths.running(keys):
        raise error
    deaths.close()


def counts(file: Path) -> dict[str, int]:
    deaths = CrashLedger(file)
    deaths.close()
    return deaths.counts


def test_deaths_add_up_for_what_ran_and_for_nothing_else(file: Path) -> None:
    assert counts(file) == {}
    deaths = CrashLedger(file)
    with deaths.running(["done"]):
        pass
    deaths.close()
    die(file, "a", "b")
    assert counts(file) == {"a": 1, "b": 1}
    die(file, "b")
    assert counts(file) == {"a": 1, "b": 2}, "and an engine that runs nothing adds none"


def test_what_runs_beside_others_ends_alone(file: Path) -> None:
    deaths = CrashLedger(file)
    with deaths.running(["a", "b"]):
        with deaths.running(["save"]):
            pass
        assert counts(file) == {"a": 1, "b": 1}
    deaths.close()


def test_a_good_end_forgets_earlier_deaths(file: Path) -> None:
    die(file, "a", "b")
    deaths = CrashLedger(file)
    with deaths.running(["a"]):
        pass
    assert deaths.counts == {"b": 1}
    deaths.forget_all_but(["c"])
    deaths.close()
    assert counts(file) == {}


def test_a_long_list_leaves_nothing_behind(file: Path) -> None:
    die(file, *(f"request-{number}" for number in range(500)))
    deaths = CrashLedger(file)
    assert len(deaths.counts) == 500
    deaths.forget_all_but([])
    deaths.close()
    assert counts(file) == {}


def test_an_engine_that_is_told_to_end_blames_nothing(file: Path) -> None:
    die(file, "a")
    deaths = CrashLedger(file)
    with deaths.running(["a"]):
        deaths.stop_recording()
        with deaths.running(["b"]):
            assert counts(file) == {"a": 1}
    deaths.close()


def test_the_databases_trouble_is_no_commands_fault_but_bad_data_is(file: Path) -> None:
    die(file, "a", error=OperationalError("", None, Exception("disk is full")))
    assert counts(file) == {}
    die(file, "a", error=DataError("", None, Exception("too big")))
    assert counts(file) == {"a": 1}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"running": 1}', '{"running": 1, "deaths": {}}', "\xff"])
def test_a_damaged_file_blames_nothing(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_bytes(content.encode("latin-1"))
    assert counts(file) == {}


def test_a_disk_that_takes_nothing_stops_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    deaths = CrashLedger(file)
    monkeypatch.setattr("os.pwrite", full)
    with deaths.running(["a"]):
        pass
    deaths.close()
    assert counts(file) == {}
