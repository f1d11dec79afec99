"""Prometheus and promtool, which Debian's package `prometheus` has, and the expressions of boards and rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyrl.runtime.processes.ports import free_port
from skyrl.runtime.processes.supervision import dies_with_parent

NEEDS_PROMETHEUS = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs prometheus (Debian's package)"
)
ROOT = Path(__file__).parents[1]
RULES = ROOT / "deploy/prometheus/rules"
RULE_FILES = (RULES / "recording.yml", RULES / "alerts.yml")
BOARD = ROOT / "deploy/grafana/dashboards/skyrl.json"
START_S = 60.0
CONFIGURATION = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: skyrl
    static_configs: [{{targets: ["{target}"]}}]
"""


def promtool(*arguments: str, given: str | None = None) -> str:
    """What promtool prints. Fails the test if promtool finds a mistake."""
    done = subprocess.run(["promtool", *arguments], input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def board() -> dict[str, Any]:
    return json.loads(BOARD.read_text())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in board()["panels"] if panel["type"] != "row"]


def board_expressions() -> list[str]:
    """As Grafana asks them: with its variables filled in."""
    texts = [target["expr"] for panel in panels() for target in panel["targets"]]
    values = {"$__rate_interval": "30s", "$instance": ".*", "$base_model": ".*"}
    for variable, value in values.items():
        texts = [text.replace(variable, value) for text in texts]
    return texts


def names_in(expression: str) -> set[str]:
    """The metrics that an expression names. A name stands before a selector, or between spaces and brackets."""
    without_strings = re.sub(r'"[^"]*"', "", expression)
    return set(re.findall(r"\b(?:skyrl|vllm|process|python)[_:][\w:]+", without_strings))


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self._url}{path}", params=parameters, trust_env=False)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now. Fails the test if Prometheus cannot parse it."""
        return self.get("/api/v1/query", query=expression)["result"]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self.get("/api/v1/rules")["groups"] for rule in group["rules"]]


@contextmanager
def scraping(target: str, directory: Path) -> Iterator[Prometheus]:
    """A Prometheus that reads `target` (host:port) every second and evaluates our rules."""
    configuration, port = directory / "prometheus.yml", free_port()
    configuration.write_text(CONFIGURATION.format(rules=", ".join(map(str, RULE_FILES)), target=target))
    options = (f"--config.file={configuration}", f"--storage.tsdb.path={directory / 'data'}")
    command = ("prometheus", *options, f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn")
    url = f"http://127.0.0.1:{port}"
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(dies_with_parent(command), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while not _is_ready(url):
            assert process.poll() is None, (directory / "prometheus.log").read_text()
            assert time.monotonic() < deadline, "Prometheus does not start"
            time.sleep(0.1)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
