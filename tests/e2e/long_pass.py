"""A training pass that takes seconds because of its size. The measurement tells which ends first: the pass, or a sample
that is requested during the pass.

The module measures the order of two events, which is the same on a slow machine.
"""

from __future__ import annotations

import json
import time

import tinker
from tinker import types

from skyrl.cli.demo.server import DemoServer

from .conftest import ask, cross_entropy, greedy

SEQUENCES, TOKENS = 32, 1024
"""32,768 tokens take some 4 s of one core of 2024, forward and backward, in one request of the SDK."""
STARTS_S = 300.0
"""Ends a hanging test."""


def long_pass() -> list[types.Datum]:
    return [cross_entropy([(20 + number + step) % 500 for step in range(TOKENS + 1)]) for number in range(SEQUENCES)]


def sample_ends_first(
    server: DemoServer, trainer: tinker.TrainingClient, sampler: tinker.SamplingClient, prompt: list[int]
) -> bool:
    """Request a sample while a long pass runs; returns whether the pass still ran when the result arrived."""
    greedy(sampler, prompt, 4)  # so that the adapter is loaded
    passed = trainer.forward_backward(long_pass(), "cross_entropy")
    request_id = await_start(server, trainer.model_id)
    greedy(sampler, prompt, 4)
    ((status,),) = ask(server, "select status from futures where id = :request", request=request_id)
    assert len(passed.result().loss_fn_outputs) == SEQUENCES
    assert passes(server, trainer.model_id) == {request_id}, "the SDK sends the pass as one request"
    return status == "pending"


def await_start(server: DemoServer, model_id: str) -> str:
    """Wait until the engine runs a pass of the model; returns its request id."""
    deadline = time.monotonic() + STARTS_S
    while True:
        if started := passes(server, model_id) & running_requests(server):
            return started.pop()
        assert time.monotonic() < deadline, "the pass did not start in time"
        time.sleep(0.02)


def passes(server: DemoServer, model_id: str) -> set[str]:
    """Ids of the model's passes, pending or ended."""
    query = "select id from futures where model_id = :model and kind = 'FORWARD_BACKWARD'"
    return {row[0] for row in ask(server, query, model=model_id)}


def running_requests(server: DemoServer) -> set[str]:
    """The requests that the engine runs now, from the record that it keeps for the case of its death."""
    noted = (server.state_dir / "running.json").read_text().partition("\n")[0]
    try:
        return set(json.loads(noted)["running"])
    except ValueError:  # the engine is writing the file
        return set()
