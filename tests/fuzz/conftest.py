"""One server for all fuzz tests. Each property is tried with a fixed number of inputs, or for its share of FUZZ_S
seconds.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import pytest
from hypothesis import seed, settings

from skyrl.base.tiny import vision
from tests.e2e.mortal_server import MortalServer, Upstream
from tests.fuzz.target import QUICK, Target
from tests.servers import ready

INPUTS = "inputs"
"""The name of the property of a test report that holds the number of inputs. It works across processes."""


class Run(Protocol):
    def __call__(self, prop: Any, examples: int, share: float = 1.0) -> None: ...


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Its base model sees."""
    model = tmp_path_factory.mktemp("seeing")
    vision.make(model)
    with Upstream() as upstream:
        flags = ("--base-model", str(model), "--served-model-name", "tiny", "--external-inference-url", upstream.url)
        with ready(MortalServer(tmp_path_factory.mktemp("fuzz"), *flags)) as server:
            yield Target(server)


@pytest.fixture
def run(request: pytest.FixtureRequest, target: Target) -> Iterator[Run]:
    """A function that tries a property. Without FUZZ_S it tries `examples` inputs, the same in every run. With FUZZ_S
    it tries random inputs for this test's part of FUZZ_S seconds, or for `share` of that part."""
    tests = sum("run" in item.fixturenames for item in request.session.items if isinstance(item, pytest.Function))
    seconds = float(os.environ.get("FUZZ_S", "0")) / tests
    before, processes = target.statuses.copy(), target.pids()

    def attempt(prop: Any, examples: int, share: float = 1.0) -> None:
        if not seconds:
            settings(QUICK, max_examples=examples)(prop)()
            return
        deadline = time.monotonic() + seconds * share
        random_property = settings(QUICK, derandomize=False, max_examples=10)(prop)
        while time.monotonic() < deadline:
            seed(random.getrandbits(64))(random_property)()

    yield attempt
    assert target.pids() == processes, "a process of the server died"
    request.node.user_properties.append((INPUTS, (target.statuses - before).total()))


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    inputs: Counter[str] = Counter()
    for report in [report for reports in terminalreporter.stats.values() for report in reports]:
        if isinstance(report, pytest.TestReport) and report.when == "teardown":
            counts: dict[str, Any] = dict(report.user_properties)
            inputs[report.location[2].partition("[")[0]] += counts.get(INPUTS, 0)
    for name, count in inputs.items():
        if count:
            terminalreporter.write_line(f"{count} inputs: {name}")
