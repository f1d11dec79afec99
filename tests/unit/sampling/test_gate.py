"""A request that leaves the gate: its part of the quota ends whatever happens while its usage is counted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from skyrl.base.types.weights import AdapterVersion, BaseWeights, WeightsRef
from skyrl.sampling.gate import SamplingGate
from skyrl.sampling.metrics import SampleMetrics, Used
from skyrl.sampling.quota_account import Account, QuotaLimits
from skyrl.storage.db.usage import RunSamples, UsageKey
from tests.sample_jobs import JOB

RATE = 600


@dataclass(frozen=True)
class Tenant:
    tenant: str = "t"
    session_id: str = "s"
    base_model: str = "tiny"
    weights: WeightsRef = BaseWeights()


def fail(_: Mapping[UsageKey, int]) -> None:
    raise ValueError("usage cannot be counted")


async def test_a_request_whose_usage_cannot_be_counted_gives_its_unused_tokens_back() -> None:
    account = Account(QuotaLimits(tokens_per_minute=RATE, requests_in_flight=1), lambda _: True, lambda: 0.0, {})
    gate = SamplingGate(fail, SampleMetrics())
    entry = gate.enter("t", 1)
    entry.ticket = account.admit("first", RATE)
    with pytest.raises(ValueError, match="cannot be counted"):
        async with gate.turn(entry, JOB, Tenant()) as turn:
            turn.used = Used(3, 0, 7)
    assert account.admit("second", RATE - 10).not_before is None


async def test_samples_of_a_run_are_counted_by_run_and_tenant_and_those_of_the_base_model_are_not() -> None:
    gate = SamplingGate(lambda _: None, SampleMetrics(), runs=(runs := RunSamples()))
    payer = Tenant(weights=AdapterVersion("run@3"))
    for payers, used in ((payer, Used(3, 0, 7, 0, 4, 1, 6.5, 7)), (payer, None), (Tenant(), Used(3, 0, 7, 0, 4))):
        async with gate.turn(None, JOB, payers) as turn:
            turn.used = used
    [(run, sums)] = runs.take().items()
    assert run == ("run", "t")
    assert (sums.samples, sums.truncated, sums.surprise_sum, sums.surprise_tokens) == (4, 1, 6.5, 7)
    assert runs.take() == {}


def test_the_time_with_samples_in_flight_counts_once_and_is_told_with_the_samples() -> None:
    """One sample takes from 10 s to 4 s ago, a second from 8 s to 2 s ago, a third is still in flight."""
    runs, run, now = RunSamples(), ("run", "t"), time.perf_counter()
    for began in (-10, -8):
        runs.begin(run, now + began)
    assert runs.take() == {}, "no sample has ended"
    for ended in (-4, -2):
        runs.end(run, now + ended, 1, 0, 0.0, 0)
    runs.begin(run, now - 1)
    [sums] = runs.take().values()
    assert sums.sampling_s == pytest.approx(9, abs=0.5)
    assert sums.sampling_until == pytest.approx(time.time(), abs=5)
    runs.end(run, now + 3, 1, 0, 0.0, 0)
    [sums] = runs.take().values()
    assert sums.sampling_s == pytest.approx(3, abs=0.5)
