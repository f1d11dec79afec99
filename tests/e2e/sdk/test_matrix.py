"""The released SDKs run the catalogue on two servers, two SDKs at a time; the compatibility page matches the results.

`make test` runs the newest SDK, and the oldest one beside it in the test of two programs; `make test-slow` runs all.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from skyrl.cli.demo.server import DemoServer
from tests.slow import RUNS_SLOW_TESTS

from .matrix import AT_ONCE, UNCALLED, UNTRIED_COMMANDS, Result, isolated, run_version, versions
from .table import read

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3000)]

NEWEST, OLDEST = versions()[0], versions()[-1]
TRIED = versions() if RUNS_SLOW_TESTS else [NEWEST]
EACH = [version if version == NEWEST else pytest.param(version, marks=pytest.mark.slow) for version in versions()]
LEARNER_S = 600
TEXTS = ("The old fox watches the river at dawn.", "A quiet owl remembers the small horse near the mill.")


@pytest.fixture(scope="module")
def runs(
    server: DemoServer, seeing: DemoServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Result]]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            version: pool.submit(run_version, version, server.url, seeing.url, tmp_path_factory.mktemp(version))
            for version in TRIED
        }


@pytest.mark.parametrize("version", EACH)
def test_every_feature_works(version: str, runs: dict[str, Future[Result]]) -> None:
    failures = runs[version].result().failures
    assert not failures, "\n".join(f"{name}:\n{said}" for name, said in failures.items())


@pytest.mark.parametrize("version", EACH)
def test_no_endpoint_gives_an_unexpected_status(version: str, runs: dict[str, Future[Result]]) -> None:
    result = runs[version].result()
    assert not result.surprises
    assert "POST /api/v1/telemetry" in result.routes
    assert "POST /api/v1/session_heartbeat" in result.routes


@pytest.mark.parametrize("version", EACH)
def test_the_catalogue_tries_every_public_method_and_command(version: str, runs: dict[str, Future[Result]]) -> None:
    result = runs[version].result()
    assert sorted(result.public - result.tried) == sorted(result.public & UNCALLED.keys())
    assert sorted(set(result.commands) - result.tried_commands) == sorted(
        set(result.commands) & UNTRIED_COMMANDS.keys()
    )


@pytest.mark.parametrize("version", EACH)
def test_the_page_is_made_from_what_was_found(version: str, runs: dict[str, Future[Result]]) -> None:
    """`tests/unit/repository/test_tables.py` compares the page with what is kept."""
    assert read()[version] == runs[version].result().kept, "`make tables NEW=compatibility` measures anew"


class Learner:
    """A program that learns a sentence with one SDK; see learner.py."""

    def __init__(self, version: str, server: DemoServer, place: Path, text: str, rounds: int, *more: str) -> None:
        place.mkdir()
        self._begin, self._out = place / "begin", place / "out.json"
        python, env = isolated(version, place)
        command = [python, "-m", "tests.e2e.sdk.learner", "--url", server.url, "--key", f"tml-learner-{version}"]
        command += ["--text", text, "--rounds", str(rounds), "--begin", self._begin, "--out", self._out, *more]
        self._process = subprocess.Popen(command, cwd=place, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def ready(self) -> None:
        while self._process.poll() is None and not self._out.with_suffix(".ready").exists():
            time.sleep(0.02)

    def begin(self) -> None:
        self._begin.touch()

    def done(self) -> dict:  # type: ignore[type-arg]
        _, said = self._process.communicate(timeout=LEARNER_S)
        assert self._process.returncode == 0, said.decode()
        return json.loads(self._out.read_text())


@pytest.fixture(scope="module")
def learned(server: DemoServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:  # type: ignore[type-arg]
    """What the newest and the oldest SDK have found when they learned a sentence each, at the same time."""
    directory = tmp_path_factory.mktemp("learners")
    learners = {
        version: Learner(version, server, directory / version, text, 6)
        for version, text in zip((NEWEST, OLDEST), TEXTS, strict=True)
    }
    for learner in learners.values():
        learner.ready()
    for learner in learners.values():
        learner.begin()
    return {version: learner.done() for version, learner in learners.items()}


def test_the_newest_and_the_oldest_sdk_work_at_the_same_time(learned: dict[str, dict]) -> None:  # type: ignore[type-arg]
    newest, oldest = learned[NEWEST], learned[OLDEST]
    for own, other in ((newest, oldest), (oldest, newest)):
        assert own["losses"][-1] < own["losses"][0] / 3
        assert own["samples"][-1] == own["expected"] != own["base"]
        assert own["run"] in own["runs"]
        assert other["run"] not in own["runs"]
        together = [span for span in own["spans"] if any(b < span[1] and span[0] < e for b, e in other["spans"])]
        assert together, (own["spans"], other["spans"])


@pytest.mark.parametrize(("first", "second"), [(OLDEST, NEWEST), pytest.param(NEWEST, OLDEST, marks=pytest.mark.slow)])
def test_one_sdk_continues_from_the_save_of_another(
    first: str,
    second: str,
    learned: dict[str, dict],  # type: ignore[type-arg]
    server: DemoServer,
    tmp_path: Path,
) -> None:
    saved, text = learned[first], dict(zip((NEWEST, OLDEST), TEXTS, strict=True))[first]
    loading = Learner(second, server, tmp_path / "loading", text, 2, "--load", saved["saved"])
    loading.begin()
    loaded = loading.done()
    assert loaded["samples"] == [saved["expected"]] * 2
    assert loaded["losses"][0] < saved["losses"][0] / 10
