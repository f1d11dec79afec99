"""The parts of the rollout client that need no server: places, and the forms of loads and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyrl.rollout.client import Places, requests_in
from skyrl.rollout.errors import BadAnswer
from skyrl.rollout.sending import error_of, seconds


async def test_a_place_that_comes_just_before_a_cancellation_is_not_lost() -> None:
    places = Places(1)
    assert await places.take()
    waiting = asyncio.create_task(places.take())
    await asyncio.sleep(0)
    places.give_back()  # the task has the place, and has not run yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.wait_for(places.take(), 5)


async def test_places_go_in_order_and_past_those_that_left() -> None:
    places = Places(1)
    assert await places.take()
    first, second, third = [asyncio.create_task(places.take()) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    places.give_back()
    assert await second
    assert not third.done()
    places.turn_away()
    assert await third is False
    places.give_back()
    assert await asyncio.wait_for(places.take(), 5)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"loads": [{"num_total_reqs": 2}, {"num_total_reqs": 1}]}, 3),
        ([{"num_running_reqs": 2, "num_waiting_reqs": 3}], 5),
        ({"total_reqs": 0}, 0),
        ({"num_reqs": 4}, 4),
        ({"total_running_reqs": 1, "total_waiting_reqs": 1}, 2),
        ([], 0),
    ],
)
def test_the_forms_of_a_load(body: Any, count: int) -> None:
    assert requests_in(body) == count


@pytest.mark.parametrize("body", [None, {}, "idle", {"num_running_reqs": 1}, [{"num_reqs": None}]])
def test_a_load_without_a_number_is_not_taken_for_idle(body: Any) -> None:
    with pytest.raises(BadAnswer, match="no number of requests"):
        requests_in(body)


@pytest.mark.parametrize(
    ("text", "message", "code"),
    [
        (b'{"error":{"message":"m","code":"c"}}', "m", "c"),
        (b'{"error":{"message":"m","code":400}}', "m", None),
        (b'{"error":"m"}', "m", None),
        (b'{"detail":"m"}', "m", None),
        (b'{"message":"m"}', "m", None),
        (b"plain m", "plain m", None),
    ],
)
def test_the_forms_of_an_error(text: bytes, message: str, code: str | None) -> None:
    assert error_of(text) == (message, code)


def test_retry_after_is_a_bounded_number_of_seconds() -> None:
    values = ["2", "0.5", "600", "0", None, "-1", "nan", "Wed, 21 Oct 2026 07:28:00 GMT"]
    assert [seconds(value) for value in values] == [2, 0.5, 60, 0.02, None, None, None, None]
