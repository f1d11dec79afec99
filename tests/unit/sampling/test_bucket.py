"""The token bucket: how many tokens start in a window, in which order requests start, and that every request starts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.sampling.quota_account import TokenBucket

PER_MINUTE = 60


@dataclass
class Request:
    """Arrives `gap_s` after the request before, takes `tokens`, ends `runs_s` after its start, and then gives `unused`
    tokens back."""

    gap_s: float
    tokens: int
    unused: int
    runs_s: float


@st.composite
def random_request(draw: st.DrawFn) -> Request:
    tokens = draw(st.one_of(st.integers(0, PER_MINUTE), st.integers(0, 4 * PER_MINUTE)))
    gap_s = draw(st.one_of(st.just(0.0), st.floats(0, 90)))
    return Request(gap_s, tokens, draw(st.integers(0, tokens)), draw(st.sampled_from([0.0, 0.5, 40.0])))


def simulate(requests: list[Request]) -> tuple[list[float], list[float], list[float]]:
    """Run the requests on a clock that jumps from event to event. Returns for each request its arrival, the promised
    latest start, and its start."""
    bucket, now = TokenBucket(PER_MINUTE, 0.0), 0.0
    arrivals = list(itertools.accumulate(request.gap_s for request in requests))
    turns, promised, started = [], [], []
    ends: list[tuple[float, int]] = []
    while len(started) < len(requests):
        due = [*ends, *((at, 0) for at in arrivals[len(turns) : len(turns) + 1])]
        if len(started) < len(turns):
            due.append((now + bucket.left_s(turns[len(started)], now), 0))
        now = max(now, min(at for at, _ in due))
        for at, unused in [end for end in ends if end[0] <= now]:
            ends.remove((at, unused))
            bucket.give_back(unused, now)
        if len(turns) < len(requests) and arrivals[len(turns)] <= now:
            turns.append(bucket.take(requests[len(turns)].tokens, now))
            promised.append(now + bucket.left_s(turns[-1], now))
        while len(started) < len(turns) and bucket.left_s(turns[len(started)], now) <= 1e-9:
            request = requests[len(started)]
            ends.append((now + request.runs_s, request.unused))
            started.append(now)
    return arrivals, promised, started


@given(st.lists(random_request(), min_size=1, max_size=15))
@settings(max_examples=150)
def test_a_window_starts_at_most_its_rate_plus_a_minutes_tokens_plus_one_request(requests: list[Request]) -> None:
    arrivals, promised, started = simulate(requests)
    assert started == sorted(started), "in the order of arrival"
    for arrival, promised_start, start in zip(arrivals, promised, started, strict=True):
        assert arrival <= start <= promised_start + 1e-6, "no request starts later than promised"
    returns = [(start + request.runs_s, request.unused) for start, request in zip(started, requests, strict=True)]
    for first, last in itertools.combinations_with_replacement(range(len(requests)), 2):
        taken = sum(request.tokens for request in requests[first : last + 1])
        window_s = started[last] - started[first]
        given_back = sum(unused for at, unused in returns if started[first] <= at <= started[last])
        beyond = max(0, requests[last].tokens - PER_MINUTE)
        assert taken <= window_s * PER_MINUTE / 60 + PER_MINUTE + given_back + beyond + 1e-6


@given(st.lists(random_request(), min_size=1, max_size=15))
@settings(max_examples=50)
def test_a_request_that_finds_enough_tokens_starts_at_once(requests: list[Request]) -> None:
    spaced = [Request(60.0, min(request.tokens, PER_MINUTE), 0, 0.0) for request in requests]
    arrivals, _, started = simulate(spaced)
    assert started == arrivals


def test_a_minutes_tokens_start_at_once_and_later_ones_at_the_rate() -> None:
    bucket = TokenBucket(PER_MINUTE, 0.0)
    turns = [bucket.take(20, 0.0) for _ in range(6)]
    assert [bucket.left_s(turn, 0.0) for turn in turns] == [0, 0, 0, 20, 40, 60]
    assert bucket.left_s(turns[4], 15.0) == 25


def test_a_request_for_more_than_a_minutes_tokens_starts_when_the_bucket_is_full_and_leaves_a_debt() -> None:
    bucket = TokenBucket(PER_MINUTE, 0.0)
    bucket.take(10, 0.0)
    large = bucket.take(10 * PER_MINUTE, 0.0)
    assert bucket.left_s(large, 0.0) == 10, "the large request waits until the bucket is full"
    after = bucket.take(1, 0.0)
    assert bucket.left_s(after, 0.0) == pytest.approx(10 + 9 * 60 + 1)


def test_tokens_given_back_shorten_every_wait() -> None:
    bucket = TokenBucket(PER_MINUTE, 0.0)
    bucket.take(PER_MINUTE, 0.0)
    turns = [bucket.take(30, 0.0), bucket.take(30, 0.0)]
    bucket.give_back(25, 0.0)
    assert [bucket.left_s(turn, 0.0) for turn in turns] == [5, 35]


def test_a_bucket_holds_at_most_a_minutes_tokens() -> None:
    bucket = TokenBucket(PER_MINUTE, 0.0)
    bucket.give_back(1000, 500.0)
    assert bucket.full(500.0)
    assert bucket.wait_s(PER_MINUTE, 500.0) == 0
    bucket.take(PER_MINUTE, 500.0)
    assert bucket.wait_s(1, 500.0) == 1


def test_a_new_rate_changes_the_waits_that_have_begun() -> None:
    bucket = TokenBucket(PER_MINUTE, 0.0)
    bucket.take(PER_MINUTE, 0.0)
    turn = bucket.take(PER_MINUTE, 0.0)
    bucket.change_rate(10 * PER_MINUTE, 0.0)
    assert bucket.left_s(turn, 0.0) == 6
    bucket.change_rate(PER_MINUTE // 2, 1.0)
    assert bucket.left_s(turn, 1.0) == 100
    assert not bucket.full(1.0)


def test_two_debts_at_the_same_time_do_not_add_up() -> None:
    bucket = TokenBucket(PER_MINUTE, 0.0)
    assert [bucket.left_s(bucket.owe(seconds, 0.0), 0.0) for seconds in (30, 10)] == [30, 10]
    assert bucket.left_s(bucket.take(5, 0.0), 0.0) == 35


def test_a_clock_that_stands_still_or_goes_back_brings_no_tokens() -> None:
    bucket = TokenBucket(PER_MINUTE, 100.0)
    turn = bucket.take(2 * PER_MINUTE, 100.0)
    late = bucket.take(1, 50.0)
    assert bucket.left_s(turn, 50.0) == 0
    assert bucket.left_s(late, 100.0) == 61
