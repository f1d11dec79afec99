"""How many files of skyrl a request passes: those whose functions run between its arrival and its answer.

docs/reading-the-code.md shows the numbers. They count what a reader has to open to follow one request, so libraries and
what runs once at the start are left out.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from agent_world import Server, user
from api_harness import Serve
from engine_harness import Trainer, data, harness_in

import skyrl
from benchmarks.stage import NullUpstream
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import publish_training, publish_url
from tests.postgres_server import ON_SQLITE

SKYRL = str(Path(skyrl.__file__).parent) + "/"
TIMES = 4
AFTER = {"engine/snapshots.py"}
"""What notes a command that has its answer. On a busy machine the client hears of the answer only after that."""
PAGE = Path(__file__).parents[3] / "docs" / "reading-the-code.md"


class Files:
    """Notes the files of called functions, on this thread and on those that start while it exists."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._on = False
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def close(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    @contextmanager
    def noted(self) -> Iterator[set[str]]:
        """The files of what runs inside, by path below skyrl/."""
        self._seen, self._on = set(), True
        try:
            yield self._seen
        finally:
            self._on = False

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if self._on and event == "call" and name.startswith(SKYRL) and frame.f_code.co_name != "<module>":
            self._seen.add(name.removeprefix(SKYRL))


@pytest.fixture
def files() -> Iterator[Files]:
    noting = Files()
    yield noting
    noting.close()


def on_the_page(request: str) -> int:
    """The number of files that the page shows for a kind of request."""
    (row,) = re.findall(rf"^\| {request} \| (\d+) \|$", PAGE.read_text(), re.MULTILINE)
    return int(row)


def check(request: str, *found: list[set[str]]) -> None:
    """`found`: of the parts of a request's way, each as often as it was sent. A file is on the way if each of the times
    has passed it: on a slow machine what a process does now and then comes into some of them."""
    seen = set[str]().union(*(set.intersection(*of_part) for of_part in found)) - AFTER
    assert len(seen) <= on_the_page(request), "\n".join(sorted(seen))


@ON_SQLITE
async def test_files_that_a_sample_passes(files: Files, serve: Serve, database: Database) -> None:
    with NullUpstream() as upstream:
        database.write(lambda c: publish_url(c, upstream.url))
        async with serve() as api:
            sampler = await api.sampler()
            found: list[set[str]] = []
            for number in range(TIMES):
                with files.noted() as seen:
                    promise = await api.sample(sampler, number)
                    assert (await api.result(promise["request_id"])).status_code == 200
                found.append(seen)
    check("a text sample", found)


@ON_SQLITE
async def test_files_that_a_forward_backward_passes(
    files: Files, serve: Serve, database: Database, tmp_path: Path
) -> None:
    """The API's half, then the engine's with the real trainer; the way back through the API is that of a sample."""
    database.write(lambda c: publish_training(c, ready=True, reason="", vocab_size=512, max_context=64))
    async with serve() as api:
        sampler = await api.sampler()
        session = sampler.partition(":")[0]
        made = await api.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "acme/base"})
        assert made.status_code == 200, made.text
        model = f"{session}:train:0"
        of_api: list[set[str]] = []
        for number in range(1, TIMES + 1):
            given = {"data": data(number), "loss_fn": "cross_entropy"}
            body = {"model_id": model, "seq_id": number, "forward_backward_input": given}
            with files.noted() as seen:
                sent = await api.post("forward_backward", body)
                assert sent.status_code == 200, sent.text
            of_api.append(seen)
    async with harness_in(tmp_path / "engine") as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.result(trainer.creating or "")
        of_engine: list[set[str]] = []
        for number in range(TIMES):
            with files.noted() as seen:
                await trainer.result(await trainer.forward_backward(number))
            of_engine.append(seen)
    check("`forward_backward`", of_api, of_engine)


@ON_SQLITE
async def test_files_that_a_turn_of_an_agent_passes(files: Files, server: Server) -> None:
    agent = await server.agent()
    messages = [user("begin")]
    messages += [await agent.say(messages), user("Go on.")]  # later turns continue an earlier one
    found: list[set[str]] = []
    for _ in range(TIMES):
        with files.noted() as seen:
            messages.append(await agent.say(messages))
        messages.append(user("Go on."))
        found.append(seen)
    check("an agent's turn", found)
