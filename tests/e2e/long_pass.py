"""One training pass that takes seconds by its size, and which ends first: that pass, or a sample asked for in its
middle.

Says nothing about time: the order of two events is the same on a slow machine.
"""

from __future__ import annotations

import json
import time

import tinker
from tinker import types

from skyrl.demo.server import DemoServer

from .conftest import ask, cross_entropy, greedy

SEQUENCES, TOKENS = 32, 1024
"""32,768 tokens: some 4 s of one core of 2024, forward and backward, in one request of the SDK."""
STARTS_S = 300.0
"""Ends what hangs."""


def long_pass() -> list[types.Datum]:
    return [cross_entropy([(20 + number + step) % 500 for step in range(TOKENS + 1)]) for number in range(SEQUENCES)]


def sample_ends_first(
    server: DemoServer, trainer: tinker.TrainingClient, sampler: tinker.SamplingClient, prompt: list[int]
) -> bool:
    """Ask for a sample while a long pass runs; whether the pass still ran when the sample's result was there."""
    greedy(sampler, prompt, 4)  # its adapter is loaded
    passed = trainer.forward_backward(long_pass(), "cross_entropy")
    request_id = await_start(server, trainer.model_id)
    greedy(sampler, prompt, 4)
    ((status,),) = ask(server, "select status from futures where id = :request", request=request_id)
    assert len(passed.result().loss_fn_outputs) == SEQUENCES
    assert passes(server, trainer.model_id) == {request_id}, "one request of the SDK"
    return status == "pending"


def await_start(server: DemoServer, model_id: str) -> str:
    """Wait until the engine runs a pass of the model; its request's id."""
    deadline = time.monotonic() + STARTS_S
    while True:
        if started := passes(server, model_id) & running_requests(server):
            return started.pop()
        assert time.monotonic() < deadline, "the pass does not start"
        time.sleep(0.02)


def passes(server: DemoServer, model_id: str) -> set[str]:
    """Ids of the model's passes, whether they have ended or not."""
    query = "select id from futures where model_id = :model and kind = 'FORWARD_BACKWARD'"
    return {row[0] for row in ask(server, query, model=model_id)}


def running_requests(server: DemoServer) -> set[str]:
    """What the engine runs now, as it notes it for the case that it dies."""
    noted = (server.state_dir / "running.json").read_text().partition("\n")[0]
    try:
        return set(json.loads(noted)["running"])
    except ValueError:  # it is just being written
        return set()
