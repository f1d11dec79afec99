"""Rows about routers: skyrl's, vllm-router, sglang-router and none, in front of the same two null upstreams.

All run in turns, several rounds in one run; rows have medians over the rounds. All routers run all the time; at each
moment one of them works.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
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


@dataclass(frozen=True)
class Way:
    """What a load is sent to. `pid` is the router's process; None without a router."""

    url: str
    body: str
    pid: int | None = None


def start(stack: ExitStack, workers: Sequence[str], module: str, *flags: str) -> tuple[str, int]:
    """A router with the policy of taking turns: its URL, and its process."""
    port = free_port()
    command = [sys.executable, "-m", *module.split(), "--policy", "round_robin", "--port", str(port), *flags, *workers]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return f"http://127.0.0.1:{port}", process.pid


def others_flags() -> tuple[str, ...]:
    prometheus = ("--prometheus-port", str(free_port()))
    return ("--host", "127.0.0.1", *prometheus, "--log-level", "error", "--worker-urls")


def routers(stack: ExitStack, workers: Sequence[str]) -> dict[str, Way]:
    ours_url, ours = start(stack, workers, "skyrl.cli.main router", "--worker")
    vllm_url, vllm = start(stack, workers, "vllm_router.launch_router", *others_flags())
    sglang_url, sglang = start(stack, workers, "sglang_router.launch_router", *others_flags())
    for url in (ours_url, vllm_url, sglang_url):
        wait_ready(f"{url}/readiness")
    return {
        "direct": Way(f"{workers[0]}/v1/completions", BODY),
        "skyrl": Way(f"{ours_url}/v1/completions", BODY, ours),
        "vllm-router": Way(f"{vllm_url}/v1/completions", BODY, vllm),
        "direct /generate": Way(f"{workers[0]}/generate", GENERATE),
        "skyrl /generate": Way(f"{ours_url}/generate", GENERATE, ours),
        "sglang-router /generate": Way(f"{sglang_url}/generate", GENERATE, sglang),
    }


def measure(stage: Stage, in_flight: int, targets: dict[str, Way]) -> dict[str, Result]:
    """Medians over the rounds, by router; the number of errors is a sum."""
    seconds, rounds = (1.0, 3) if stage.quick else (1.5, 5)
    taken: dict[str, list[Result]] = {name: [] for name in targets}
    for _ in range(rounds):
        for name, target in targets.items():
            before = cpu_seconds(target.pid) if target.pid is not None else 0.0
            arguments = target.url, str(in_flight), str(seconds), target.body
            result = stage.generate("routers", name, "benchmarks.router_load", *arguments)
            if target.pid is not None:
                result["cpu_s_per_1000"] = (cpu_seconds(target.pid) - before) / result["answers"] * 1e3
                result["resident_mb"] = resident_mb(target.pid)
            taken[name].append(result)
    return {name: _medians(results) for name, results in taken.items()}


def _medians(results: list[Result]) -> Result:
    numbers = [key for key, value in results[0].items() if isinstance(value, int | float)]
    medians = {key: statistics.median(result[key] for result in results) for key in numbers}
    return medians | {"errors": sum(result["errors"] for result in results)}


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
    with ExitStack() as stack:
        targets = routers(stack, [stack.enter_context(NullUpstream()).url for _ in range(2)])
        one = measure(stage, 1, targets)
        ours, theirs = one["skyrl"]["p50_ms"], one["vllm-router"]["p50_ms"]
        what = "p50 above vllm-router's, 1 in flight (direct: vllm-router)"
        rows.append(Row("routers", what, "ms", ours - theirs, Target(0.1), theirs, _errors(one), _note(one)))
        for in_flight in (64, 512):
            many = measure(stage, in_flight, targets)
            for ours, theirs in (("skyrl", "vllm-router"), ("skyrl /generate", "sglang-router /generate")):
                name = theirs.partition(" ")[0]
                what = f"requests/s, {in_flight} in flight (direct: {name})"
                rate, bound = many[ours]["per_s"], many[theirs]["per_s"]
                rows.append(Row("routers", what, "/s", rate, Target(bound, at_most=False), bound, _errors(many)))
                what = f"p99, {in_flight} in flight (direct: {name})"
                late, bound = many[ours]["p99_ms"], many[theirs]["p99_ms"]
                rows.append(Row("routers", what, "ms", late, Target(bound), bound))
            rows[-1] = replace(rows[-1], note=_note(many))
    return rows


def _errors(results: dict[str, Result]) -> int:
    return int(sum(result["errors"] for result in results.values()))
