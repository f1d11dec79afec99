"""A request that leaves the gate: its part of the quota ends whatever happens while its usage is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from skyrl.base.types.weights import BaseWeights, WeightsRef
from skyrl.sampling.gate import SamplingGate
from skyrl.sampling.metrics import SampleMetrics, Used
from skyrl.sampling.quota_account import Account, QuotaLimits
from skyrl.storage.db.usage import UsageKey
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
