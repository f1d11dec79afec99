"""vLLM's own metrics as skyrl shows them: a list of families, each series with the number of its replica.

vLLM labels some metrics with the names of adapters, which hold tenants' ids, and never removes such a series. So a
family passes only if it is in the list, and a series only if its labels are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from skyrl.runtime.metrics.text import rendered

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
    }
)
"""By the name in TYPE, without `_total`."""
DROPPED = frozenset({"model_name"})
"""Labels that are left out: all series of a vLLM have the same."""
KEPT = frozenset({"engine", "finished_reason", "le"})
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
    checked.samples = [*_without_dropped(family.samples)]
    return checked


def _without_dropped(samples: Iterable[Sample]) -> Iterable[Sample]:
    for sample in samples:
        labels = {name: value for name, value in sample.labels.items() if name not in DROPPED}
        if labels.keys() <= KEPT:
            yield Sample(sample.name, labels, sample.value)
