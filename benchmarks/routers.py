"""Compares routers in front of the same two null upstreams: skyrl's, vllm-router, sglang-router, and none.

All run in turns, several rounds in one run; the table has medians over the rounds. Five processes on the machine at
once: two upstreams, one generator, and all three routers, of which one works.

Usage: python -m benchmarks.routers [--seconds 2] [--rounds 5] [--in-flight 1 64 512] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.processes import cpu_seconds, resident_mb
from skyrl.inference.placement import free_port

BODY = json.dumps({"model": "tiny", "prompt": "The quick brown fox jumps over the lazy dog. " * 13, "max_tokens": 64})
GENERATE = json.dumps(
    {"text": "The quick brown fox jumps over the lazy dog. " * 13, "sampling_params": {"max_new_tokens": 64}}
)


def _start(stack: ExitStack, *argv: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def _wait(url: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def routers(stack: ExitStack, workers: Sequence[str]) -> dict[str, tuple[str, str, int | None]]:
    """By name: the URL to load, the body, and the process id."""
    ports = [free_port() for _ in range(6)]
    python = sys.executable
    ours = _start(
        stack,
        python,
        "-m",
        "skyrl.cli.main",
        "router",
        "--port",
        str(ports[0]),
        "--policy",
        "round_robin",
        "--worker",
        *workers,
    )
    vllm = _start(
        stack,
        python,
        "-m",
        "vllm_router.launch_router",
        "--worker-urls",
        *workers,
        "--policy",
        "round_robin",
        "--port",
        str(ports[1]),
        "--host",
        "127.0.0.1",
        "--prometheus-port",
        str(ports[2]),
        "--log-level",
        "error",
    )
    sglang = _start(
        stack,
        python,
        "-m",
        "sglang_router.launch_router",
        "--worker-urls",
        *workers,
        "--policy",
        "round_robin",
        "--port",
        str(ports[3]),
        "--host",
        "127.0.0.1",
        "--prometheus-port",
        str(ports[4]),
        "--log-level",
        "error",
    )
    for port in (ports[0], ports[1], ports[3]):
        _wait(f"http://127.0.0.1:{port}/readiness")
    return {
        "direct": (f"{workers[0]}/v1/completions", BODY, None),
        "skyrl": (f"http://127.0.0.1:{ports[0]}/v1/completions", BODY, ours.pid),
        "vllm-router": (f"http://127.0.0.1:{ports[1]}/v1/completions", BODY, vllm.pid),
        "direct /generate": (f"{workers[0]}/generate", GENERATE, None),
        "skyrl /generate": (f"http://127.0.0.1:{ports[0]}/generate", GENERATE, ours.pid),
        "sglang-router /generate": (f"http://127.0.0.1:{ports[3]}/generate", GENERATE, sglang.pid),
    }


def load(url: str, body: str, in_flight: int, seconds: float) -> dict[str, float]:
    argv = [sys.executable, "-m", "benchmarks.router_load", url, str(in_flight), str(seconds), body]
    return json.loads(subprocess.run(argv, check=True, capture_output=True, timeout=seconds * 3 + 60).stdout)


def run(in_flight: Sequence[int], seconds: float, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with ExitStack() as stack:
        upstreams = [free_port(), free_port()]
        for port in upstreams:
            _start(stack, sys.executable, "-m", "benchmarks.null_upstream", str(port))
        workers = [f"http://127.0.0.1:{port}" for port in upstreams]
        for worker in workers:
            _wait(f"{worker}/health")
        targets = routers(stack, workers)
        for number in in_flight:
            taken: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
            for _ in range(rounds):
                for name, (url, body, pid) in targets.items():
                    before = cpu_seconds(pid) if pid is not None else 0.0
                    result = load(url, body, number, seconds)
                    if pid is not None:
                        # The router also works during the warm-up
                        spent = (cpu_seconds(pid) - before) / (result["per_s"] * seconds * 1.2) * 1e3
                        result |= {"cpu_s_per_1000": spent, "resident_mb": resident_mb(pid)}
                    taken[name].append(result)
            for name, results in taken.items():
                row: dict[str, Any] = {"router": name, "in_flight": number}
                for key in results[0]:
                    values = [result[key] for result in results]
                    row[key] = round(sum(values) if key == "errors" else statistics.median(values), 3)
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routers", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one window")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = run(options.in_flight, options.seconds, options.rounds)
    if options.out is not None:
        options.out.write_text(json.dumps({"facts": machine.facts(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
