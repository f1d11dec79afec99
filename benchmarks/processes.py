"""CPU time, memory and files of a process as Linux reports them, and the processes of a server."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from skyrl.runtime.processes.usage import (
    ENGINE,
    TICKS_PER_S,
    cpu_of,
    forget_peak_of,
    parts_of_server,
    peak_resident_bytes,
    resident_bytes,
    status_of,
)
from skyrl.runtime.processes.usage import cpu_seconds as cpu_seconds

MIB = 2**20
PARTS = {"api": "skyrl.api.server", "engine": ENGINE}
"""The module of each process of a server, except for the launcher."""


def thread_seconds(pid: int) -> dict[int, float]:
    """User and system CPU time of each thread that the process has now, by thread id."""
    found: dict[int, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found[int(task.name)] = cpu_of(task / "stat")
    return found


def busy_seconds() -> float:
    """CPU time that the whole machine has used since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle, waiting = fields[3:5]
    return (sum(fields) - idle - waiting) / TICKS_PER_S


def resident_mb(pid: int) -> float:
    return resident_bytes(pid) / MIB


def peak_resident_mb(pid: int) -> float:
    return peak_resident_bytes(pid) / MIB


def forget_peak() -> None:
    """The peak of this process counts from now on, without memory that glibc keeps after it was freed."""
    ctypes.CDLL(None).malloc_trim(0)
    forget_peak_of(os.getpid())


def threads(pid: int) -> int:
    return status_of(pid, "Threads")


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def parts_of(launcher: int) -> dict[str, int]:
    """The process ids of a server's API and, if the server has one, its engine."""
    return {name: pids[-1] for name, pids in processes_of(launcher).items()}


def processes_of(launcher: int) -> dict[str, list[int]]:
    """The process ids of a server's APIs and engines, by PARTS."""
    import psutil

    found: dict[str, list[int]] = {}
    for child in psutil.Process(launcher).children(recursive=True):
        command = child.cmdline()
        for name, module in PARTS.items():
            if module in command:
                found.setdefault(name, []).append(child.pid)
    return found


def computing_of(launcher: int) -> dict[str, list[int]]:
    """The process ids of a server's vLLM ("vLLM") and of its engine ("trainer")."""
    return {name: pids for name, pids in parts_of_server(launcher).items() if name != "server"}


def disk_bytes(directory: Path) -> int:
    """The bytes that a state directory takes on disk, without logs."""
    total = 0
    for file in directory.rglob("*"):
        try:
            if file.is_file() and file.suffix != ".log":
                total += file.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total
