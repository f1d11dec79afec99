"""What the kernel and `/metrics` count of an API process. Each is a sum since the process began."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from signal import SIGINT

import httpx

from benchmarks.processes import TICKS_PER_S
from skyrl.cli.demo.server import DemoServer

POLLS, COLLECTIONS = "polls", "garbage collections"
METRICS_S = 600.0
"""How long `/metrics` may take: long under valgrind."""

Counts = dict[str, float]
"""Numbers by the name of a figure."""


def of_kernel(pid: int) -> Counts:
    """CPU in user mode and in the kernel (ms), page faults, and context switches of all threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    user, kernel = (int(field) * 1e3 / TICKS_PER_S for field in fields[11:13])
    waits = preempted = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            lines = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            waits += int(lines["voluntary_ctxt_switches"])
            preempted += int(lines["nonvoluntary_ctxt_switches"])
    faults = int(fields[7])
    return {"user ms": user, "kernel ms": kernel, "page faults": faults, "waits": waits, "preemptions": preempted}


def of_metrics(server: DemoServer) -> Counts:
    """The garbage collections of the API process, and the polls that it has answered, so far."""
    text = httpx.get(f"{server.url}/metrics", timeout=METRICS_S, trust_env=False).text
    names = {COLLECTIONS: "python_gc_collections_total", POLLS: "skyrl_http_requests_total"}
    wanted = {COLLECTIONS: 'process="api-0"', POLLS: 'route="/api/v1/retrieve_future"'}
    return {
        figure: sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith(name) and wanted[figure] in line
        )
        for figure, name in names.items()
    }


def count_system_calls(pid: int) -> Callable[[], Counts]:
    """Count the process's system calls with perf until the returned function is called. Without perf, or without the
    right to use it, there is no count."""
    event = "raw_syscalls:sys_enter"
    if shutil.which("perf") is None:
        return dict
    counting = subprocess.Popen(
        ["perf", "stat", "-x", ";", "-e", event, "-p", str(pid)], stderr=subprocess.PIPE, text=True
    )

    def end() -> Counts:
        counting.send_signal(SIGINT)
        _, text = counting.communicate(timeout=60)
        found = re.search(rf"^(\d+);.*{event}", text, re.M)
        return {} if found is None else {"system calls": float(found[1])}

    return end
