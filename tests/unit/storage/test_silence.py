"""Which sessions count as silent: by heartbeats that do not change, and not by clocks of other processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from skyrl.storage.db import sessions
from skyrl.storage.db.sessions import LONG_LOOK_S, Continuity, SilenceWatch

TIMEOUT_S = 300.0


class Clock:
    """Both clocks of the process that looks. `ahead_s` is how far its wall clock is ahead of the clients' server."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.now, self.ahead_s = 1_000.0, ahead_s

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + self.ahead_s


class World:
    """Looks every 5 s at one session that was last heard of at `heard_at`."""

    def __init__(self, clock: Clock) -> None:
        self.continuity = Continuity()
        self.clock, self.watch, self.heard_at = clock, SilenceWatch(self.continuity), clock.now
        self.unwatched: list[str] = []

    def look(self) -> list[str]:
        old = {"s": self.heard_at} if self.heard_at <= self.watch.oldest_fresh(TIMEOUT_S) else {}
        silent, self.unwatched = self.watch.look(old, TIMEOUT_S)
        return silent

    def silent_after(self) -> float:
        """Seconds from the heartbeat until the session counts as silent."""
        while not self.look():
            self.clock.now += 5
            assert self.clock.now < self.heard_at + 9 * TIMEOUT_S
        return self.clock.now - self.heard_at


@pytest.fixture
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    clock = Clock(getattr(request, "param", 0.0))
    monkeypatch.setattr(sessions, "time", SimpleNamespace(monotonic=clock.monotonic, time=clock.time))
    return World(clock)


def run_for(world: World, seconds: float) -> None:
    """Look every 5 s, while heartbeats come."""
    for _ in range(int(seconds / 5)):
        world.clock.now += 5
        world.heard_at = world.clock.now
        assert world.look() == []


def test_a_session_is_silent_after_the_timeout(world: World) -> None:
    run_for(world, 2 * TIMEOUT_S)
    assert world.silent_after() == TIMEOUT_S


@pytest.mark.parametrize(
    ("world", "expected"),
    [(100.0, TIMEOUT_S - 100), (10_000.0, TIMEOUT_S / 2), (-100.0, TIMEOUT_S + 100)],
    indirect=["world"],
)
def test_a_wrong_clock_moves_the_end_but_never_before_half_the_timeout(world: World, expected: float) -> None:
    run_for(world, 2 * TIMEOUT_S)
    assert world.silent_after() == expected


def test_no_session_is_silent_before_the_process_has_looked_for_the_timeout(world: World) -> None:
    world.heard_at -= 5 * TIMEOUT_S
    began = world.clock.now
    world.silent_after()
    assert world.clock.now - began == TIMEOUT_S


def test_time_without_looks_does_not_count(world: World) -> None:
    """As while the database is away; what others ask meanwhile is no look."""
    run_for(world, 2 * TIMEOUT_S)
    for _ in range(int((TIMEOUT_S + LONG_LOOK_S) / 5)):
        world.clock.now += 5
        assert world.continuity.seconds >= 0
    looked_again_at = world.clock.now
    world.silent_after()
    assert world.clock.now - looked_again_at == TIMEOUT_S


@pytest.mark.parametrize("ahead_s", [LONG_LOOK_S + 1, -LONG_LOOK_S - 1])
def test_a_clock_that_is_set_and_a_suspended_machine_are_gaps(world: World, ahead_s: float) -> None:
    """The monotonic clock of a suspended machine stands still."""
    continuity = Continuity()
    world.clock.now += 15
    assert continuity.look() == 15
    world.clock.ahead_s += ahead_s
    assert continuity.look() == 0
    world.clock.now += 5
    assert continuity.look() == 5


def test_a_heartbeat_at_any_process_ends_the_watch_and_is_told_once(world: World) -> None:
    run_for(world, 2 * TIMEOUT_S)
    for _ in range(int(TIMEOUT_S * 0.9 / 5)):
        world.clock.now += 5
        assert world.look() == []
    world.heard_at = world.clock.now
    assert (world.look(), world.unwatched) == ([], ["s"])
    assert (world.look(), world.unwatched) == ([], [])
    assert world.silent_after() == TIMEOUT_S
