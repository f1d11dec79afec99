"""Supervised processes, with real children: what is restarted when, and that nothing is ever left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl.supervision import SupervisedProcess

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


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        await asyncio.sleep(0.01)


async def test_output_and_environment_reach_child_and_log(tmp_path: Path) -> None:
    process = child(
        tmp_path,
        "import os, sys; print(os.environ['GIVEN']); sys.stderr.write('bad'); import time; time.sleep(600)",
    )
    running = asyncio.create_task(process.run())
    await until(lambda: process.log_path.exists() and "yes" in process.log_path.read_text() or None)
    await until(lambda: "bad" in process.log_tail())
    await process.stop()
    await running
    assert process.pid is None


def delays(caplog: pytest.LogCaptureFixture) -> list[float]:
    """Seconds before each restart, as the supervisor announced them."""
    return [record.args[2] for record in caplog.records if "again in" in record.msg and isinstance(record.args, tuple)]  # type: ignore[misc]


async def test_crash_is_reported_and_restarted_with_growing_delay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[tuple[int, float]] = []
    process = child(
        tmp_path,
        "raise SystemExit(7)",
        on_exit=lambda c: codes.append((c, time.monotonic())),
        first_delay_s=0.2,
    )
    running = asyncio.create_task(process.run())
    await until(lambda: len(codes) == 4)
    await process.stop()
    await running
    assert [code for code, _ in codes] == [7] * 4
    assert process.restarts == 3
    assert delays(caplog) == [0.2, 0.4, 0.8, 1.6]
    first, second, third = (b - a for (_, a), (_, b) in zip(codes, codes[1:], strict=False))
    assert first > 0.2
    assert second > 0.4
    assert third > 0.8


async def test_backoff_starts_anew_after_a_stable_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    codes: list[int] = []
    process = child(
        tmp_path,
        "import time; time.sleep(0.1); raise SystemExit(1)",
        on_exit=codes.append,
        first_delay_s=0.05,
        stable_after_s=0.1,
    )
    running = asyncio.create_task(process.run())
    await until(lambda: len(codes) == 4)
    await process.stop()
    await running
    assert delays(caplog) == [0.05] * 4


async def test_program_that_does_not_exist_is_in_the_log(tmp_path: Path) -> None:
    codes: list[int] = []
    process = SupervisedProcess("x", ["/no/such/program"], {}, tmp_path / "x.log", on_exit=codes.append)
    running = asyncio.create_task(process.run())
    await until(lambda: codes)
    await process.stop()
    await running
    assert codes[0] != 0
    assert "No such file" in process.log_tail()


async def test_stop_is_graceful(tmp_path: Path) -> None:
    process = child(tmp_path, GRACEFUL)
    running = asyncio.create_task(process.run())
    await until(lambda: process.pid and "up" in process.log_tail())
    began = time.monotonic()
    await process.stop(grace_s=1000)
    await running
    assert "bye" in process.log_tail()
    assert time.monotonic() - began < 60
    assert process.restarts == 0


async def test_stop_kills_a_child_that_ignores_sigterm_and_its_whole_group(tmp_path: Path) -> None:
    process = child(tmp_path, "import signal; signal.signal(15, signal.SIG_IGN);" + WITH_GRANDCHILD)
    running = asyncio.create_task(process.run())
    await until(lambda: process.pid and process.log_tail().strip().isdigit())
    pid, grandchild = process.pid, int(process.log_tail())
    assert pid is not None
    assert alive(pid)
    assert alive(grandchild)
    await process.stop(grace_s=0.3)
    await running
    assert not alive(pid)
    assert not alive(grandchild)


async def test_group_of_a_crashed_child_is_gone_before_the_restart(tmp_path: Path) -> None:
    codes: list[int] = []
    process = child(tmp_path, WITH_GRANDCHILD, on_exit=codes.append)
    running = asyncio.create_task(process.run())
    await until(lambda: process.pid and process.log_tail().strip().isdigit())
    grandchild = int(process.log_tail())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: codes)
    assert codes == [-signal.SIGKILL]
    assert not alive(grandchild)
    await process.stop()
    await running


async def test_killed_child_is_started_again_also_when_it_was_stopped(tmp_path: Path) -> None:
    process = child(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)", first_delay_s=0.05)
    running = asyncio.create_task(process.run())
    await until(lambda: process.pid and process.log_tail() == str(process.pid))
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert process.kill(pid)
    await until(lambda: process.pid not in (None, pid) and process.log_tail().endswith(f"\n{process.pid}"))
    assert not alive(pid)
    assert not process.kill(pid), "that one is not there any more"
    assert process.restarts == 1
    await process.stop()
    await running


async def test_cancelling_run_kills_at_once(tmp_path: Path) -> None:
    process = child(tmp_path, SLEEP)
    running = asyncio.create_task(process.run())
    await until(lambda: process.pid and "up" in process.log_tail())
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
    await until(lambda: codes)
    await asyncio.wait_for(waiting.stop(), 60)
    await running


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from skyrl.supervision import SupervisedProcess

CHILD = '''
import os, sys, time
from skyrl.vllm_plugin import _cover_forks
_cover_forks()
grandchild = os.fork()
if grandchild == 0:
    time.sleep(600)
print(os.getpid(), grandchild, flush=True)
time.sleep(600)
'''
asyncio.run(SupervisedProcess("c", [sys.executable, "-c", CHILD], {}, Path(sys.argv[1])).run())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
async def test_killed_supervisor_leaves_no_child_or_grandchild(tmp_path: Path) -> None:
    log = tmp_path / "c.log"
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", SUPERVISOR, str(log))
    try:
        await until(lambda: log.exists() and len(log.read_text().split()) == 2)
        pids = [int(word) for word in log.read_text().split()]
        assert all(alive(pid) for pid in pids)
    finally:
        supervisor.kill()
        await supervisor.wait()
    await until(lambda: not any(alive(pid) for pid in pids))
