"""CPU time, memory and files of a process as Linux reports them, and the processes of a server."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PARTS = {"api": "skyrl.api.server", "engine": "skyrl.engine.main"}
"""The module of each process of a server, except for the launcher."""


def cpu_seconds(pid: int) -> float:
    """User and system CPU time of all threads of a process."""
    return _cpu_of(Path(f"/proc/{pid}/stat"))


def _cpu_of(stat: Path) -> float:
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def thread_seconds(pid: int) -> dict[int, float]:
    """User and system CPU time of each thread that the process has now, by thread id."""
    found: dict[int, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found[int(task.name)] = _cpu_of(task / "stat")
    return found


def busy_seconds() -> float:
    """CPU time that the whole machine has used since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle, waiting = fields[3:5]
    return (sum(fields) - idle - waiting) / TICKS_PER_S


def _status(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise KeyError(key)


def resident_mb(pid: int) -> float:
    return _status(pid, "VmRSS") / 1024


def peak_resident_mb(pid: int) -> float:
    """The largest resident memory of the process so far."""
    return _status(pid, "VmHWM") / 1024


def forget_peak() -> None:
    """The peak of this process counts from now on, without memory that glibc keeps after it was freed."""
    ctypes.CDLL(None).malloc_trim(0)
    forget_peak_of(os.getpid())


def forget_peak_of(pid: int) -> None:
    """The peak of a process of this user counts from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc_pid_clear_refs(5)


def pss_mb(pid: int) -> float:
    """Resident memory, where a page that n processes share counts 1/n."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) / 1024


def threads(pid: int) -> int:
    return _status(pid, "Threads")


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
    import psutil

    found: dict[str, list[int]] = {"vLLM": [], "trainer": []}
    for child in psutil.Process(launcher).children(recursive=True):
        command = child.cmdline()
        if any(word.startswith(("vllm.", "VLLM::")) for word in command):
            found["vLLM"].append(child.pid)
        elif PARTS["engine"] in command:
            found["trainer"].append(child.pid)
    return found


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
