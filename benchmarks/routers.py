"""Rows about routers: skyrl's, vllm-router, sglang-router and none, in front of the same two null upstreams.

All run in turns, several rounds in one run; rows have medians over the rounds. All routers run all the time; at each
moment one of them works.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.processes import cpu_seconds, resident_mb
from benchmarks.stage import NullUpstream, Stage, wait_ready
from benchmarks.table import Row, Target
from skyrl.runtime.processes.ports import free_port

Result = dict[str, Any]
TEXT = "The quick brown fox jumps over the lazy dog. " * 13
BODY = json.dumps({"model": "tiny", "prompt": TEXT, "max_tokens": 64})
GENERATE = json.dumps({"text": TEXT, "sampling_params": {"max_new_tokens": 64}})


def _start(stack: ExitStack, *argv: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


@dataclass(frozen=True)
class Way:
    """What a load is sent to. `pid` is the router's process; None without a router."""

    url: str
    body: str
    pid: int | None = None


def routers(stack: ExitStack, workers: Sequence[str]) -> dict[str, Way]:
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
        wait_ready(f"http://127.0.0.1:{port}/readiness")
    ours_url, vllm_url, sglang_url = (f"http://127.0.0.1:{ports[at]}" for at in (0, 1, 3))
    return {
        "direct": Way(f"{workers[0]}/v1/completions", BODY),
        "skyrl": Way(f"{ours_url}/v1/completions", BODY, ours.pid),
        "vllm-router": Way(f"{vllm_url}/v1/completions", BODY, vllm.pid),
        "direct /generate": Way(f"{workers[0]}/generate", GENERATE),
        "skyrl /generate": Way(f"{ours_url}/generate", GENERATE, ours.pid),
        "sglang-router /generate": Way(f"{sglang_url}/generate", GENERATE, sglang.pid),
    }


@contextmanager
def upstreams_and_routers() -> Generator[dict[str, Way]]:
    with ExitStack() as stack:
        upstreams = [stack.enter_context(NullUpstream()) for _ in range(2)]
        yield routers(stack, [upstream.url for upstream in upstreams])


def measure(stage: Stage, row: str, in_flight: int, targets: dict[str, Way]) -> dict[str, Result]:
    """Medians over the rounds, by router; the number of errors is a sum."""
    seconds, rounds = (1.0, 3) if stage.quick else (1.5, 5)
    taken: dict[str, list[Result]] = {name: [] for name in targets}
    for _ in range(rounds):
        for name, target in targets.items():
            before = cpu_seconds(target.pid) if target.pid is not None else 0.0
            result = stage.generate(
                row, name, "benchmarks.router_load", target.url, str(in_flight), str(seconds), target.body
            )
            if target.pid is not None:
                result["cpu_s_per_1000"] = (cpu_seconds(target.pid) - before) / result["answers"] * 1e3
                result["resident_mb"] = resident_mb(target.pid)
            taken[name].append(result)
    return {name: _medians(results) for name, results in taken.items()}


def _medians(results: list[Result]) -> Result:
    numbers = [key for key, value in results[0].items() if isinstance(value, int | float)]
    return {
        key: sum(result[key] for result in results)
        if key == "errors"
        else statistics.median(result[key] for result in results)
        for key in numbers
    }


def _note(results: dict[str, Result]) -> str:
    parts = []
    for name in ("skyrl", "vllm-router", "skyrl /generate", "sglang-router /generate"):
        result = results[name]
        parts.append(
            f"{name}: {result['per_s']:,.0f}/s, p50 {result['p50_ms']:.2f}, p99 {result['p99_ms']:.1f} ms, "
            f"{result['cpu_s_per_1000']:.3f} CPU s per 1,000, {result['resident_mb']:.0f} MB"
        )
    return "; ".join(parts)


def compare_routers(stage: Stage) -> list[Row]:
    """ "direct" is vllm-router in these rows, for /generate sglang-router."""
    rows: list[Row] = []
    with upstreams_and_routers() as targets:
        one = measure(stage, "routers", 1, targets)
        ours, theirs = one["skyrl"]["p50_ms"], one["vllm-router"]["p50_ms"]
        what = "p50 above vllm-router's, 1 in flight (direct: vllm-router)"
        rows.append(Row("routers", what, "ms", ours - theirs, Target(0.1), theirs, None, _errors(one), _note(one)))
        for in_flight in (64, 512):
            many = measure(stage, "routers", in_flight, targets)
            for ours, theirs in (("skyrl", "vllm-router"), ("skyrl /generate", "sglang-router /generate")):
                name = theirs.partition(" ")[0]
                what = f"requests/s, {in_flight} in flight (direct: {name})"
                rate, bound = many[ours]["per_s"], many[theirs]["per_s"]
                rows.append(Row("routers", what, "/s", rate, Target(bound, at_most=False), bound, None, _errors(many)))
                what = f"p99, {in_flight} in flight (direct: {name})"
                late, bound = many[ours]["p99_ms"], many[theirs]["p99_ms"]
                rows.append(Row("routers", what, "ms", late, Target(bound), bound, None, 0, ""))
            rows[-1] = replace(rows[-1], note=_note(many))
    return rows


def _errors(results: dict[str, Result]) -> int:
    return int(sum(result["errors"] for result in results.values()))
