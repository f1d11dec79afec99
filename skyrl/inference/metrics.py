"""vLLM's own metrics as skyrl shows them, each series with the number of its replica; and loads of adapters into vLLM,
by the engine after a save and by API processes when vLLM has lost one."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from skyrl.runtime.metrics.files import rendered

FAMILIES = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions",
        "vllm:prompt_tokens",
        "vllm:generation_tokens",
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:request_success",
        "vllm:request_queue_time_seconds",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:skyrl_requests_waiting",
        "vllm:skyrl_waiting_bound",
    }
)
"""By the name in TYPE, without `_total`."""
DROPPED = frozenset({"model_name"})
"""Labels that are left out: all series of a vLLM have the same."""
KEPT = frozenset({"engine", "finished_reason", "le", "reason"})
_PARTS = ("_total", "_bucket", "_sum", "_count")


def shown(text: str, replica: int, labels: Mapping[str, str] | None = None) -> str:
    """The part of vLLM's text that skyrl shows. Every series also gets `labels`. Raises ValueError for a text in
    another format."""
    chosen = "\n".join(line for line in text.split("\n") if _family(line) in FAMILIES)
    families = text_string_to_metric_families(f"{chosen}\n")
    return rendered(map(_checked, families), replica=str(replica), **(labels or {}))


def _family(line: str) -> str:
    """The family that a line is about. Reading only these lines takes a tenth of the time."""
    if line.startswith(("# HELP ", "# TYPE ")):
        name = line.split(" ", 3)[2]
    else:
        name = line.partition("{")[0].partition(" ")[0]
    for part in _PARTS:
        name = name.removesuffix(part)
    return name


def _checked(family: Metric) -> Metric:
    checked = Metric(family.name, family.documentation, family.type)
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name not in DROPPED}
        if labels.keys() <= KEPT:
            checked.samples.append(Sample(sample.name, labels, sample.value))
    return checked


LOAD_BOUNDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


@dataclass
class Load:
    ok: bool = False


class AdapterMetrics:
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        about = "Loads of adapters into vLLM."
        loads = Counter("skyrl_adapter_loads", about, ["outcome"], registry=registry)
        self._loaded, self._failed = loads.labels("ok"), loads.labels("failed")
        about = "Time of one load of an adapter, with bringing its files to vLLM."
        self._seconds = Histogram("skyrl_adapter_load_seconds", about, buckets=LOAD_BOUNDS, registry=registry)

    @contextmanager
    def load(self) -> Generator[Load]:
        """One load. The body says when the adapter is loaded; otherwise the load has failed."""
        began, load = time.perf_counter(), Load()
        try:
            yield load
        finally:
            self._seconds.observe(time.perf_counter() - began)
            (self._loaded if load.ok else self._failed).inc()
