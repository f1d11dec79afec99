"""Quotas under the unmodified SDK: a training loop over its tokens per minute ends as without a quota, only later, and
the tenant beside it does not wait. A quota that only the tenant can make room in is an error at once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tinker
from tinker import types

from skyrl.api.tokens import tenant_of_key
from skyrl.demo.server import DemoServer
from tests.databases import url_of

from .conftest import SLOW_START_S, ClientFactory, ask, cross_entropy, greedy, train

pytestmark = pytest.mark.vllm

KEY = "tml-over-quota"
TENANT = tenant_of_key(KEY)
PER_MINUTE = 120
MINUTE = [cross_entropy(list(range(30, 61)))] * 4
"""A minute's worth of tokens."""
SECONDS = [cross_entropy(list(range(30, 55)))]
"""Some 12 s worth of them."""
PROMPT = [5, 6, 7]


def quotas(server: DemoServer, *arguments: str) -> None:
    """What the operator runs beside the server; returns when the server knows."""
    before = server.status()["quotas"]["exceptions"]
    here = ("--state-dir", str(server.state_dir), "--database-url", url_of(server.state_dir))
    command = [sys.executable, "-m", "skyrl.cli.main", "quotas", *arguments, *here]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=SLOW_START_S)
    deadline = time.monotonic() + SLOW_START_S
    while server.status()["quotas"]["exceptions"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def over_quota(server: DemoServer, connect: ClientFactory) -> Iterator[tinker.ServiceClient]:
    client = connect(KEY)
    client.holder.get_session_id()  # a tenant is known by what it has
    quotas(server, "set", TENANT, "--tokens-per-minute", str(PER_MINUTE))
    yield client
    quotas(server, "clear", TENANT)


def loop(client: tinker.ServiceClient) -> tuple[list[float], list[int]]:
    """The losses of two steps, sent at once, and a sample after them."""
    trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=11).result()
    losses = [
        (trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(types.AdamParams(learning_rate=1e-3)))
        for data in (MINUTE, SECONDS)
    ]
    found = [passed.result().metrics["loss:sum"] for passed, _ in losses]
    for _, stepped in losses:
        stepped.result()
    return found, greedy(trainer.save_weights_and_get_sampling_client().result(), PROMPT, 2)


def passes(server: DemoServer) -> list[tuple[Any, ...]]:
    query = "select created_at, not_before, completed_at from futures where tenant = :t and kind = :k order by n"
    return ask(server, query, t=TENANT, k="FORWARD_BACKWARD")


def test_an_unchanged_loop_ends_right_and_the_tenant_beside_it_does_not_wait(
    server: DemoServer, connect: ClientFactory, over_quota: tinker.ServiceClient
) -> None:
    free = connect("tml-free")
    expected, said = loop(free)
    losses, answer = loop(over_quota)
    assert losses == expected
    assert len(answer) == len(said) == 2
    first, second = passes(server)
    assert first[1] is None, "a minute's worth is there at the beginning"
    assert second[0] < second[1] <= second[2], "what is beyond has waited"
    # Now for minutes, so that whatever waits for it would be seen.
    trainer = over_quota.create_lora_training_client(base_model="tiny", rank=4, seed=11).result()
    trainer.forward_backward(MINUTE * 5, "cross_entropy")
    waits = trainer.forward_backward(SECONDS, "cross_entropy")
    again = train(free.create_lora_training_client(base_model="tiny", rank=4, seed=11).result(), MINUTE, 1, 1e-3)
    assert again == expected[:1]
    assert not waits.future().done()
    assert server.status()["quotas"]["paused"] > 0


def test_quota_that_only_the_tenant_can_lift_is_raised_at_once(server: DemoServer, connect: ClientFactory) -> None:
    """The SDK repeats a 429 in silence, for 50 s here; what it does not repeat it asks for once."""
    client = connect("tml-over-models")
    client.holder.get_session_id()
    quotas(server, "set", tenant_of_key("tml-over-models"), "--models", "1", "--stored-bytes", "1")
    try:
        first = client.create_lora_training_client(base_model="tiny", rank=4, seed=11).result()
        before = server.status()["quotas"]["refused"].get("models", 0)
        with pytest.raises(tinker.PermissionDeniedError, match="may have 1 in training, and has 1: unload one"):
            client.create_lora_training_client(base_model="tiny", rank=4, seed=11).result()
        assert server.status()["quotas"]["refused"]["models"] == before + 1
        saved = first.save_state("kept").result().path
        with pytest.raises(tinker.PermissionDeniedError, match="may have 1 in training"):
            client.create_training_client_from_state_with_optimizer(saved).result()
        with pytest.raises(
            tinker.RequestFailedError,
            match="weights saved for sampling, and may have 1: delete",
        ):
            first.save_state("second").result()
    finally:
        quotas(server, "clear", tenant_of_key("tml-over-models"))
