"""The engine of a real server is killed (SIGKILL) at every stage of its work; its clients only wait longer.

The moment does not depend on timing: the engine is stopped while a command is acknowledged, and its commit is held back
until it dies.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from skyrl.storage.checkpoint_store.base import MANIFEST
from tests.e2e.mortal_server import STEP, WAIT_S, Client, MortalServer, Upstream, training_pass
from tests.servers import ready
from tests.slow import RUNS_SLOW_TESTS

AFTER_EVERY_STEP_S = 0.000_001


Send = Callable[[], str]
"""Sends a command; returns its request id."""
KillAtStage = Callable[[MortalServer, Send], str]
LONG_PASS = 30
"""A pass of this many sequences of 500 tokens takes seconds on any machine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalServer]:
    """A server that takes snapshots after every step, with a stand-in for vLLM."""
    with Upstream() as upstream:
        flags = ("--served-model-name", "tiny", "--external-inference-url", upstream.url)
        with ready(
            MortalServer(tmp_path_factory.mktemp("state"), *flags, "--snapshot-interval-s", f"{AFTER_EVERY_STEP_S:f}")
        ) as running:
            yield running


@pytest.fixture
def client(server: MortalServer) -> Iterator[Client]:
    with closing(Client(server.url)) as connected:
        yield connected


@dataclass
class Model:
    """A model in training. Sends its commands in order."""

    client: Client
    number: int
    seq_id: int = 0
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.client.model(self.number)

    def send(self, route: str, body: dict[str, Any]) -> str:
        self.seq_id += 1
        return self.client.ok(route, {"model_id": self.id, "seq_id": self.seq_id} | body)["request_id"]

    def outcome(self, request_id: str) -> dict[str, Any]:
        return self.client.outcome(request_id)


def is_running(server: MortalServer, request_id: str, deaths: int) -> bool:
    """Whether the engine runs the command now, after `deaths` engines have died while they ran it."""
    try:
        ledger = json.loads((server.state_dir / "running.json").read_text().partition("\n")[0])
    except ValueError:  # the engine is writing the file
        return False
    return request_id in ledger["running"] and ledger["deaths"].get(request_id, 0) == deaths


def kill(engine: psutil.Process) -> None:
    engine.kill()
    engine.wait(WAIT_S)


def kill_when_running(server: MortalServer, engine: psutil.Process, request_id: str, deaths: int = 0) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_running(server, request_id, deaths):
        assert time.monotonic() < deadline, "the command did not run in time"
        time.sleep(0.001)
    kill(engine)


def kill_while_queueing(server: MortalServer, send: Send) -> str:
    """Kill the engine after the command was acknowledged and before the engine reads it."""
    engine = server.engine()
    engine.suspend()
    request_id = send()
    kill(engine)
    return request_id


def kill_while_running(server: MortalServer, send: Send) -> str:
    """Kill the engine while it runs the command or waits for its commit."""
    engine = server.engine()
    engine.suspend()
    request_id = send()
    with server.commits_held():
        engine.resume()
        kill_when_running(server, engine, request_id)
    return request_id


def weights(server: MortalServer, model: Model, name: str) -> dict[str, bytes]:
    """The files of a saved checkpoint."""
    query = f"SELECT store_key FROM checkpoints WHERE model_id = '{model.id}' AND name = '{name}'"
    ((key,),) = server.ask(query)
    files = (server.state_dir / "checkpoints" / key).iterdir()
    return {file.name: file.read_bytes() for file in files if file.name != MANIFEST}


ROUTES = ("forward_backward", "forward_backward", "optim_step", "save_weights") * 2
DEATHS = {0: kill_while_queueing, 6: kill_while_running}
"""By index in ROUTES: the death at a waiting command, and at a step."""
if RUNS_SLOW_TESTS:  # at the second pass of a step, and at a save
    DEATHS |= {5: kill_while_running, 7: kill_while_running}


def learn(server: MortalServer, model: Model, deaths: Mapping[int, KillAtStage], between: Callable[[], object]) -> Any:
    """Run ROUTES; returns the results of passes and steps, and the saved files. Calls `between` after each death."""
    answers = []
    for index, route in enumerate(ROUTES):
        bodies = {"optim_step": STEP, "save_weights": {"path": f"at-{index}"}, "forward_backward": training_pass(index)}

        def send(route: str = route, body: dict[str, Any] = bodies[route]) -> str:
            return model.send(route, body)

        if index in deaths:
            request_id = deaths[index](server, send)
            between()
        else:
            request_id = send()
        answers.append(model.outcome(request_id))
    assert not [answer for answer in answers if "error" in answer]
    saves = [index for index, route in enumerate(ROUTES) if route == "save_weights"]
    computed = [answer for index, answer in enumerate(answers) if index not in saves]
    return computed, [weights(server, model, f"at-{index}") for index in saves]


def test_an_engine_killed_at_every_stage_changes_no_bit_and_stops_no_sample(
    server: MortalServer, client: Client
) -> None:
    sampler, numbers = client.sampler(), itertools.count()

    def sample() -> None:
        client.result(client.sample(sampler, next(numbers))["request_id"])

    undisturbed = learn(server, Model(client, 0), {}, sample)
    assert learn(server, Model(client, 1), DEATHS, sample) == undisturbed
    assert next(numbers) == len(DEATHS)


@pytest.mark.slow
def test_only_a_command_that_kills_the_engine_twice_is_skipped(server: MortalServer, client: Client) -> None:
    """The pass takes long enough to be observed, and stands between other passes of its model."""
    poisoned, clean = Model(client, 0), Model(client, 1)
    engine = server.engine()
    engine.suspend()
    before = poisoned.send("forward_backward", training_pass(1))
    poison = poisoned.send("forward_backward", training_pass(2, count=LONG_PASS, length=500))
    after = [poisoned.send("forward_backward", training_pass(3)), poisoned.send("optim_step", STEP)]
    engine.resume()
    kill_when_running(server, engine, poison)
    kill_when_running(server, server.engine(), poison, deaths=1)
    failed = poisoned.outcome(poison)
    assert failed["category"] == "server"
    assert "the engine died 2 times while it ran this command" in failed["error"]
    without = [clean.send("forward_backward", training_pass(seed)) for seed in (1, 3)] + [
        clean.send("optim_step", STEP)
    ]
    assert [poisoned.outcome(each) for each in (before, *after)] == [clean.outcome(each) for each in without]
