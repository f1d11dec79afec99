"""Whether the cost of a forwarded sample grows with the samples in flight: CPU of the API process, throughput and
latency at 64, 512 and 2,048 in flight, and what is added to an upstream that takes 200 ms.

Usage: python -m benchmarks.flat [--against COMMIT] [--in-flight 64 512 2048] [--rounds 7] [--seconds 3] [--out FILE]

All servers run at once, in front of one null upstream, and get their loads in turns, so a machine that becomes slower
slows all cells. Each window begins and ends in the steady state, when a multiple of the samples in flight has ended
(`benchmarks.load`). The samples for the slow upstream begin evenly over its 200 ms.

The table has medians. `/ first` is the ratio to the first number in flight, the median of the rounds' ratios. Rounds in
which other programs took more than 0.3 cores are left out where enough others are left.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks import machine, program
from benchmarks.rows_forwarding import DELAY_MS, errors
from benchmarks.stage import NullUpstream, Stage, gateway
from benchmarks.table import aligned, number
from skyrl.cli.demo.server import DemoServer

IN_FLIGHT = (64, 512, 2048)
DELAYED_IN_FLIGHT = 512
DISTURBED_CORES = 0.3
LEAST_ROUNDS = 3
CPU, P50 = "server_cpu_s_per_1000", "p50_ms"
FIGURES = {
    "CPU s per 1,000": CPU,
    "samples/s": "samples_per_s",
    "p50 ms": P50,
    "p99 ms": "p99_ms",
    "generator s per 1,000": "generator_cpu_s_per_1000",
    "foreign cores": "foreign_cores",
}

Load = dict[str, Any]


def quiet(loads: Sequence[Load]) -> list[int]:
    """The rounds that other programs did not disturb; all if fewer than LEAST_ROUNDS are left."""
    undisturbed = [turn for turn, load in enumerate(loads) if load["foreign_cores"] <= DISTURBED_CORES]
    return undisturbed if len(undisturbed) >= LEAST_ROUNDS else list(range(len(loads)))


def line(loads: Sequence[Load], first: Sequence[Load]) -> dict[str, float]:
    """The medians of one server at one number of samples in flight, over the quiet rounds. `first`: the loads of the
    same rounds with the fewest samples in flight."""
    rounds = quiet(loads)
    both = [turn for turn in rounds if turn in quiet(first)] or rounds
    medians = {name: median(loads[turn][key] for turn in rounds) for name, key in FIGURES.items()}
    ratio = median(loads[turn][CPU] / first[turn][CPU] for turn in both)
    return medians | {"/ first": ratio, "rounds": len(rounds), "errors": sum(errors(load) for load in loads)}


class Comparison:
    """The servers and their loads so far."""

    def __init__(self, stage: Stage, servers: dict[str, DemoServer], window_s: float, in_flight: Sequence[int]) -> None:
        self._stage = stage
        self._servers = servers
        self._in_flight = in_flight
        self._window_s = window_s
        self.loads: defaultdict[tuple[str, int], list[Load]] = defaultdict(list)
        self.added_ms: defaultdict[str, list[float]] = defaultdict(list)

    def round(self, turn: int) -> None:
        """One load of each server at each number in flight. Every second round goes the other way: its later loads meet
        a larger database."""
        way = slice(None, None, 1 if turn % 2 == 0 else -1)
        names = list(self._servers)[way]
        for in_flight in self._in_flight[way]:
            for name in names:
                self.loads[name, in_flight].append(self._load(name, in_flight))
        with self._stage.upstream.delayed(DELAY_MS):
            direct = self._stage.direct("flat", DELAYED_IN_FLIGHT, spread_s=DELAY_MS / 1e3)
            for name in names:
                delayed = self._load(name, DELAYED_IN_FLIGHT, spread_s=DELAY_MS / 1e3)
                self.added_ms[name].append(delayed[P50] - direct[P50])

    def _load(self, name: str, in_flight: int, spread_s: float = 0.0) -> Load:
        server = self._servers[name]
        return self._stage.forwarded("flat", server, in_flight, seconds=self._window_s, spread_s=spread_s)

    def lines(self) -> dict[tuple[str, int], dict[str, float]]:
        """By server and number in flight."""
        both = ((name, at) for name in self._servers for at in self._in_flight)
        return {key: line(self.loads[key], self.loads[key[0], self._in_flight[0]]) for key in both}


def text(lines: Mapping[tuple[str, int], Mapping[str, float]]) -> str:
    header = ["server, in flight", *next(iter(lines.values()))]
    rows = [[f"{name}, {at:,}", *(number(value) for value in of.values())] for (name, at), of in lines.items()]
    return aligned([header, *rows])


def main() -> None:
    parser = program.parser("flat", __doc__, out="bench/flat.json", against=True)
    parser.add_argument("--in-flight", nargs="+", type=int, default=IN_FLIGHT, metavar="N")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    options = parser.parse_args()
    facts = machine.facts()
    with NullUpstream() as upstream, contextlib.ExitStack() as running:
        roots = program.builds(options.against, running)
        servers = {name: running.enter_context(gateway(upstream.url, root=root)) for name, root in roots.items()}
        stage = Stage(upstream, quick=False, calibration_s=facts["calibration_cpu_s"])
        comparison = Comparison(stage, servers, options.seconds, options.in_flight)
        for turn in range(options.rounds):
            comparison.round(turn)
            print(f"round {turn + 1} of {options.rounds}", flush=True)
    lines, added = comparison.lines(), {name: median(values) for name, values in comparison.added_ms.items()}
    print(text(lines))
    for name, value in added.items():
        print(f"{name}: p50 added at {DELAYED_IN_FLIGHT} in flight, upstream {DELAY_MS} ms: {value:.1f} ms")
    table = [{"server": name, "in_flight": at} | of for (name, at), of in lines.items()]
    program.write(options.out, {"facts": facts, "lines": table, "added_p50_ms": added, "raw": stage.raw})
    if any(of["errors"] for of in lines.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
