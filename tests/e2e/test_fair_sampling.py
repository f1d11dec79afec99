"""Tenants share vLLM: a tenant with few samples does not wait for another tenant's whole queue. Unmodified SDK, real
vLLM."""

from __future__ import annotations

import time

import pytest
from tinker import types

from skyrl.cli.demo.server import DemoServer

from .conftest import ClientFactory, ask

pytestmark = pytest.mark.vllm

PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
MANY, AT_ONCE = 8, 256
"""The samples of one tenant, and the sequences of each: as many as vLLM runs at once."""
LIMIT_S = 300.0


def sampling_params(max_tokens: int) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=max_tokens, stop=[])


def test_a_sample_runs_before_another_tenants_queue(server: DemoServer, connect: ClientFactory) -> None:
    many = connect("tml-many").create_sampling_client(base_model="tiny").result()
    few = connect("tml-few").create_sampling_client(base_model="tiny").result()
    ((before,),) = ask(server, "select coalesce(max(n), 0) from futures")

    def recorded() -> list[tuple[float | None]]:
        return ask(server, "select completed_at from futures where n > :before order by n", before=before)

    queued = [many.sample(PROMPT, num_samples=AT_ONCE, sampling_params=sampling_params(24)) for _ in range(MANY)]
    deadline = time.monotonic() + LIMIT_S
    while len(recorded()) < MANY:
        assert time.monotonic() < deadline, "the samples were not recorded in time"
        time.sleep(0.01)
    few.sample(PROMPT, num_samples=1, sampling_params=sampling_params(24)).result()
    assert all(len(each.result().sequences) == AT_ONCE for each in queued)
    *ends_of_many, last_of_few = [end for (end,) in recorded()]
    assert len(ends_of_many) == MANY
    assert last_of_few is not None
    assert sum(end is not None and end > last_of_few for end in ends_of_many) >= 2
