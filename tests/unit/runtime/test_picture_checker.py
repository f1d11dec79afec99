"""Pictures are checked in a worker process: what a file may do to it, and what the process that asks notices."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import psutil
import pytest
from picture_files import black, jpeg, plain, png, turned, with_scans

from skyrl.base.pictures.decoding import MAX_PIXELS, MAX_SCANS
from skyrl.base.pictures.picture import BadPicture
from skyrl.runtime.pictures import Limits
from skyrl.runtime.pictures.checker import NotChecked, PictureChecker, TooManyPictures


@pytest.fixture
async def checker() -> AsyncIterator[PictureChecker]:
    checker = PictureChecker()
    yield checker
    await checker.close()


@cache
def slow_picture() -> bytes:
    """Valid, of 150 KB, and takes about 1.5 s."""
    return with_scans(plain(5000), MAX_SCANS - 10)


async def worker_of(checker: PictureChecker, *, but: int | None = None) -> psutil.Process:
    """Once it decodes the picture that was given before. `but`: the pid of a worker that was killed."""
    async with asyncio.timeout(60):
        while True:
            if checker.worker_pid not in (None, but):
                worker = psutil.Process(checker.worker_pid)
                if worker.cpu_times().user > 0.3:
                    return worker
            await asyncio.sleep(0.01)


async def test_the_size_of_good_pictures_and_the_reason_of_bad_ones(checker: PictureChecker) -> None:
    assert checker.worker_pid is None, "starts no worker before the first picture"
    assert await checker.check(png(), "png") == (9, 7)
    worker = checker.worker_pid
    assert await checker.check(jpeg(exif=turned(6)), "jpeg") == (24, 40)
    with pytest.raises(BadPicture, match="is said to be png, and the file is jpeg"):
        await checker.check(jpeg(), "png")
    with pytest.raises(BadPicture, match="is not a complete and valid PNG file"):
        await checker.check(png()[:-30], "png")
    with pytest.raises(BadPicture, match="neither a PNG nor a JPEG file"):
        await checker.check(b"", "png")
    assert await checker.check(png(), "png") == (9, 7)
    assert checker.worker_pid == worker, "a bad picture costs no worker"


async def test_a_thousand_checks_at_once_are_all_right() -> None:
    checker = PictureChecker(max_waiting=1000)
    try:
        files = {size: png(*size) for size in [(width, 1 + width % 7) for width in range(1, 101)]}
        wanted = list(files) * 10
        assert await asyncio.gather(*(checker.check(files[size], "png") for size in wanted)) == wanted
    finally:
        await checker.close()


async def test_a_killed_worker_is_replaced_and_the_picture_tried_again(checker: PictureChecker) -> None:
    check = asyncio.create_task(checker.check(slow_picture(), "jpeg"))
    killed = await worker_of(checker)
    killed.kill()
    assert await check == (5000, 5000)
    assert checker.worker_pid != killed.pid
    assert not psutil.pid_exists(killed.pid), "it was reaped"


async def test_a_worker_killed_while_idle_costs_nothing(checker: PictureChecker) -> None:
    await checker.check(png(), "png")
    assert checker.worker_pid is not None
    os.kill(checker.worker_pid, signal.SIGKILL)
    assert await checker.check(png(), "png") == (9, 7)


async def test_a_picture_that_ends_two_workers_is_refused(checker: PictureChecker) -> None:
    check = asyncio.create_task(checker.check(slow_picture(), "jpeg"))
    first = await worker_of(checker)
    first.kill()
    (await worker_of(checker, but=first.pid)).kill()
    with pytest.raises(BadPicture, match="ends the process that decodes it"):
        await check
    assert await checker.check(png(), "png") == (9, 7)


async def test_a_picture_that_takes_too_much_processor_time_is_refused() -> None:
    checker = PictureChecker(Limits(cpu_s=0.3))
    try:
        started = time.monotonic()
        with pytest.raises(BadPicture, match=r"takes more than 0.3 s to decode"):
            await checker.check(slow_picture(), "jpeg")
        assert time.monotonic() - started < 60
        assert checker.worker_pid is None
        for _ in range(20):  # the bound is one picture's, not the sum's
            assert await checker.check(jpeg("RGB", 1000, 1000), "jpeg") == (1000, 1000)
    finally:
        await checker.close()


async def test_a_worker_that_answers_nothing_is_replaced() -> None:
    checker = PictureChecker()
    try:
        await checker.check(png(), "png")
        assert checker._decoder is not None
        checker._decoder._limits = Limits(wall_s=1.0)  # its own alone: the start of the next may take longer
        stopped = checker.worker_pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(BadPicture, match="takes more than 1 s"):
            await checker.check(png(), "png")
        assert not psutil.pid_exists(stopped)
        assert await checker.check(png(), "png") == (9, 7)
    finally:
        await checker.close()


async def test_a_picture_that_takes_too_much_memory_is_refused() -> None:
    checker = PictureChecker(Limits(memory_bytes=200 * 2**20))
    try:
        with pytest.raises(BadPicture, match="takes too much memory to decode"):
            await checker.check(black(8000), "png")
        assert await checker.check(png(), "png") == (9, 7)
    finally:
        await checker.close()


@pytest.mark.slow
async def test_the_largest_pictures_fit_into_the_limits(checker: PictureChecker) -> None:
    side = int(MAX_PIXELS**0.5)
    assert await checker.check(plain(side, "CMYK", exif=turned(6)), "jpeg") == (side, side)
    assert await checker.check(black(side), "png") == (side, side)


async def test_the_queue_is_bounded_in_pictures_and_in_bytes() -> None:
    data = jpeg()
    checker = PictureChecker(max_waiting=3, max_waiting_bytes=2 * len(data) + 100)
    try:
        checks = [asyncio.create_task(checker.check(data, "jpeg")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyPictures, match="2 pictures wait") as caught:
            await checker.check(data, "jpeg")
        assert caught.value.retry_after_s > 0
        third = asyncio.create_task(checker.check(b"x", "png"))
        await asyncio.sleep(0)
        with pytest.raises(TooManyPictures, match="3 pictures wait"):
            await checker.check(b"x", "png")
        assert await asyncio.gather(*checks) == [(40, 24)] * 2
        with pytest.raises(BadPicture):
            await third
        assert await checker.check(data, "jpeg") == (40, 24), "the places are free again"
    finally:
        await checker.close()


async def test_a_cancelled_check_leaves_the_next_one_right(checker: PictureChecker) -> None:
    check = asyncio.create_task(checker.check(slow_picture(), "jpeg"))
    worker = await worker_of(checker)
    check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
    assert not psutil.pid_exists(worker.pid)
    assert await checker.check(png(), "png") == (9, 7)


async def test_close_ends_the_worker_and_the_checks_that_wait() -> None:
    checker = PictureChecker()
    checks = [asyncio.create_task(checker.check(slow_picture(), "jpeg")) for _ in range(3)]
    worker = await worker_of(checker)
    await checker.close()
    assert not psutil.pid_exists(worker.pid)
    for check in checks:
        with pytest.raises(NotChecked):
            await check
    assert checker.worker_pid is None
    await checker.close()


async def test_close_while_the_worker_starts_leaves_none() -> None:
    checker = PictureChecker()
    check = asyncio.create_task(checker.check(png(), "png"))
    await asyncio.sleep(0.01)
    await checker.close()
    await asyncio.gather(check, return_exceptions=True)
    assert checker.worker_pid is None


async def test_the_worker_inherits_no_secrets_and_no_sockets(
    checker: PictureChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_SECRET", "secret")
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    await checker.check(png(), "png")
    worker = psutil.Process(checker.worker_pid)
    assert not worker.net_connections()
    assert worker.num_fds() == 3
    assert "SKYRL_SECRET" not in worker.environ()
    assert worker.nice() == min(psutil.Process().nice() + 10, 19)
    assert worker.memory_info().rss < 100 * 2**20
    server.close()


def test_the_worker_ends_with_its_parent(tmp_path: Path) -> None:
    program = """
import asyncio, os, sys
from skyrl.runtime.pictures.checker import PictureChecker
async def main():
    checker = PictureChecker()
    data = open(sys.argv[1], "rb").read()
    await checker.check(data, "png")
    print(checker.worker_pid, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    (tmp_path / "a.png").write_bytes(png())
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.png")], capture_output=True, timeout=60)
    assert ran.returncode == -signal.SIGKILL
    worker = int(ran.stdout)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_process_that_asks_loads_no_library_for_images() -> None:
    program = "import sys, skyrl.runtime.pictures.checker; print({'PIL', 'torch', 'numpy'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"
