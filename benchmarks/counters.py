"""What a forwarded sample costs the API process in counts instead of seconds, at each number of samples in flight.

Seconds depend on what else runs on the machine and on how far a cache reaches. Counts tell apart what may grow:
instructions (more work), misses of a cache (the same work on more memory), page faults, system calls and context
switches (the kernel), garbage collections.

Two servers get the same loads. The first runs as always, and the kernel counts (`Native`). The second runs under
valgrind's callgrind, which executes every instruction of the process itself and simulates a cache (`Simulated`). It
needs no counters of the processor, which a virtual machine often hides, but takes some 60 ms a sample. So it counts no
more than SIMULATED_AT_MOST in flight: beyond, a sample takes longer than the API holds a poll, and is asked for again.
What the server does without samples is measured first, and taken off.

A window lasts until the upstream has got some multiple of the samples in flight, so that the samples that are half
done at its begin cost as much as those at its end.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from signal import SIGINT

import httpx

from benchmarks.processes import TICKS_PER_S, parts_of, resident_mb
from benchmarks.samples import MODEL, LoadSpec
from benchmarks.stage import NullUpstream
from benchmarks.table import aligned, number
from skyrl.cli.demo.server import DemoServer

NATIVE_SAMPLES, SIMULATED_SAMPLES = 20_000, 512
"""A window has at least so many samples, and at least one for each in flight."""
SIMULATED_AT_MOST = 512
WITHOUT_SAMPLES_S = 10.0
LONGEST_S = 600.0
CACHES = ("--I1=32768,8,64", "--D1=49152,12,64", "--LL=1048576,16,64")
"""Bytes, ways and bytes of a line of the simulated caches. The last is the second level of an AMD EPYC of 2024: each
core has its own, so it is the largest that other programs on the machine do not share."""
RESIDENT = "resident MB"
EVENTS = {
    "instructions": ("Ir",),
    "misses of 48 kB": ("D1mr", "D1mw"),
    "misses of 1 MB, data": ("DLmr", "DLmw"),
    "misses of 1 MB, code": ("ILmr",),
}
"""Figures of a sample, and callgrind's events that make up each."""

Counts = dict[str, float]


class Native:
    """The kernel's counts of a process that runs as always."""

    command: Sequence[str] = (sys.executable, "-m", "skyrl.cli.main")
    least_samples = NATIVE_SAMPLES
    at_most = sys.maxsize

    def prepare(self, server: DemoServer) -> None:
        """Called before the first load."""

    def begin(self, server: DemoServer) -> Callable[[], Counts]:
        """Begin to count. The returned function ends that, and has the counts of the window."""
        pid = parts_of(server.pid)["api"]
        calls = _count_system_calls(pid)
        before = _of_kernel(pid) | _collections(server)

        def end() -> Counts:
            after = _of_kernel(pid) | _collections(server)
            counts = {name: after[name] - before[name] for name in before}
            return counts | calls() | {RESIDENT: resident_mb(pid)}

        return end


class Simulated:
    """The instructions and the misses of simulated caches of a process under callgrind."""

    least_samples = SIMULATED_SAMPLES
    at_most = SIMULATED_AT_MOST

    def __init__(self, directory: Path) -> None:
        """Callgrind's files are written to `directory`. Raises SystemExit without valgrind."""
        if shutil.which("valgrind") is None:
            raise SystemExit("--counters needs valgrind, which is not installed")
        self._directory = directory
        tool = ("valgrind", "--tool=callgrind", "--trace-children=yes", "--instr-atstart=no", "--cache-sim=yes")
        files = (f"--callgrind-out-file={directory}/of.%p", f"--vgdb-prefix={directory}/vgdb")
        self.command = (*tool, *CACHES, *files, *Native.command)
        self._per_second: Counts = dict.fromkeys(EVENTS, 0.0)
        """What the server does without samples."""

    def prepare(self, server: DemoServer) -> None:
        end = self.begin(server)
        time.sleep(WITHOUT_SAMPLES_S)
        self._per_second = {name: value / WITHOUT_SAMPLES_S for name, value in end().items()}

    def begin(self, server: DemoServer) -> Callable[[], Counts]:
        """As in `Native`."""
        pid = parts_of(server.pid)["api"]
        known = set(self._dumps(pid))
        self._control(pid, "--instr=on")
        time.sleep(2.0)  # the caches begin empty
        self._control(pid, "--zero")
        began = time.monotonic()

        def end() -> Counts:
            self._control(pid, "--dump")
            seconds = time.monotonic() - began
            deadline = time.monotonic() + LONGEST_S
            while not (new := set(self._dumps(pid)) - known) or not (events := _events(new.pop())):
                if time.monotonic() > deadline:
                    raise TimeoutError("callgrind wrote no counts")
                time.sleep(0.1)
            self._control(pid, "--instr=off")
            sums = {name: sum(events[event] for event in of) for name, of in EVENTS.items()}
            return {name: value - seconds * self._per_second[name] for name, value in sums.items()}

        return end

    def _dumps(self, pid: int) -> list[Path]:
        return list(self._directory.glob(f"of.{pid}.*"))

    def _control(self, pid: int, order: str) -> None:
        command = ["callgrind_control", f"--vgdb-prefix={self._directory}/vgdb", order, str(pid)]
        subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_S)


def _events(dump: Path) -> dict[str, int]:
    """The sums of a file of callgrind by event; empty while it is being written."""
    text = dump.read_text(errors="replace")
    names, sums = re.search(r"^events: (.*)$", text, re.M), re.search(r"^totals: (.*)$", text, re.M)
    if names is None or sums is None:
        return {}
    return dict(zip(names[1].split(), map(int, sums[1].split()), strict=True))


def _of_kernel(pid: int) -> Counts:
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


def _collections(server: DemoServer) -> Counts:
    """The garbage collections of the API process so far."""
    text = httpx.get(f"{server.url}/metrics", timeout=60, trust_env=False).text
    counts = re.findall(r"^python_gc_collections_total\{[^}]*\} ([0-9.e+]+)$", text, re.M)
    return {"garbage collections": sum(map(float, counts))}


def _count_system_calls(pid: int) -> Callable[[], Counts]:
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


def _in_window(upstream: NullUpstream, server: DemoServer, in_flight: int, way: Native | Simulated) -> Counts:
    """The counts of one sample, with so many in flight."""
    spec = LoadSpec(server.url, "tinker", in_flight, LONGEST_S)
    load = subprocess.Popen([sys.executable, "-m", "benchmarks.load", json.dumps(asdict(spec))])
    waves = -(-way.least_samples // in_flight)
    try:
        _answer(upstream, in_flight + way.least_samples // 2)
        end = way.begin(server)
        first = _answer(upstream, 0)
        _answer(upstream, waves * in_flight)
        counts = end()
        samples = _answer(upstream, 0) - first
    finally:
        load.terminate()
        load.wait()
    return {name: value if name == RESIDENT else value / samples for name, value in counts.items()}


def _answer(upstream: NullUpstream, more: int) -> int:
    """Wait until the upstream has got so many more requests; returns the number of its requests so far. Raises
    TimeoutError after LONGEST_S."""
    began = requests = upstream.control("")["requests"]
    deadline = time.monotonic() + LONGEST_S
    while requests < began + more:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{requests - began} samples in {LONGEST_S:.0f} s")
        time.sleep(0.01)
        requests = upstream.control("")["requests"]
    return requests


@contextmanager
def _gateway(upstream: NullUpstream, command: Sequence[str]) -> Generator[DemoServer]:
    flags = ("--backend", "none", "--base-model", MODEL, "--external-inference-url", upstream.url)
    with tempfile.TemporaryDirectory() as state:
        server = DemoServer(Path(state), *flags, skyrl=command)
        server.start()
        try:
            server.wait_api(LONGEST_S)
            yield server
        finally:
            server.stop()


def count(in_flight: Sequence[int]) -> dict[int, Counts]:
    """The counts of one sample at each number in flight."""
    found: dict[int, Counts] = {at: {} for at in in_flight}
    with NullUpstream() as upstream, tempfile.TemporaryDirectory() as directory:
        for way in (Native(), Simulated(Path(directory))):
            with _gateway(upstream, way.command) as server:
                way.prepare(server)
                for at in [at for at in in_flight if at <= way.at_most]:
                    found[at] |= _in_window(upstream, server, at, way)
                    print(f"{type(way).__name__.lower()}, {at:,} in flight: counted", flush=True)
    return found


def text(found: Mapping[int, Counts]) -> str:
    """A line for each figure: its value at each number in flight, then the same over the first."""
    first = next(iter(found.values()))
    header = ["of a sample", *(f"{at:,}" for at in found), *(f"{at:,} / first" for at in list(found)[1:])]
    rows = []
    for name, base in first.items():
        values = [counts.get(name) for counts in found.values()]
        ratios = [number(value / base) if value is not None and base else "" for value in values[1:]]
        rows.append([name, *(number(value) for value in values), *ratios])
    return aligned([header, *rows])
