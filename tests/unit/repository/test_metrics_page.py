"""docs/operating/metrics.md lists exactly the metrics that the processes have, with their types and labels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from prometheus_client.metrics_core import Metric

from skyrl.api.metrics import ApiMetrics, ReadinessMetrics
from skyrl.base.tiny import model_path
from skyrl.cli.launcher.metrics import LauncherMetrics
from skyrl.engine.metrics import EngineMetrics
from skyrl.inference.metrics import FAMILIES
from skyrl.inference.sidecar.control import SidecarMetrics
from skyrl.inference.sidecar.in_flight import InFlight, Pause
from skyrl.router.metrics import RouterMetrics
from skyrl.router.middleware import Chain, RouterContext
from skyrl.router.policies import LeastInFlight
from skyrl.router.pool import WorkerPool
from skyrl.router.proxy import Limits, Proxy
from skyrl.runtime.metrics.storage import show_free_space
from tests.prometheus import RULE_FILES, board_expressions, names_in, panels

PAGE = Path(__file__).parents[3] / "docs/operating/metrics.md"
ROW = re.compile(r"^\| `(skyrl_\w+)` \| (\w+) \|(.*?)\|", flags=re.M)
OF_THE_LIBRARY = re.compile("(process|python)_")


def families() -> Iterator[Metric]:
    """Every family of every kind of process. Each has a series, so that its labels show."""
    api, engine, launcher = ApiMetrics.new(), EngineMetrics.new(), LauncherMetrics.new()
    api.http.route("GET", "/").answered(200, 0.1)
    api.models[0].samples.watch_events(dict)
    build = {"version": "1", "backend": "b", "base_model": "m"}
    ReadinessMetrics(api.registry, build, lambda: {"training": True}, lambda: 1.0)
    show_free_space(launcher.registry, Path("/"))
    for process in (api, engine, launcher):
        yield from process.registry.collect()
    pool, counts = WorkerPool(LeastInFlight()), Counter[str]()
    pool.add("http://one:1")
    proxy = Proxy(pool, Limits(), counts, ())
    chain = Chain(("radix",), proxy, RouterContext(tokenizer_dir=model_path(), options={}))
    yield from RouterMetrics(pool, proxy, counts, chain).collect()
    no_vllm = cast(Any, None)
    in_flight = InFlight(no_vllm, 1, 1.0)
    yield from SidecarMetrics(in_flight, Pause(no_vllm, in_flight, 1.0, 1.0)).collect()


def described() -> dict[str, tuple[str, set[str]]]:
    """By name: type and labels, without the process's own label and the buckets'."""
    found: dict[str, tuple[str, set[str]]] = {}
    for family in families():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        if not OF_THE_LIBRARY.match(name):
            found[name] = (family.type, labels)
    return found


async def test_the_page_lists_every_metric_with_its_type_and_labels() -> None:
    rows = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(PAGE.read_text())}
    assert rows == described()


async def test_every_metric_has_a_sentence_and_a_name_as_prometheus_wants_it() -> None:
    for family in families():
        if not OF_THE_LIBRARY.match(family.name):
            assert family.documentation.endswith("."), family.name
            assert re.fullmatch(r"skyrl_[a-z_]+", family.name)


async def test_most_metrics_are_on_the_board_or_in_a_rule() -> None:
    shown = names_in(" ".join(board_expressions())) | {
        name for file in RULE_FILES for name in names_in(file.read_text())
    }
    shown |= {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    left_out = set(described()) - shown
    assert left_out <= LEFT_OUT, "show it, or name it here"


def of_base_models() -> set[str]:
    """The metrics whose series all have the label `base_model` on a server with several base models."""
    labels = {"base_model": "a"}
    api, launcher = ApiMetrics.new([labels]), LauncherMetrics.new([labels])
    [of_model] = api.models
    of_model.samples.watch_events(dict)
    ReadinessMetrics(of_model.registry, {}, dict, lambda: None)
    labelled = [EngineMetrics.new(of_server=False).registry, *(each for each, _ in (*api.labelled, *launcher.labelled))]
    without = {family.name for each in (api.registry, launcher.registry) for family in each.collect()}
    return {family.name for each in labelled for family in each.collect()} - without | FAMILIES


def test_the_board_chooses_base_models_by_their_label_where_all_series_have_it() -> None:
    """Where some have none, the choice of a base model would leave them out."""
    wanted = of_base_models()
    for expression in (target["expr"] for panel in panels() for target in panel["targets"]):
        for name, labels in re.findall(r"((?:skyrl|vllm)[_:]\w+)\{(.*?)\}", expression):
            short = re.sub("_(total|bucket|sum|count)$", "", name)
            is_chosen = 'base_model=~"$base_model"' in labels
            assert is_chosen == (short in wanted or short.startswith("skyrl_router_")), name


LEFT_OUT = {
    "skyrl_build_info",
    "skyrl_micro_batch_tokens",
    "skyrl_middleware_requests_total",
    "skyrl_router_worker_requests_total",
    "skyrl_router_worker_routable",
    *(f"skyrl_radix_{name}" for name in ("bytes", "entries")),
    *(f"skyrl_radix_{name}_total" for name in ("lookups", "hits", "evictions", "collected")),
    *(f"skyrl_radix_{name}_total" for name in ("unverified", "aborted", "retried")),
}
"""Metrics for a closer look, which no panel shows."""


def test_the_page_lists_what_is_shown_of_vllm() -> None:
    listed = re.findall(r"^\| `(vllm:\w+?)(?:_total)?` \|", PAGE.read_text(), flags=re.M)
    assert set(listed) == FAMILIES
