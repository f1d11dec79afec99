"""What a catalogue of many adapters costs: start-up, lists, the status page, resolving, sampling, and cleaning up.

    python -m benchmarks.catalogue [--versions 100000] [--databases sqlite] [--against COMMIT] [--quick]
                                   [--out FILE]

A real server with an engine (the tiny model) in front of the null upstream, with 100 versions of one tenant, and with
`--versions` of many tenants (`catalogue_rows.py`). The calls are those of one tenant, which has the same 100 versions
in both (`catalogue_calls.py`). With `--against` each measurement is also made on a server of that commit. All servers
run at the same time, and their calls take turns: one that is measured minutes after another one differs by a fifth from
it with the same catalogue. Samples run first on a quiet server, then while 50,000 things are deleted. `ratio` is the
median over calls, each beside that of the same round.

Knows the processes of a server and how one is filled. PostgreSQL is the one of the tests, without fsync.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks import program
from benchmarks.catalogue_calls import READS, calls, sample
from benchmarks.machine import ROOT
from benchmarks.processes import cpu_seconds, parts_of, resident_mb
from benchmarks.stage import NullUpstream
from benchmarks.table import aligned, number
from skyrl.cli.demo.server import DemoServer
from tests.postgres_server import PostgresServer

FEW, OLD = 100, 50_000
IDLE_S = 11.0
"""Each sweep, of rows and of files, runs once in this time."""
CLEANING_S = 14.0


@dataclass
class Side:
    """A server of one build with one catalogue."""

    root: Path
    state: Path
    url: str
    versions: int

    def fill(self, *flags: str) -> None:
        program = ("-P", str(ROOT / "benchmarks/catalogue_rows.py"), self.url, str(self.state), str(self.versions))
        subprocess.run([sys.executable, *program, *flags], check=True, env=self._environment)

    @property
    def _environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.root)}

    def start(self, upstream: NullUpstream, stack: ExitStack) -> dict[str, float]:
        """Times in s; processor time in s."""
        config = self.state / "config.toml"
        config.write_text("session_timeout_s = 86400\n")
        flags = ("--config", str(config), "--database-url", self.url, "--external-inference-url", upstream.url)
        began = time.perf_counter()
        upgrade = ("-m", "skyrl.cli.main", "db", "upgrade", "--database-url", self.url)
        command = [sys.executable, *upgrade]
        subprocess.run(command, check=True, cwd=self.root, env=self._environment, stdout=subprocess.DEVNULL)
        found = {"upgrade of the schema (s)": time.perf_counter() - began}
        os.sync()  # 200,000 new directories
        self.server = DemoServer(self.state, *flags, cwd=self.root, environment=self._environment)
        stack.callback(self.server.stop)
        self.server.start()
        found |= {"start: API answers (s)": self.server.wait_api(), "start: engine ready (s)": self.server.wait_ready()}
        self.pids = parts_of(self.server.pid)
        return found | {f"start: {name} (s of CPU)": cpu_seconds(pid) for name, pid in self.pids.items()}

    def load(self, quick: bool) -> dict[str, float]:
        """Times of samples in ms; memory in MB; processor time in cores."""
        found = {"memory of the API (MB)": resident_mb(self.pids["api"])}
        found |= _named("sample", asyncio.run(sample(self.server.url, 2.0 if quick else 4.0)))
        before = {name: cpu_seconds(pid) for name, pid in self.pids.items()}
        time.sleep(IDLE_S)
        for name, pid in self.pids.items():
            found[f"{name} without requests (cores)"] = (cpu_seconds(pid) - before[name]) / IDLE_S
        if self.versions > FEW:
            self.fill("--old", str(OLD))
            found |= _named("sample while cleaning", asyncio.run(sample(self.server.url, CLEANING_S)))
        return found


def _compared(sides: Mapping[str, Side], builds: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """The median of each call on each server, and of the ratios of the larger catalogue to the smaller one."""
    servers = {name: (side.server.url, side.pids["api"]) for name, side in sides.items()}
    asyncio.run(calls(servers, 3))  # warms up
    took = asyncio.run(calls(servers, rounds))
    found = {name: {call: median(each) for call, each in of.items()} for name, of in took.items()}
    for build in builds:
        few, many = (took[name] for name, side in sides.items() if name.startswith(f"{build}, "))
        found[f"{build}, ratio"] = {
            call: median(map(truediv, many[call], few[call])) for call in few if not call.endswith(READS)
        }
    return found


def _named(what: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{what}: {name}": value for name, value in values.items()}


def _table(found: Mapping[str, Mapping[str, float]]) -> str:
    """A line for each measured thing, a column for each build and catalogue."""
    names = list(dict.fromkeys(name for values in found.values() for name in values))
    lines = [[name, *(number(values.get(name)) for values in found.values())] for name in names]
    return aligned([["", *found], *lines])


def _bytes_a_version(found: Mapping[str, Mapping[str, float]], builds: list[str], versions: int) -> str:
    of = "memory of the API (MB)"
    grown = {build: found[f"{build}, {versions}"][of] - found[f"{build}, {FEW}"][of] for build in builds}
    each = {build: f"{build} {2**20 * more / (versions - FEW):.0f}" for build, more in grown.items()}
    return f"memory of the API, bytes a version: {', '.join(each.values())}"


def main() -> None:
    parser = program.parser("catalogue", __doc__)
    parser.add_argument("--versions", type=int, default=100_000)
    parser.add_argument("--databases", nargs="+", choices=("sqlite", "postgres"), default=["sqlite"])
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="skyrl-catalogue-")))
        roots = {"now": ROOT}
        if options.against:
            roots = {options.against: program.taken_out(options.against, directory / "before")} | roots
        upstream = stack.enter_context(NullUpstream())
        for kind in options.databases:
            found = results[kind] = _compare(kind, roots, directory / kind, upstream, options)
            print(f"{kind}\n{_table(found)}\n{_bytes_a_version(found, [*roots], options.versions)}\n")
    if options.out:
        program.write(options.out, results)


def _compare(
    kind: str, roots: Mapping[str, Path], directory: Path, upstream: NullUpstream, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """The oldest build's schema is filled. Another build gets a copy, which it brings to its own schema."""
    sides: dict[str, Side] = {}
    with ExitStack() as stack:
        postgres = None
        if kind == "postgres":
            postgres = PostgresServer()
            stack.callback(postgres.remove)
            postgres.start()
        for versions in (FEW, options.versions):
            first: Side | None = None
            for build, root in roots.items():
                state = directory / f"{build}-{versions}"
                url = f"sqlite:///{state / 'skyrl.db'}"
                if postgres is not None:
                    url = postgres.url(postgres.new_database(first.url.rpartition("/")[2] if first else "template1"))
                sides[f"{build}, {versions}"] = side = Side(root, state, url, versions)
                if first is None:
                    side.fill()
                    first = side
                else:
                    subprocess.run(["cp", "-a", first.state, state], check=True)  # 200,000 directories
        found = {name: side.start(upstream, stack) for name, side in sides.items()}
        for name, measured in _compared(sides, [*roots], 60 if options.quick else 200).items():
            found[name] = found.get(name, {}) | measured
        for name, side in sides.items():
            found[name] |= side.load(options.quick)
            print(f"{kind}, {name}: {found[name]}", file=sys.stderr)
    subprocess.run(["rm", "-rf", directory], check=True)
    return found


if __name__ == "__main__":
    main()
