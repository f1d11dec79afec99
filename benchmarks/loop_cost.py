"""What a forwarded sample costs the event loop of the API process, without sockets: this checkout and others, in turns.

Usage: python -m benchmarks.loop_cost [/path/to/other/checkout ...] [--rounds 30] [--in-flight 64]

For changes of a few percent, also on a busy machine. Each checkout is a process with the real HTTP table, connections,
forwarding client and SQLite file (`benchmarks.loop_process`); clients and vLLM are functions in the same process. A
round sends 1,500 samples through each and reads the CPU time of the loop's thread. The kernel's part of sockets is
missing: `benchmarks.flat` measures whole servers.

Prints the median of the rounds, and the median of the rounds' ratios to the last checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

WARM_UP = 2


class Loop:
    """The process of one checkout. It runs a round for each line that it reads, and answers with µs per sample."""

    def __init__(self, checkout: Path, in_flight: int) -> None:
        program = Path(__file__).with_name("loop_process.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program), str(in_flight)],  # -P: modules come from the checkout
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("round", file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop_cost", description=__doc__)
    parser.add_argument("others", nargs="*", type=Path, help="checkouts of other commits")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--in-flight", type=int, default=64)
    options = parser.parse_args()
    checkouts = [Path.cwd(), *options.others]
    loops = [Loop(checkout, options.in_flight) for checkout in checkouts]
    found: list[list[float]] = [[] for _ in loops]
    for number in range(WARM_UP + options.rounds):
        turns = list(enumerate(loops)) if number % 2 else list(enumerate(loops))[::-1]
        for place, loop in turns:
            microseconds = loop.round()
            if number >= WARM_UP:
                found[place].append(microseconds)
    for loop in loops:
        loop.close()
    print("| checkout | µs of the loop per sample | ratio to the last |\n|---|---|---|")
    for checkout, rounds in zip(checkouts, found, strict=True):
        ratio = median(mine / last for mine, last in zip(rounds, found[-1], strict=True))
        print(f"| {checkout.name} | {median(rounds):.0f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
