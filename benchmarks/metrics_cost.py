"""What metrics cost the forwarding path, alone: the calls that one sample makes, and the writing of the file.

Usage: python -m benchmarks.metrics_cost

`benchmarks.beside` measures whole servers, where a busy machine hides one percent. This measures the calls themselves,
in CPU time of one thread, and gives them as a share of a sample that costs 0.35 ms.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Histogram

from skyrl.runtime.metrics.files import MetricsDirectory, MetricsWriter
from skyrl.runtime.metrics.outcomes import outcome_label
from skyrl.runtime.metrics.process import show_process
from skyrl.runtime.metrics.processes import ApiMetrics
from skyrl.runtime.metrics.samples import DURATION_BOUNDS
from skyrl.server.api.call import Call
from skyrl.server.api.hooks import RequestMetrics
from skyrl.server.api.route import Route

SAMPLE_US = 350.0
SAMPLES_PER_S = 2_500
WRITES_PER_S = 0.5
CALLS, ROUNDS = 20_000, 9


def cpu_us(call: Callable[[], object], calls: int = CALLS) -> float:
    """CPU microseconds of one call: the median of ROUNDS."""
    rounds: list[float] = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(calls):
            call()
        rounds.append((time.thread_time() - began) / calls * 1e6)
    return median(rounds)


def one_sample(metrics: ApiMetrics) -> Callable[[], None]:
    """The calls of one sample: two requests, the sample itself, and its part of a commit of 20 rows."""
    paths = ("/api/v1/asample", "/api/v1/retrieve_future")
    routes = [Route("POST", path, "any", None, cast(Any, None), ()) for path in paths]
    hook = RequestMetrics(metrics.http, routes)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    calls = [Call(scope, cast(Any, None), cast(Any, None), route) for route in routes]
    began_of: dict[str, float] = {}
    commits = [0]

    def run() -> None:
        for call in calls:
            call.status = 200
            begin = hook.begin(call)
            with_result(begin)
            hook.end(call)
        began = time.perf_counter()
        began_of["request"] = began
        sent = time.perf_counter()
        upstream_s = time.perf_counter() - sent
        metrics.samples.succeeded(512, 0, 64)
        now = time.perf_counter()
        metrics.samples.ended(outcome_label(None, None), now - began, now - began - upstream_s)
        began_of.pop("request", None)
        commits[0] += 2
        if commits[0] >= 20:
            commits[0] = 0
            metrics.commits.committed(20, 0.002)

    return run


def with_result(coroutine: Any) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return


def main() -> None:
    metrics = ApiMetrics.new()
    show_process(metrics.registry)
    sample = cpu_us(one_sample(metrics))
    with tempfile.TemporaryDirectory() as directory:
        write = cpu_us(MetricsWriter(MetricsDirectory(Path(directory)), "api-0", metrics.registry).write, 50)
    counter = Counter("counter", "x", ["kind"], registry=CollectorRegistry()).labels("a")
    histogram = Histogram("histogram", "x", buckets=DURATION_BOUNDS, registry=CollectorRegistry())
    share = (sample + write * WRITES_PER_S / SAMPLES_PER_S) / SAMPLE_US
    figures = {
        "sample_us": round(sample, 2),
        "write_us": round(write, 1),
        "share_of_a_sample": round(share, 4),
        "clients_own_counter_us": round(cpu_us(counter.inc), 2),
        "clients_own_histogram_us": round(cpu_us(lambda: histogram.observe(0.2)), 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
