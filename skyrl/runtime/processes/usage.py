"""What processes of this machine use, as Linux reports it: memory, peaks of memory, CPU time, and who started whom.

Knows /proc. Does not know what the processes are.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)")
"""The first line of a mapping in smaps; the group is the file's path, or empty."""


def cpu_seconds(pid: int) -> float:
    """User and system CPU time of all threads of a process."""
    return cpu_of(Path(f"/proc/{pid}/stat"))


def cpu_of(stat: Path) -> float:
    """The same of the process or thread that this file is of."""
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def status_of(pid: int, key: str) -> int:
    """A number of /proc/PID/status; sizes are in kB. Raises KeyError."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise KeyError(key)


def resident_bytes(pid: int) -> int:
    return 1024 * status_of(pid, "VmRSS")


def peak_resident_bytes(pid: int) -> int:
    """The largest resident memory of the process since its start, or since `forget_peak_of`."""
    return 1024 * status_of(pid, "VmHWM")


def forget_peak_of(pid: int) -> None:
    """The peak of a process of this user counts from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc_pid_clear_refs(5)


def shared_bytes(pids: Collection[int]) -> dict[int, float]:
    """The resident memory of each of these processes, where what n of them share counts 1/n. The kernel's own sum of
    this kind (PSS) also divides the pages of files by processes that are none of these: beside another program that has
    loaded torch, a vLLM seems 200 MB smaller. A process that has ended has 0."""
    files = {pid: _files_of(pid) for pid in pids}
    users = Counter(path for of_process in files.values() for path in of_process)
    return {
        pid: _anonymous(pid) + sum(size / users[path] for path, size in files[pid].items() if users[path])
        for pid in pids
    }


def _lines(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _anonymous(pid: int) -> int:
    lines = _lines(pid, "smaps_rollup")
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))


def _files_of(pid: int) -> dict[str, int]:
    """The resident bytes of files, by path, without those that the process has changed for itself."""
    found: defaultdict[str, int] = defaultdict(int)
    path = ""
    for line in _lines(pid, "smaps"):
        if (mapping := _MAPPING.fullmatch(line)) is not None:
            path = mapping[1]
        elif line.startswith("Rss:"):
            found[path] += 1024 * int(line.split()[1])
        elif line.startswith("Anonymous:"):
            found[path] -= 1024 * int(line.split()[1])
    return {path: size for path, size in found.items() if size > 0}


def command_of(pid: int) -> list[str]:
    """The words of its command line; empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def descendants_of(pid: int) -> list[int]:
    """The processes that this one has started, and those that they have started, and so on."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        children[parent].append(int(stat.parent.name))
    found, rest = [], [pid]
    while rest:
        rest += (started := children[rest.pop()])
        found += started
    return found


ENGINE = "skyrl.engine.main"


def parts_of_server(launcher: int) -> dict[str, list[int]]:
    """The processes of a server: "vLLM", "trainer" (the engine), and "server" for the launcher and the others."""
    found: dict[str, list[int]] = {"trainer": [], "vLLM": [], "server": [launcher]}
    for pid in descendants_of(launcher):
        command = command_of(pid)
        if any(word.startswith(("vllm.", "VLLM::")) for word in command):
            found["vLLM"].append(pid)
        elif ENGINE in command:
            found["trainer"].append(pid)
        elif any(command):
            found["server"].append(pid)
    return found
