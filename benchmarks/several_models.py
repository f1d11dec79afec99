"""Rows about several base models on one server: what a sample costs, and what a second base model takes.

A sample is measured in front of the null upstream, through a gateway with one base model and one with two, in turns.
The second base model of a real server is only sampled from: what counts is how much more memory the server takes than
one with one base model, without its vLLM.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence

import psutil

from benchmarks.rows_forwarding import errors
from benchmarks.stage import Stage, gateway, ready_server
from benchmarks.table import Row, Target
from skyrl.runtime.processes.usage import parts_of_server

ROUNDS, QUICK_ROUNDS = 9, 3
IN_FLIGHT = 64
COST = 1.03
SETTLE_S = 5.0
MORE_MB = 60.0
ONE = [{"base_model": "tiny"}]
TWO = [*ONE, {"base_model": "tiny", "served_model_names": ["teacher"], "uses": ["sample"]}]


def compare(stage: Stage) -> list[Row]:
    """ "direct" is the same with one base model."""
    return [*_cost(stage), *_second(stage)]


def _cost(stage: Stage) -> list[Row]:
    rounds = QUICK_ROUNDS if stage.quick else ROUNDS
    key, ratios, failed = "server_cpu_s_per_1000", list[float](), 0
    with gateway(stage.upstream.url) as alone, gateway(stage.upstream.url, 2) as several:
        for number in range(rounds):
            turn = [("one", alone), ("two", several)]
            seconds: dict[str, float] = {}
            for name, server in turn if number % 2 == 0 else turn[::-1]:
                load = stage.forwarded(f"several-models {name}", server, IN_FLIGHT)
                seconds[name] = load[key]
                failed += errors(load)
            ratios.append(seconds["two"] / seconds["one"])
    what = f"API CPU of a sample with two base models over one, {IN_FLIGHT} in flight"
    note = f"median of {rounds} pairs, from {min(ratios):.3f} to {max(ratios):.3f}"
    return [Row("several-models", what, "", statistics.median(ratios), Target(COST), None, failed, note)]


def _second(stage: Stage) -> list[Row]:
    one_mb, _, one_s = _started(ONE)
    two_mb, vllm_mb, two_s = _started(TWO)
    what, more_mb = "a second base model, only sampled from", two_mb - one_mb
    note = f"its vLLM takes {vllm_mb:.0f} MB more"
    stage.raw.append({"row": "several-models", "path": "second", "one_s": one_s, "two_s": two_s, "vllm_mb": vllm_mb})
    return [
        Row("several-models", f"{what}: memory besides its vLLM", "MB", more_mb, Target(MORE_MB), note=note),
        Row("several-models", f"{what}: time until the server is ready", "s", two_s, None, one_s),
    ]


def _started(entries: Sequence[object]) -> tuple[float, float, float]:
    """The private memory (MB) of the server without its vLLMs, that of one vLLM, and the seconds until it is ready."""
    with ready_server("--base-models", json.dumps(entries)) as server:
        time.sleep(SETTLE_S)
        memory = {name: sum(map(_private_mb, pids)) for name, pids in parts_of_server(server.pid).items()}
    vllm = memory.pop("vLLM")
    return sum(memory.values()), vllm / len(entries), server.ready_s


def _private_mb(pid: int) -> float:
    return psutil.Process(pid).memory_full_info().uss / 2**20
