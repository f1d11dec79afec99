"""What Ray costs a server on one machine: the time until it is ready, its memory, and the time of a sample.

    .venv/bin/python -m benchmarks.ray_start [runs]

Starts the server in turns without Ray and with `--ray-address local`, and prints a table with the ratios. Short samples
run one after another, so that the share of the router shows: without Ray one vLLM has none. Memory is the PSS of all
processes of the server.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import tinker
from tinker import types

from skyrl.cli.demo.server import DemoServer

SAMPLES = 60
MODES = {"without Ray": (), "Ray, local": ("--ray-address", "local")}


@dataclass(frozen=True)
class Measured:
    ready_s: float
    pss_mb: float
    sample_ms: float


def measure(flags: tuple[str, ...]) -> Measured:
    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as directory:
        server = DemoServer(Path(directory) / "state", *flags)
        server.start()
        try:
            ready_s = server.wait_ready(300.0)
            with tinker.ServiceClient(base_url=server.url, api_key="tml-bench") as client:
                sampler = client.create_sampling_client(base_model="tiny").result()
                times = [_seconds(sampler) for _ in range(SAMPLES)]
            return Measured(ready_s, _pss_mb(server.pid), 1000 * statistics.median(times))
        finally:
            server.stop()


def _seconds(sampler: tinker.SamplingClient) -> float:
    began = time.monotonic()
    params = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
    sampler.sample(types.ModelInput.from_ints([5, 6, 7, 8]), 1, params).result()
    return time.monotonic() - began


def _pss_mb(pid: int) -> float:
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 2**20


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    found: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    for _ in range(runs):
        for mode, flags in MODES.items():
            found[mode].append(measure(flags))
    rows = {
        mode: [statistics.median(getattr(each, name) for each in measured) for name in Measured.__annotations__]
        for mode, measured in found.items()
    }
    print("| server | ready after | memory (PSS) | a sample of 4 tokens |\n|---|---|---|---|")
    for mode, (ready_s, pss_mb, sample_ms) in rows.items():
        print(f"| {mode} | {ready_s:.1f} s | {pss_mb:.0f} MB | {sample_ms:.1f} ms |")
    ratios = [after / before for before, after in zip(*rows.values(), strict=True)]
    print("| ratio | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


if __name__ == "__main__":
    main()
