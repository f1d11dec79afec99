"""Supervised child processes, and the pauses between their starts."""

from __future__ import annotations

import _posixsubprocess
import asyncio
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from skyrl.runtime.processes.backoff import Backoff
from skyrl.runtime.processes.supervision import SupervisedProcess

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
WITH_GRANDCHILD = """
import subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])
print(grandchild.pid, flush=True)
time.sleep(600)
"""
GRACEFUL = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))
print('up', flush=True)
time.sleep(600)
"""


def child(tmp_path: Path, code: str, **options: object) -> SupervisedProcess:
    argv = [sys.executable, "-S", "-c", code]
    return SupervisedProcess("child", argv, {"GIVEN": "yes"}, tmp_path / "logs" / "child.log", **options)  # type: ignore[arg-type]


@asynccontextmanager
async def running(process: SupervisedProcess, grace_s: float = 10.0) -> AsyncIterator[asyncio.Task[None]]:
    """Runs the process inside the block, and stops it at the end."""
    task = asyncio.create_task(process.run())
    try:
        yield task
    finally:
        await process.stop(grace_s=grace_s)
        await task


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not run."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def wait_until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
        await asyncio.sleep(0.01)


async def test_the_child_gets_its_environment_and_its_output_is_logged(tmp_path: Path) -> None:
    process = child(
        tmp_path,
        "import os, sys; print(os.environ['GIVEN']); sys.stderr.write('bad'); import time; time.sleep(600)",
    )
    async with running(process):
        await wait_until(lambda: process.log_path.exists() and "yes" in process.log_path.read_text() or None)
        await wait_until(lambda: "bad" in process.log_tail())
    assert process.pid is None


def delays(caplog: pytest.LogCaptureFixture) -> list[float]:
    """The seconds before each restart that the supervisor logged."""
    return [record.args[2] for record in caplog.records if "again in" in record.msg and isinstance(record.args, tuple)]  # type: ignore[misc]


async def test_a_crash_is_reported_and_the_child_restarted_after_a_growing_delay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[tuple[int, float]] = []
    process = child(
        tmp_path,
        "raise SystemExit(7)",
        on_exit=lambda c: codes.append((c, time.monotonic())),
        first_delay_s=0.2,
    )
    async with running(process):
        await wait_until(lambda: len(codes) == 4)
    assert [code for code, _ in codes] == [7] * 4
    assert process.starts == 4
    assert delays(caplog) == [0.2, 0.4, 0.8, 1.6]
    first, second, third = (b - a for (_, a), (_, b) in zip(codes, codes[1:], strict=False))
    assert first > 0.2
    assert second > 0.4
    assert third > 0.8


async def test_the_delay_starts_anew_after_a_stable_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    codes: list[int] = []
    process = child(
        tmp_path,
        "import time; time.sleep(0.1); raise SystemExit(1)",
        on_exit=codes.append,
        first_delay_s=0.05,
        stable_after_s=0.1,
    )
    async with running(process):
        await wait_until(lambda: len(codes) == 4)
    assert delays(caplog) == [0.05] * 4


async def test_the_log_names_a_program_that_does_not_exist(tmp_path: Path) -> None:
    codes: list[int] = []
    process = SupervisedProcess("x", ["/no/such/program"], {}, tmp_path / "x.log", on_exit=codes.append)
    async with running(process):
        await wait_until(lambda: codes)
    assert codes[0] != 0
    assert "No such file" in process.log_tail()


async def test_stop_lets_the_child_end_gracefully(tmp_path: Path) -> None:
    process = child(tmp_path, GRACEFUL)
    async with running(process, grace_s=1000):
        await wait_until(lambda: process.pid and "up" in process.log_tail())
        began = time.monotonic()
    assert "bye" in process.log_tail()
    assert time.monotonic() - began < 60
    assert process.starts == 1


async def test_stop_kills_a_child_that_ignores_sigterm_and_its_whole_group(tmp_path: Path) -> None:
    process = child(tmp_path, "import signal; signal.signal(15, signal.SIG_IGN);" + WITH_GRANDCHILD)
    async with running(process, grace_s=0.3):
        await wait_until(lambda: process.pid and process.log_tail().strip().isdigit())
        pid, grandchild = process.pid, int(process.log_tail())
        assert pid is not None
        assert alive(pid)
        assert alive(grandchild)
    assert not alive(pid)
    assert not alive(grandchild)


async def test_the_process_group_of_a_crashed_child_is_killed_before_the_restart(tmp_path: Path) -> None:
    codes: list[int] = []
    process = child(tmp_path, WITH_GRANDCHILD, on_exit=codes.append)
    async with running(process):
        await wait_until(lambda: process.pid and process.log_tail().strip().isdigit())
        grandchild = int(process.log_tail())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await wait_until(lambda: codes)
        assert codes == [-signal.SIGKILL]
        assert not alive(grandchild)


async def test_a_stalled_child_that_is_killed_is_started_again(tmp_path: Path) -> None:
    process = child(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)", first_delay_s=0.05)
    async with running(process):
        await wait_until(lambda: process.pid and process.log_tail() == str(process.pid))
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert process.kill(pid)
        await wait_until(lambda: process.pid not in (None, pid) and process.log_tail() == str(process.pid))
        assert not alive(pid)
        assert not process.kill(pid), "the process with this id has ended"
        assert process.starts == 2


async def test_cancelling_run_kills_the_child_at_once(tmp_path: Path) -> None:
    process = child(tmp_path, SLEEP)
    running = asyncio.create_task(process.run())
    await wait_until(lambda: process.pid and "up" in process.log_tail())
    pid = process.pid
    assert pid is not None
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(pid)


async def test_stop_before_run_and_during_backoff_returns(tmp_path: Path) -> None:
    never = child(tmp_path, SLEEP)
    await never.stop()
    await never.run()
    assert never.pid is None
    codes: list[int] = []
    waiting = child(tmp_path, "raise SystemExit(1)", on_exit=codes.append, first_delay_s=1000)
    running = asyncio.create_task(waiting.run())
    await wait_until(lambda: codes)
    await asyncio.wait_for(waiting.stop(), 60)
    await running


def failed_starts(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The supervisor's log messages about starts that failed."""
    return [record.getMessage() for record in caplog.records if "could not be started" in record.getMessage()]


@pytest.mark.parametrize(
    "error",
    [
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=["no process id", "no memory"],
)
async def test_a_fork_that_fails_is_logged_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: OSError
) -> None:
    fork, tries = _posixsubprocess.fork_exec, 0

    def fail_twice(*arguments: Any) -> int:
        nonlocal tries
        tries += 1
        if tries in (2, 3):
            raise error
        return fork(*arguments)

    monkeypatch.setattr(subprocess, "_fork_exec", fail_twice)
    codes: list[int] = []
    process = child(tmp_path, "raise SystemExit(7)", on_exit=codes.append, first_delay_s=0.05)
    async with running(process) as task:
        await wait_until(lambda: len(codes) == 2)
        assert not task.done()
    assert tries >= 4
    assert codes[:2] == [7, 7]
    messages = failed_starts(caplog)
    assert len(messages) == 2
    assert f"child could not be started: {error}; again in 0.1 s" in messages[0]


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Inside the block this process cannot open another file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_the_start_is_repeated_until_a_file_descriptor_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = child(tmp_path, SLEEP, first_delay_s=0.05)
    with no_descriptors_left():
        running = asyncio.create_task(process.run())
        await wait_until(lambda: len(failed_starts(caplog)) == 2)
    await wait_until(lambda: process.pid and process.log_tail() == "up")
    await process.stop()
    await running
    assert "Too many open files" in failed_starts(caplog)[0]


async def test_the_log_tail_is_empty_while_no_file_descriptor_is_free(tmp_path: Path) -> None:
    tails: list[str] = []

    def ended(_: int) -> None:
        with no_descriptors_left():
            tails.append(process.log_tail())

    process = child(tmp_path, "print('last words'); raise SystemExit(1)", first_delay_s=0.05, on_exit=ended)
    async with running(process) as task:
        await wait_until(lambda: len(tails) == 2 or task.done())
        assert tails == ["", ""]


async def test_the_start_is_repeated_until_the_log_directory_can_be_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("a file where the directory should be")
    process = child(tmp_path, SLEEP, first_delay_s=0.05)
    async with running(process):
        await wait_until(lambda: len(failed_starts(caplog)) == 2)
        (tmp_path / "logs").unlink()
        await wait_until(lambda: process.pid and process.log_tail() == "up")


@pytest.mark.parametrize(("owner", "name"), [(threading.Thread, "start"), (os, "pidfd_open")])
async def test_supervision_needs_no_thread_and_no_pidfd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    """A machine without a free process id has no free thread id either."""

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread") if owner is threading.Thread else OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(owner, name, refuse)
    codes: list[int] = []
    async with running(child(tmp_path, "raise SystemExit(7)", on_exit=codes.append, first_delay_s=0.05)):
        await wait_until(lambda: len(codes) == 2)
    assert codes[:2] == [7, 7]


async def test_stopping_a_child_that_has_just_ended_raises_nothing(tmp_path: Path) -> None:
    process = child(tmp_path, "import time; time.sleep(0.2)")
    async with running(process):
        await wait_until(lambda: process.pid)
        pid = process.pid
        assert pid is not None
        while alive(pid):
            time.sleep(0.01)  # noqa: ASYNC251 - the event loop must not notice the end of the child
        time.sleep(0.2)  # noqa: ASYNC251 - time in which other code could reap the child
        assert process.pid == pid


async def test_each_start_begins_with_a_divider_and_the_tail_shows_the_newest_start(tmp_path: Path) -> None:
    codes: list[int] = []
    process = child(tmp_path, "import os; print(os.getpid())", on_exit=codes.append, first_delay_s=0.05)
    async with running(process):
        await wait_until(lambda: len(codes) == 2)
    lines = process.log_path.read_text().splitlines()
    assert [line.split(",")[0] for line in lines[:3:2]] == ["===== child: start 1", "===== child: start 2"]
    assert lines[1] != lines[3]
    assert "=====" not in process.log_tail()
    process.log_path.write_text("")  # as a log rotation does
    assert process.log_tail() == ""
    process.log_path.unlink()
    assert process.log_tail() == ""


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from skyrl.runtime.processes.supervision import SupervisedProcess

CHILD = '''
import os, sys, time
from skyrl.inference.vllm_plugin import _cover_forks
_cover_forks()
grandchild = os.fork()
if grandchild == 0:
    time.sleep(600)
print(os.getpid(), grandchild, flush=True)
time.sleep(600)
'''
asyncio.run(SupervisedProcess("c", [sys.executable, "-c", CHILD], {}, Path(sys.argv[1])).run())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which has the parent-death signal")
async def test_a_killed_supervisor_leaves_no_child_or_grandchild(tmp_path: Path) -> None:
    log = tmp_path / "c.log"
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", SUPERVISOR, str(log))
    try:
        await wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
        pids = [int(word) for word in log.read_text().splitlines()[1].split()]
        assert all(alive(pid) for pid in pids)
    finally:
        supervisor.kill()
        await supervisor.wait()
    await wait_until(lambda: not any(alive(pid) for pid in pids))


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.1, 0.5)
    assert [backoff.pause() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_the_longest_pause_of_a_call_bounds_the_next_pause() -> None:
    backoff = Backoff(1.0, 2.0)
    assert [backoff.pause(5.0) for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    assert [backoff.pause() for _ in range(2)] == [5.0, 2.0]


def test_jitter_shortens_or_lengthens_a_pause_by_its_fraction_at_most() -> None:
    pauses = [Backoff(1.0, 1.0, jitter=0.25).pause() for _ in range(1_000)]
    assert 0.75 <= min(pauses) < 0.85
    assert 1.15 < max(pauses) <= 1.25


def test_jitter_of_one_pause_does_not_change_the_next() -> None:
    backoff = Backoff(1.0, 4.0, jitter=0.25)
    backoff.pause()
    backoff.pause()
    assert 3.0 <= backoff.pause() <= 5.0


@pytest.mark.parametrize(("ran_s", "next_s"), [(59.9, 2.0), (60.0, 1.0)])
def test_pauses_start_anew_after_a_try_that_ran_long_enough(ran_s: float, next_s: float) -> None:
    backoff = Backoff(1.0, 30.0, stable_s=60.0)
    backoff.pause()
    backoff.ran(ran_s)
    assert backoff.pause() == next_s


def test_waited_says_whether_a_pause_was_given() -> None:
    backoff = Backoff(1.0, 30.0, stable_s=60.0)
    assert not backoff.waited
    backoff.pause()
    assert backoff.waited
    backoff.ran(60.0)
    assert not backoff.waited
