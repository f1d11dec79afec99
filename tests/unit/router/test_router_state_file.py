"""The registered workers outlive the router's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skyrl.router import state_file
from skyrl.router.policies import LeastInFlight
from skyrl.router.pool import WorkerPool
from skyrl.router.state_file import StateFile
from skyrl.router.worker import WorkerState

HELD: dict[str, object] = {"revive": "registration"}


@contextlib.asynccontextmanager
async def written(directory: Path) -> AsyncIterator[WorkerPool]:
    """A pool whose changes are in the file at the end of the block."""
    pool = WorkerPool(LeastInFlight())
    task = asyncio.create_task(StateFile(directory, pool).run())
    await asyncio.sleep(0)
    yield pool
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def loaded(directory: Path) -> WorkerPool:
    pool = WorkerPool(LeastInFlight())
    StateFile(directory, pool).load()
    return pool


async def test_workers_are_known_after_a_restart(tmp_path: Path) -> None:
    labels = {"zone": 1, "name": "\ud800"}  # json.loads gives such strings, and a request may have them
    async with written(tmp_path) as pool:
        pool.add("http://b", "http://b:1", labels=labels)
        pool.add("http://a")
        pool.add("http://gone")
        draining = pool.add("http://draining")
        pool.begin(draining)
        pool.remove("http://gone")
        pool.remove("http://draining")
        pool.refused(pool.add("http://a"))
    workers = loaded(tmp_path).workers
    assert [(worker.url, worker.completions_url, worker.labels, worker.state) for worker in workers] == [
        ("http://b", "http://b:1", labels, WorkerState.HEALTHY),
        ("http://a", None, {}, WorkerState.HEALTHY),
    ]


async def test_a_worker_that_waited_for_its_registration_still_waits(tmp_path: Path) -> None:
    async with written(tmp_path) as pool:
        pool.add("http://ready", labels=HELD)
        pool.refused(pool.add("http://waits", labels=HELD))
    again = loaded(tmp_path)
    assert [worker.url for worker in again.candidates] == ["http://ready"]
    again.remove("http://ready")
    assert again.candidates == (), "nor is it the last resort before a good probe"


async def test_what_keeps_a_worker_out_of_routing_survives(tmp_path: Path) -> None:
    async with written(tmp_path) as pool:
        pool.set_service(pool.add("http://disabled"), disabled="by hand", is_dead=False)
        pool.set_service(pool.add("http://dead"), disabled=None, is_dead=True)
        pool.set_missed(pool.add("http://late"), "an update")
    again = loaded(tmp_path)
    assert again.candidates == ()
    assert [(one.disabled, one.is_dead, one.missed) for one in again.workers] == [
        ("by hand", False, None),
        (None, True, None),
        (None, False, "an update"),
    ]


@pytest.fixture
async def wrote(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set after each write that succeeds."""
    wrote = asyncio.Event()
    loop = asyncio.get_running_loop()
    replace = state_file.os.replace

    def replaced(source: Path, target: Path) -> None:
        replace(source, target)
        loop.call_soon_threadsafe(wrote.set)

    monkeypatch.setattr(state_file.os, "replace", replaced)
    return wrote


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def test_a_change_is_written_while_the_router_runs(tmp_path: Path, wrote: asyncio.Event) -> None:
    async with written(tmp_path) as pool:
        pool.add("http://a")
        await wrote.wait()
        assert [worker.url for worker in loaded(tmp_path).workers] == ["http://a"]


async def test_a_failed_write_is_told_and_tried_again(
    tmp_path: Path, wrote: asyncio.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_file, "RETRY_S", 0.0)
    failed = iter([True])
    fsync = state_file.os.fsync

    def failing(descriptor: int) -> None:
        if next(failed, False):
            raise OSError("no space")
        fsync(descriptor)

    monkeypatch.setattr(state_file.os, "fsync", failing)
    with caplog.at_level(logging.WARNING):
        async with written(tmp_path) as pool:
            pool.add("http://a")
            await wrote.wait()
    assert "no space" in caplog.text
    assert names_in(tmp_path) == [state_file.FILE_NAME]


WORKER = {"url": "http://b", "completions_url": None, "worker_type": "regular", "labels": {}, "waits": False} | {
    "disabled": None,
    "is_dead": False,
    "missed": None,
}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        json.dumps({"version": 1, "workers": []}).encode(),
        *(
            json.dumps({"version": 2, "workers": workers}).encode()
            for workers in (None, [5], [{}], [WORKER | {"url": 5}], [WORKER | {"url": "x"}], [WORKER | {"more": 1}])
        ),
    ],
)
def test_a_broken_file_is_moved_aside(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / state_file.FILE_NAME).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert loaded(tmp_path).workers == []
    assert "is broken" in caplog.text
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [content]
    assert loaded(tmp_path).workers == []


def test_no_file_is_no_workers(tmp_path: Path) -> None:
    assert loaded(tmp_path / "new" / "directory").workers == []
    assert (tmp_path / "new" / "directory").is_dir()
