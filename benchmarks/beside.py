"""What a change costs the forwarding path: the API's CPU per sample in this tree and in another checkout, in turns.

Usage: python -m benchmarks.beside /path/to/other/checkout [--starts 8] [--rounds 16]

Both servers run in front of one null upstream, and get the same number of samples in turns. So a busy machine slows
both. Two processes of the same code differ by some 5 % for as long as they live, so both are started anew `--starts`
times. The ratio is the median of the starts' ratios; `ratios` shows how much to trust it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from pathlib import Path
from statistics import median

from benchmarks.processes import cpu_seconds, parts_of
from benchmarks.samples import LoadSpec, TinkerSamples
from benchmarks.stage import NullUpstream, gateway
from skyrl.cli.demo.server import DemoServer

IN_FLIGHT = 64
SAMPLES = 1_500
WARM_UP = 2_000
SDK_HEADERS = "".join(
    f"{line}\r\n"
    for line in (
        "Accept-Encoding: gzip, deflate",
        "Connection: keep-alive",
        "User-Agent: AsyncTinker/Python 0.38.0",
        "X-Stainless-Lang: python",
        "X-Stainless-Package-Version: 0.38.0",
        "X-Stainless-OS: Linux",
        "X-Stainless-Arch: x64",
        "X-Stainless-Runtime: CPython",
        "X-Stainless-Runtime-Version: 3.11.7",
        "X-Stainless-Async: async:asyncio",
        "X-Stainless-Retry-Count: 0",
        "X-Stainless-Read-Timeout: 45",
    )
)
"""What the SDK sends besides the headers of every load."""


class Side:
    """One server, and the samples that are sent to it."""

    def __init__(self, server: DemoServer) -> None:
        self._pid = parts_of(server.pid)["api"]
        self._samples = TinkerSamples(LoadSpec(server.url, "tinker", IN_FLIGHT, seconds=0, headers=SDK_HEADERS))
        self._sent = 0

    async def open(self) -> None:
        await self._samples.open()
        await self.spend(WARM_UP)

    async def spend(self, samples: int) -> float:
        """CPU milliseconds of the API process for one of so many samples. Raises RuntimeError for a wrong answer."""
        connection = self._samples.connect()
        await self._samples.heartbeat(connection)
        connection.close()
        numbers = iter(range(self._sent, self._sent + samples))
        self._sent += samples
        before = cpu_seconds(self._pid)
        await asyncio.gather(*(self._worker(numbers) for _ in range(IN_FLIGHT)))
        return (cpu_seconds(self._pid) - before) / samples * 1e3

    async def _worker(self, numbers: object) -> None:
        connection = self._samples.connect()
        for number in numbers:  # type: ignore[attr-defined]
            if (problem := await self._samples.sample(connection, number)) is not None:
                raise RuntimeError(problem)
        connection.close()


async def measure(here: Side, other: Side, rounds: int) -> list[tuple[float, float]]:
    await here.open()
    await other.open()
    spent: list[tuple[float, float]] = []
    for number in range(rounds):  # the first of a pair alternates: the second finds warmer caches
        if number % 2:
            spent.append((await here.spend(SAMPLES), await other.spend(SAMPLES)))
        else:
            second = await other.spend(SAMPLES)
            spent.append((await here.spend(SAMPLES), second))
    return spent


def start(upstream: str, checkout: Path, rounds: int, *, other_first: bool) -> list[tuple[float, float]]:
    """One start of both servers: what each round cost here and there."""
    servers: dict[Path, DemoServer] = {}
    with contextlib.ExitStack() as running:
        for directory in (checkout, Path.cwd()) if other_first else (Path.cwd(), checkout):
            with contextlib.chdir(directory):  # `python -m` takes the package from the working directory
                servers[directory] = running.enter_context(gateway(upstream))
        return asyncio.run(measure(Side(servers[Path.cwd()]), Side(servers[checkout]), rounds))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=16)
    options = parser.parse_args()
    with NullUpstream() as upstream:
        starts = [
            start(upstream.url, options.other, options.rounds, other_first=bool(number % 2))
            for number in range(options.starts)
        ]
    ratios = [median(ours / theirs for ours, theirs in spent) for spent in starts]
    found = {
        "starts": options.starts,
        "rounds": options.rounds,
        "samples_per_round": SAMPLES,
        "here_ms": round(median(ours for spent in starts for ours, _ in spent), 4),
        "other_ms": round(median(theirs for spent in starts for _, theirs in spent), 4),
        "ratio": round(median(ratios), 4),
        "ratios": sorted(round(ratio, 3) for ratio in ratios),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
