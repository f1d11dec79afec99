"""Little free space on the server's disk: when the log says so, and which errors mean a full disk."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from skyrl.base.types.requests import Command
from skyrl.base.wire.errors import ErrorCategory
from skyrl.engine.command_log import failed
from skyrl.runtime.processes import host_resources
from skyrl.runtime.processes.host_resources import SPARE_DISK_BYTES, is_full_disk, shortage, watch_disk
from skyrl.storage.checkpoint_store.base import StoreError
from skyrl.storage.db.futures import Outcome


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The usage that every disk reports; a test sets `free`."""
    usage = SimpleNamespace(free=SPARE_DISK_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    return usage


def test_a_shortage_is_described_with_the_free_bytes_and_the_bound(disk: SimpleNamespace, tmp_path: Path) -> None:
    assert shortage(tmp_path) is None
    disk.free = 60 * 2**20
    description = shortage(tmp_path)
    assert description is not None
    assert "60 MiB free, less than the 512 MiB" in description


def test_a_missing_directory_is_described(tmp_path: Path) -> None:
    assert shortage(tmp_path / "gone") == (
        "the free space of the server's disk cannot be read: No such file or directory"
    )


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of `skyrl.runtime.processes.host_resources`. SDK clients of other tests may log at any time."""
    return [record.getMessage() for record in caplog.records if record.name == host_resources.__name__]


async def test_the_log_reports_the_start_and_the_end_of_a_shortage_once(
    disk: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checks = 0
    real_shortage = host_resources.shortage

    def count(directory: Path) -> str | None:
        nonlocal checks
        checks += 1
        return real_shortage(directory)

    async def wait_for_checks(more: int) -> None:
        last = checks + more
        while checks < last:  # noqa: ASYNC110 - the test's own time limit ends it
            await asyncio.sleep(0.005)

    monkeypatch.setattr(host_resources, "shortage", count)
    monkeypatch.setattr(host_resources, "LOOK_S", 0.01)
    with caplog.at_level(logging.INFO):
        watching = asyncio.create_task(watch_disk(tmp_path))
        await wait_for_checks(3)
        assert messages(caplog) == []
        disk.free = 0
        await wait_for_checks(5)
        disk.free = SPARE_DISK_BYTES
        await wait_for_checks(3)
        assert [message.partition(",")[0] for message in messages(caplog)] == [
            "the server's disk has 0 MiB free",
            "the server's disk has enough space again",
        ]
        monkeypatch.setattr(host_resources, "REPEAT_S", 0.0)
        disk.free = 0
        await wait_for_checks(5)
        assert len(messages(caplog)) > 4, "the log repeats a shortage that lasts"
        assert not watching.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_disk_that_cannot_be_read_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_resources, "LOOK_S", 0.01)
    watching = asyncio.create_task(watch_disk(tmp_path / "gone"))
    while "cannot be read" not in caplog.text:  # noqa: ASYNC110 - the test's own time limit ends it
        await asyncio.sleep(0.01)
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def disk_full_error() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def error_caused_by_full_disk() -> Exception:
    error = StoreError("scratch/x: No such thing")
    error.__cause__ = disk_full_error()
    return error


FULL_DISK_ERRORS = [
    disk_full_error(),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    error_caused_by_full_disk(),
]


@pytest.mark.parametrize("error", FULL_DISK_ERRORS, ids=["file", "quota", "safetensors", "cause"])
def test_a_save_that_fails_on_a_full_disk_says_so(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert is_full_disk(error)
    outcome = failed(error, SimpleNamespace(kind="SAVE_WEIGHTS", request_id="r"))  # type: ignore[arg-type]
    assert isinstance(outcome, Outcome)
    assert outcome.error is not None
    assert outcome.error.startswith("no space left on the server's disk")
    assert outcome.error_category == ErrorCategory.SERVER
    assert "SAVE_WEIGHTS r failed: no space left" in caplog.text


def test_other_errors_are_not_taken_for_a_full_disk() -> None:
    command: Command = SimpleNamespace(kind="SAVE_WEIGHTS", request_id="r")  # type: ignore[assignment]
    assert not is_full_disk(PermissionError(errno.EACCES, "Permission denied"))
    message = failed(SafetensorError("header too large"), command).error or ""
    assert message.startswith("the server failed while it ran this command")
