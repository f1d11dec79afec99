"""The token bucket: how much starts in how long, in which order, and that everybody's turn comes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.quotas.bucket import TokenBucket

PER_MINUTE = 60


@dataclass
class Asked:
    """Somebody who comes `after` the one before and takes `tokens`, but uses only some of them, and knows `lasts`
    seconds after the start how many."""

    after: float
    tokens: int
    unused: int
    lasts: float


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    tokens = draw(st.one_of(st.integers(0, PER_MINUTE), st.integers(0, 4 * PER_MINUTE)))
    after = draw(st.one_of(st.just(0.0), st.floats(0, 90)))
    return Asked(after, tokens, draw(st.integers(0, tokens)), draw(st.sampled_from([0.0, 0.5, 40.0])))


def play(people: list[Asked]) -> tuple[list[float], list[float], list[float]]:
    """When each arrived, was told to start at the latest, and started; on a clock that jumps from event to event."""
    bucket, now = TokenBucket(PER_MINUTE, 0.0), 0.0
    arrivals = list(itertools.accumulate(person.after for person in people))
    turns, told, started = [], [], []
    ends: list[tuple[float, int]] = []
    while len(started) < len(people):
        due = [*ends, *((at, 0) for at in arrivals[len(turns) : len(turns) + 1])]
        if len(started) < len(turns):
            due.append((now + bucket.left_s(turns[len(started)], now), 0))
        now = max(now, min(at for at, _ in due))
        for end in [end for end in ends if end[0] <= now]:
            ends.remove(end)
            bucket.give_back(end[1], now)
        if len(turns) < len(people) and arrivals[len(turns)] <= now:
            turns.append(bucket.take(people[len(turns)].tokens, now))
            told.append(now + bucket.left_s(turns[-1], now))
        while len(started) < len(turns) and bucket.left_s(turns[len(started)], now) <= 1e-9:
            person = people[len(started)]
            ends.append((now + person.lasts, person.unused))
            started.append(now)
    return arrivals, told, started


@given(st.lists(asked(), min_size=1, max_size=15))
@settings(max_examples=150)
def test_no_window_holds_more_than_its_rate_a_minutes_worth_and_one_request(people: list[Asked]) -> None:
    arrivals, told, started = play(people)
    assert started == sorted(started), "in the order of arrival"
    for arrival, at, start in zip(arrivals, told, started, strict=True):
        assert arrival <= start <= at + 1e-6, "nobody waits for longer than they were told"
    back = [(start + person.lasts, person.unused) for start, person in zip(started, people, strict=True)]
    for first, last in itertools.combinations_with_replacement(range(len(people)), 2):
        taken = sum(person.tokens for person in people[first : last + 1])
        window_s = started[last] - started[first]
        given_back = sum(unused for at, unused in back if started[first] <= at <= started[last])
        beyond = max(0, people[last].tokens - PER_MINUTE)
        assert taken <= window_s * PER_MINUTE / 60 + PER_MINUTE + given_back + beyond + 1e-6


@given(st.lists(asked(), min_size=1, max_size=15))
@settings(max_examples=50)
def test_whoever_comes_when_there_is_enough_starts_at_once(people: list[Asked]) -> None:
    spaced = [Asked(60.0, min(person.tokens, PER_MINUTE), 0, 0.0) for person in people]
    arrivals, _, started = play(spaced)
    assert started == arrivals


def test_a_minutes_worth_at_once_then_at_the_rate() -> None:
    bucket = TokenBucket(PER_MINUTE, 0.0)
    turns = [bucket.take(20, 0.0) for _ in range(6)]
    assert [bucket.left_s(turn, 0.0) for turn in turns] == [0, 0, 0, 20, 40, 60]
    assert bucket.left_s(turns[4], 15.0) == 25


def test_more_than_a_minutes_worth_starts_when_the_bucket_is_full_and_leaves_a_debt() -> None:
    bucket = TokenBucket(PER_MINUTE, 0.0)
    bucket.take(10, 0.0)
    large = bucket.take(10 * PER_MINUTE, 0.0)
    assert bucket.left_s(large, 0.0) == 10, "until it is full"
    after = bucket.take(1, 0.0)
    assert bucket.left_s(after, 0.0) == pytest.approx(10 + 9 * 60 + 1)


def test_giving_back_moves_everybody_up() -> None:
    bucket = TokenBucket(PER_MINUTE, 0.0)
    bucket.take(PER_MINUTE, 0.0)
    turns = [bucket.take(30, 0.0), bucket.take(30, 0.0)]
    bucket.give_back(25, 0.0)
    assert [bucket.left_s(turn, 0.0) for turn in turns] == [5, 35]


def test_a_bucket_never_holds_more_than_a_minutes_worth() -> None:
    bucket = TokenBucket(PER_MINUTE, 0.0)
    bucket.give_back(1000, 500.0)
    assert bucket.full(500.0)
    assert bucket.wait_s(PER_MINUTE, 500.0) == 0
    bucket.take(PER_MINUTE, 500.0)
    assert bucket.wait_s(1, 500.0) == 1


def test_another_rate_is_for_those_who_wait_too() -> None:
    bucket = TokenBucket(PER_MINUTE, 0.0)
    bucket.take(PER_MINUTE, 0.0)
    turn = bucket.take(PER_MINUTE, 0.0)
    bucket.change_rate(10 * PER_MINUTE, 0.0)
    assert bucket.left_s(turn, 0.0) == 6
    bucket.change_rate(PER_MINUTE // 2, 1.0)
    assert bucket.left_s(turn, 1.0) == 100
    assert not bucket.full(1.0)


def test_what_others_have_promised_is_owed_once() -> None:
    bucket = TokenBucket(PER_MINUTE, 0.0)
    assert [bucket.left_s(bucket.owe(seconds, 0.0), 0.0) for seconds in (30, 10)] == [30, 10]
    assert bucket.left_s(bucket.take(5, 0.0), 0.0) == 35


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(PER_MINUTE, 100.0)
    turn = bucket.take(2 * PER_MINUTE, 100.0)
    late = bucket.take(1, 50.0)
    assert bucket.left_s(turn, 50.0) == 0
    assert bucket.left_s(late, 100.0) == 61
