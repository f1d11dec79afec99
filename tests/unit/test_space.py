"""Little space on the server's disk: when it is said, and which errors mean that there is none."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from skyrl.db.futures import Outcome
from skyrl.engine.failures import failed
from skyrl.storage import space
from skyrl.storage.base import StoreError
from skyrl.storage.space import SPARE_DISK_BYTES, is_full_disk, shortage, watch_disk
from skyrl.types.command import Command
from skyrl.wire.errors import ErrorCategory


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The free bytes of every disk."""
    usage = SimpleNamespace(free=SPARE_DISK_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    return usage


def test_a_shortage_is_told_with_its_figures(disk: SimpleNamespace, tmp_path: Path) -> None:
    assert shortage(tmp_path) is None
    disk.free = 60 * 2**20
    told = shortage(tmp_path)
    assert told is not None
    assert "60 MiB free, less than the 512 MiB" in told


def test_a_directory_that_is_gone_is_told_too(tmp_path: Path) -> None:
    assert shortage(tmp_path / "gone") == (
        "the free space of the server's disk cannot be read: No such file or directory"
    )


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Without what SDK clients of other tests may say at any time."""
    return [record.getMessage() for record in caplog.records if record.name == space.__name__]


async def test_the_log_says_it_once_when_the_bound_is_crossed_and_once_when_it_is_over(
    disk: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0
    look = space.shortage

    def count(directory: Path) -> str | None:
        nonlocal looks
        looks += 1
        return look(directory)

    async def looked(more: int) -> None:
        wanted = looks + more
        while looks < wanted:  # noqa: ASYNC110 - the test's own time limit ends it
            await asyncio.sleep(0.005)

    monkeypatch.setattr(space, "shortage", count)
    monkeypatch.setattr(space, "LOOK_S", 0.01)
    with caplog.at_level(logging.INFO):
        watching = asyncio.create_task(watch_disk(tmp_path))
        await looked(3)
        assert said(caplog) == []
        disk.free = 0
        await looked(5)
        disk.free = SPARE_DISK_BYTES
        await looked(3)
        assert [message.partition(",")[0] for message in said(caplog)] == [
            "the server's disk has 0 MiB free",
            "the server's disk has enough space again",
        ]
        monkeypatch.setattr(space, "REPEAT_S", 0.0)
        disk.free = 0
        await looked(5)
        assert len(said(caplog)) > 4, "as long as it lasts it is said again"
        assert not watching.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_disk_that_cannot_be_asked_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(space, "LOOK_S", 0.01)
    watching = asyncio.create_task(watch_disk(tmp_path / "gone"))
    while "cannot be read" not in caplog.text:  # noqa: ASYNC110 - the test's own time limit ends it
        await asyncio.sleep(0.01)
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def chained() -> Exception:
    error = StoreError("scratch/x: No such thing")
    error.__cause__ = full()
    return error


FULL = [
    full(),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    chained(),
]


@pytest.mark.parametrize("error", FULL, ids=["file", "quota", "safetensors", "cause"])
def test_a_save_on_a_full_disk_says_so(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
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
    told = failed(SafetensorError("header too large"), command).error or ""
    assert told.startswith("the server failed while it ran this command")
