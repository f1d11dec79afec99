"""Metrics without a server: tallies, the text format, the files of processes, and what is shown of vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from skyrl.api.table import HttpMetrics
from skyrl.cli.launcher.metrics import LauncherMetrics
from skyrl.engine.metrics import EngineMetrics
from skyrl.inference.metrics import shown
from skyrl.runtime.metrics.files import STALE_S, MetricsDirectory, MetricsWriter, joined, publishing, rendered
from skyrl.runtime.metrics.tallies import Spreads, Tallies

BOUNDS = (0.1, 1.0, 2.5)
VALUES = (0.05, 0.1, 0.11, 1.0, 2.0, 9.0)


def lines_of(text: str) -> set[str]:
    """The lines of a text, without the times at which series were made."""
    return {line for line in text.splitlines() if "_created" not in line}


def test_a_tallied_histogram_shows_what_the_clients_own_shows() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    spread = Spreads(ours, "wait_seconds", "Time.", BOUNDS).only
    histogram = Histogram("wait_seconds", "Time.", buckets=BOUNDS, registry=theirs)
    for value in VALUES:
        spread.add(value)
        histogram.observe(value)
    assert lines_of(generate_latest(ours).decode()) == lines_of(generate_latest(theirs).decode())


def test_a_tallied_counter_shows_what_the_clients_own_shows() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tallies = Tallies(ours, "ends", "Ends.", "outcome", ("ok", "failed"))
    counter = Counter("ends", "Ends.", ["outcome"], registry=theirs)
    for outcome, amount in (("ok", 2), ("failed", 0)):
        tallies[outcome].add(amount)
        counter.labels(outcome).inc(amount)
    assert lines_of(generate_latest(ours).decode()) == lines_of(generate_latest(theirs).decode())


def test_a_label_that_was_not_named_at_the_start_is_an_error() -> None:
    with pytest.raises(KeyError):
        Tallies(None, "ends", "Ends.", "outcome", ("ok",))["a tenant's name"]


def test_the_text_is_the_clients_own_with_one_more_label() -> None:
    registry = CollectorRegistry()
    Gauge("odd", 'A "quoted"\nline with \\.', ["name"], registry=registry).labels('a"b\\c\nd').set(1e18)
    Histogram("wait_seconds", "Time.", buckets=BOUNDS, registry=registry).observe(1)
    Counter("ends", "Ends.", registry=registry).inc(0.5)
    text = rendered(registry.collect(), process="api-0")
    assert text.count('process="api-0"') == len([line for line in text.splitlines() if line[0] != "#"])
    without = text.replace(',process="api-0"', "").replace('{process="api-0"}', "")
    assert lines_of(without) == lines_of(generate_latest(registry).decode())


def test_joined_texts_have_each_family_once_with_the_series_of_all() -> None:
    one, two = CollectorRegistry(), CollectorRegistry()
    for registry in (one, two):
        Counter("ends", "Ends.", registry=registry).inc()
    Gauge("only_here", "Here.", registry=two).set(3)
    Gauge("no_series", "None.", ["name"], registry=two)
    text = joined([rendered(one.collect(), process="a"), "", rendered(two.collect(), process="b")])
    assert text.splitlines() == [
        "# HELP ends_total Ends.",
        "# TYPE ends_total counter",
        'ends_total{process="a"} 1.0',
        'ends_total{process="b"} 1.0',
        "# HELP only_here Here.",
        "# TYPE only_here gauge",
        'only_here{process="b"} 3.0',
        "# HELP no_series None.",
        "# TYPE no_series gauge",
    ]


def registry_with(value: float) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("ends", "Ends.", registry=registry).inc(value)
    return registry


def test_a_process_that_has_ended_is_left_out_and_its_file_deleted(tmp_path: Path) -> None:
    directory = MetricsDirectory(tmp_path / "metrics")
    MetricsWriter(directory, "engine", registry_with(1)).write()
    code = "from skyrl.runtime.metrics.files import MetricsDirectory; from pathlib import Path; import sys;"
    code += "MetricsDirectory(Path(sys.argv[1])).write('api-0', '# HELP x X\\n# TYPE x gauge\\nx 1\\n')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "metrics")], check=True)
    assert (tmp_path / "metrics/api-0.prom").exists()
    assert directory.read() == '# HELP ends_total Ends.\n# TYPE ends_total counter\nends_total{process="engine"} 1.0\n'
    directory.sweep()
    assert [file.name for file in (tmp_path / "metrics").iterdir()] == ["engine.prom"]


def test_the_engines_of_several_base_models_label_all_their_series(tmp_path: Path) -> None:
    directory = MetricsDirectory(tmp_path)
    for name in ("a", "b"):
        MetricsWriter(directory, f"engine-{name}", registry_with(1), labels={"base_model": name}).write()
    assert [line for line in directory.read().splitlines() if line[0] != "#"] == [
        'ends_total{process="engine-a",base_model="a"} 1.0',
        'ends_total{process="engine-b",base_model="b"} 1.0',
    ]
    series = 'vllm:num_requests_running{engine="0",replica="1",base_model="a"} 3.0'
    assert series in shown(VLLM, 1, {"base_model": "a"}).splitlines()


def test_restarts_are_counted_for_each_base_model_and_the_processes_own_series_once(tmp_path: Path) -> None:
    metrics, directory = LauncherMetrics.new([{"base_model": "a"}, {"base_model": "b"}]), MetricsDirectory(tmp_path)
    metrics.of_models[1].ended("vllm", "hung")
    MetricsWriter(directory, "launcher", metrics.registry, more=metrics.labelled).write()
    lines = directory.read().splitlines()
    hung = 'skyrl_vllm_restarts_total{reason="hung",process="launcher",base_model='
    assert [line for line in lines if line.startswith(hung)] == [f'{hung}"a"}} 0.0', f'{hung}"b"}} 1.0']
    assert len([line for line in lines if line.startswith("skyrl_event_loop_lag_seconds_sum")]) == 1
    only = LauncherMetrics.new()
    assert (only.labelled, only.of_models) == ((), (only.restarts,))


def test_numbers_that_no_base_model_has_are_published_by_one_engine() -> None:
    published = [EngineMetrics.new(of_server=of_server).registry for of_server in (True, False)]
    names = [{family.name for family in registry.collect()} for registry in published]
    assert names[0] - names[1] == {"skyrl_sessions", "skyrl_tenants_active", "skyrl_db_size_bytes"}


def test_directories_that_were_deleted_are_private_again(tmp_path: Path) -> None:
    writer = MetricsWriter(MetricsDirectory(tmp_path / "run" / "metrics"), "engine", registry_with(1))
    writer.write()
    assert [each.stat().st_mode & 0o777 for each in (tmp_path / "run", tmp_path / "run" / "metrics")] == [0o700, 0o700]


def test_a_file_that_is_not_written_any_more_is_left_out(tmp_path: Path) -> None:
    directory = MetricsDirectory(tmp_path)
    MetricsWriter(directory, "engine", registry_with(1)).write()
    assert directory.read()
    long_ago = time.time() - STALE_S - 1
    os.utime(tmp_path / "engine.prom", (long_ago, long_ago))
    assert directory.read() == ""


def test_a_broken_file_hides_no_other(tmp_path: Path) -> None:
    directory = MetricsDirectory(tmp_path)
    MetricsWriter(directory, "engine", registry_with(1)).write()
    (tmp_path / "api-0.prom").write_text("no number\nrest")
    assert 'process="engine"' in directory.read()


async def test_what_is_published_begins_at_once_and_ends_with_the_process(tmp_path: Path) -> None:
    async with publishing(registry_with(2), "router", tmp_path) as directory:
        while "ends_total" not in directory.read():
            time.sleep(0.001)  # noqa: ASYNC251 - the writer needs no event loop
    assert directory.read() == ""


async def test_a_process_prepares_its_answers_from_the_files_of_all(tmp_path: Path) -> None:
    MetricsWriter(MetricsDirectory(tmp_path), "engine", registry_with(1)).write()
    async with publishing(registry_with(2), "router", tmp_path, answers=True) as directory:
        while directory.prepared is None:
            time.sleep(0.001)  # noqa: ASYNC251 - the writer needs no event loop
        assert directory.prepared.decode() == directory.read()
        assert 'ends_total{process="engine"} 1.0' in (await directory.answer()).decode()
    async with publishing(registry_with(2), "api-0", tmp_path) as directory:
        while "api-0" not in directory.read():
            time.sleep(0.001)  # noqa: ASYNC251
        assert directory.prepared is None, "a process that nobody asks reads no files"


def test_an_answer_that_cannot_be_prepared_anew_is_dropped(tmp_path: Path) -> None:
    directory = MetricsDirectory(tmp_path)
    MetricsWriter(directory, "engine", registry_with(1)).write()
    directory.prepare()
    (tmp_path / "engine.prom").write_text(f"{os.getpid()}\n# HELP cut")
    with pytest.raises(ValueError, match="unpack"):
        directory.prepare()
    assert directory.prepared is None


def test_the_directory_is_private_and_made_again(tmp_path: Path) -> None:
    directory = MetricsDirectory(tmp_path / "metrics")
    writer = MetricsWriter(directory, "engine", registry_with(1))
    assert directory.read() == ""
    writer.write()
    assert (tmp_path / "metrics").stat().st_mode & 0o077 == 0


def test_requests_are_shown_by_template_method_and_first_digit() -> None:
    registry = CollectorRegistry()
    metrics = HttpMetrics(registry)
    timed = metrics.route("POST", "/api/v1/asample")
    polled = metrics.route("POST", "/api/v1/retrieve_future", timed=False)
    timed.answered(200, 0.3)
    timed.answered(429, 0.3)
    polled.answered(None, 30)
    text = generate_latest(registry).decode()
    assert 'skyrl_http_requests_total{method="POST",route="/api/v1/asample",status="2xx"} 1.0' in text
    assert 'skyrl_http_requests_total{method="POST",route="/api/v1/asample",status="4xx"} 1.0' in text
    assert 'skyrl_http_requests_total{method="POST",route="/api/v1/retrieve_future",status="gone"} 1.0' in text
    assert 'skyrl_http_request_duration_seconds_count{method="POST",route="/api/v1/asample"} 2.0' in text
    assert text.count("skyrl_http_request_duration_seconds_count") == 1, "long polls have no duration"


VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
# HELP vllm:lora_requests_info Running stats on lora requests.
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="4",running_lora_adapters="s1:train:0@1",waiting_lora_adapters=""} 1.7e+09
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",path="/srv/state"} 1.0
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 7.0
vllm:request_success_total{adapter="s1:train:0@1",engine="0",finished_reason="stop",model_name="tiny"} 7.0
# HELP vllm:request_success_created Count of successfully processed requests.
# TYPE vllm:request_success_created gauge
vllm:request_success_created{engine="0",finished_reason="stop",model_name="tiny"} 1.7e+09
# HELP vllm:e2e_request_latency_seconds Histogram of e2e request latency in seconds.
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="tiny"} 1.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 2.0
vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny"} 2.0
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="tiny"} 1.5
# EOF
"""


def test_of_vllm_only_listed_families_and_labels_are_shown() -> None:
    """A series with a label that is not listed is left out: the label could hold a tenant's id."""
    assert [line for line in shown(VLLM, 1).splitlines() if line[0] != "#"] == [
        'vllm:num_requests_running{engine="0",replica="1"} 3.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",replica="1"} 7.0',
        'vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",replica="1"} 1.0',
        'vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",replica="1"} 2.0',
        'vllm:e2e_request_latency_seconds_count{engine="0",replica="1"} 2.0',
        'vllm:e2e_request_latency_seconds_sum{engine="0",replica="1"} 1.5',
    ]


def test_a_text_that_is_not_in_the_format_is_an_error() -> None:
    with pytest.raises(ValueError, match="float"):
        shown("vllm:num_requests_running{ nonsense", 0)
