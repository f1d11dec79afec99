"""Quotas with the unmodified SDK. A training loop beyond its tokens per minute gives the same results later, and
another tenant does not wait. A quota that only the tenant can free raises an error at once."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import tinker
from tinker import types

from skyrl.api.access import tenant_of_key
from skyrl.cli.demo.server import DemoServer
from tests.databases import url_of
from tests.servers import SLOW_START_S

from .conftest import ClientFactory, cross_entropy, greedy

pytestmark = pytest.mark.vllm

MINUTE = [cross_entropy(list(range(30, 61)))] * 4
"""The tokens of one minute."""
SECONDS = [cross_entropy(list(range(30, 55)))]
"""The tokens of some 12 s."""
PROMPT = [5, 6, 7]


def quotas(server: DemoServer, *arguments: str) -> None:
    """Run the operator's command beside the server; return when the server has read the new quotas."""
    before = server.status()["quotas"]["exceptions"]
    here = ("--state-dir", str(server.state_dir), "--database-url", url_of(server.state_dir))
    command = [sys.executable, "-m", "skyrl.cli.main", "quotas", *arguments, *here]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=SLOW_START_S)
    deadline = time.monotonic() + SLOW_START_S
    while server.status()["quotas"]["exceptions"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def loop(client: tinker.ServiceClient) -> tuple[list[float], list[int]]:
    """Run two steps, sent at once, then a sample; returns the losses and the sampled tokens."""
    trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=11).result()
    losses = [
        (trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(types.AdamParams(learning_rate=1e-3)))
        for data in (MINUTE, SECONDS)
    ]
    found = [passed.result().metrics["loss:sum"] for passed, _ in losses]
    for _, stepped in losses:
        stepped.result()
    return found, greedy(trainer.save_weights_and_get_sampling_client().result(), PROMPT, 2)


def test_a_quota_that_only_the_tenant_can_free_raises_an_error_at_once(
    server: DemoServer, connect: ClientFactory
) -> None:
    """The SDK repeats a 429 without a message, for 50 s here. A refusal that it does not repeat is requested once."""
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
