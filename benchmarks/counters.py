"""What a forwarded sample costs the API process in counts instead of seconds, at each number of samples in flight.

Seconds depend on what else runs on the machine and on how far a cache reaches. Counts tell apart what may grow:
instructions (more work), misses of a cache (the same work on more memory), page faults, system calls and context
switches (the kernel), garbage collections.

The kernel counts for a server that runs as always (`Native`). A second server runs under valgrind's callgrind, which
executes every instruction of the process itself and simulates a cache (`Simulated`). It needs no counters of the
processor, which a virtual machine often hides, but takes some 60 ms a sample. So it gets fewer samples in flight:
beyond a few hundred a sample takes longer than the API holds a poll. More than one poll a sample says that the machine
was too busy. What the server does every second without samples is in the counts: compare them, as the real ones are
lower.

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
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.process_counts import POLLS, Counts, count_system_calls, of_kernel, of_metrics
from benchmarks.processes import parts_of, resident_mb
from benchmarks.samples import MODEL, LoadSpec
from benchmarks.stage import NullUpstream
from benchmarks.table import aligned, number
from skyrl.cli.demo.server import DemoServer

NATIVE_SAMPLES, SIMULATED_SAMPLES = 20_000, 512
"""A window has at least so many samples, and at least one for each in flight."""
SIMULATED_IN_FLIGHT = (64, 256)
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


class Native:
    """The kernel's counts of a process that runs as always."""

    command: Sequence[str] = (sys.executable, "-m", "skyrl.cli.main")
    least_samples = NATIVE_SAMPLES

    def begin(self, server: DemoServer) -> Callable[[], Counts]:
        """Begin to count. The returned function ends that, and has the counts of the window."""
        pid = parts_of(server.pid)["api"]
        calls = count_system_calls(pid)
        before = of_kernel(pid) | of_metrics(server)

        def end() -> Counts:
            after = of_kernel(pid) | of_metrics(server)
            counts = {name: after[name] - before[name] for name in before}
            return counts | calls() | {RESIDENT: resident_mb(pid)}

        return end


class Simulated:
    """The instructions and the misses of simulated caches of a process under callgrind."""

    least_samples = SIMULATED_SAMPLES

    def __init__(self, directory: Path) -> None:
        """Callgrind's files are written to `directory`. Raises SystemExit without valgrind."""
        if shutil.which("valgrind") is None:
            raise SystemExit("--counters needs valgrind, which is not installed")
        self._directory = directory
        tool = ("valgrind", "--tool=callgrind", "--trace-children=yes", "--instr-atstart=no", "--cache-sim=yes")
        files = (f"--callgrind-out-file={directory}/of.%p", f"--vgdb-prefix={directory}/vgdb")
        self.command = (*tool, *CACHES, *files, *Native.command)

    def begin(self, server: DemoServer) -> Callable[[], Counts]:
        """As in `Native`."""
        pid = parts_of(server.pid)["api"]
        known = set(self._dumps(pid))
        self._control(pid, "--instr=on")
        time.sleep(2.0)  # the caches begin empty
        before = of_metrics(server)
        self._control(pid, "--zero")

        def end() -> Counts:
            self._control(pid, "--dump")
            deadline = time.monotonic() + LONGEST_S
            while not (new := set(self._dumps(pid)) - known) or not (events := _events(new.pop())):
                if time.monotonic() > deadline:
                    raise TimeoutError("callgrind wrote no counts")
                time.sleep(0.1)
            self._control(pid, "--instr=off")
            counts = {name: float(sum(events[event] for event in of)) for name, of in EVENTS.items()}
            return counts | {POLLS: of_metrics(server)[POLLS] - before[POLLS]}

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


def count(in_flight: Sequence[int]) -> dict[str, dict[int, Counts]]:
    """The counts of one sample at each number in flight, by the kernel and simulated."""
    found: dict[str, dict[int, Counts]] = {}
    with NullUpstream() as upstream, tempfile.TemporaryDirectory() as directory:
        for way, numbers in ((Native(), in_flight), (Simulated(Path(directory)), SIMULATED_IN_FLIGHT)):
            name = type(way).__name__.lower()
            with _gateway(upstream, way.command) as server:
                found[name] = {at: _in_window(upstream, server, at, way) for at in numbers}
            print(f"{name}: counted", flush=True)
    return found


def text(found: Mapping[str, Mapping[int, Counts]]) -> str:
    return "\n\n".join(_table(name, counts) for name, counts in found.items())


def _table(name: str, found: Mapping[int, Counts]) -> str:
    """A line for each figure: its value at each number in flight, then the same over the first."""
    first = next(iter(found.values()))
    header = [f"of a sample, {name}", *(f"{at:,}" for at in found), *(f"{at:,} / first" for at in list(found)[1:])]
    rows = []
    for figure, base in first.items():
        values = [counts[figure] for counts in found.values()]
        ratios = [number(value / base) if base else "" for value in values[1:]]
        rows.append([figure, *(number(value) for value in values), *ratios])
    return aligned([header, *rows])
