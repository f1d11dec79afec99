"""The running requests of a forwarding client, and how many adapters they sample from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from skyrl.base.types.weights import AdapterVersion, BaseWeights, FullWeights, WeightsRef
from skyrl.sampling.retries import Attempts, Running, backoff


def attempts(request_id: str, weights: WeightsRef) -> Attempts[Any]:
    exchange = SimpleNamespace(request_id=request_id, weights=weights)
    return Attempts(cast(Any, exchange), {}, 0.0, backoff())


async def test_adapters_count_once_and_until_their_last_request_has_ended() -> None:
    running = Running()
    first, second = AdapterVersion("m@1"), AdapterVersion("m@2")
    each = [attempts(str(number), first) for number in range(3)]
    others = [attempts("base", BaseWeights()), attempts("full", FullWeights("m@1")), attempts("other", second)]
    for one in (*each, *others):
        running.add(one)
    assert running.adapters == 2
    running.remove(others[2])
    running.remove(each[0])
    assert running.adapters == 1
    assert [running.progress(name) is not None for name in ("0", "1", "base", "full", "other")] == [
        False, True, True, True, False,
    ]  # fmt: skip
    for one in (each[1], each[2], others[0], others[1]):
        running.remove(one)
    assert running.adapters == 0
