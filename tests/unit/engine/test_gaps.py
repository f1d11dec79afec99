"""How long commands wait for a number that has not arrived."""

from __future__ import annotations

import itertools
from dataclasses import replace

from skyrl.base.types.requests import Command, Kind
from skyrl.engine.command_log import Gaps
from skyrl.engine.scheduler import Scheduler

_rows = itertools.count(1)


def command(seq: int | None, kind: Kind = Kind.FORWARD_BACKWARD) -> Command:
    row = next(_rows)
    return Command(row, f"r{row}", kind, "tenant", "session", "m", seq, None, None, "json", 10)


class World:
    """A model that has run its first command, and its gaps, with a bound of a minute."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(1_000_000)
        self.scheduler.open_model("m", next_seq=1)
        self.gaps = Gaps(60.0)

    def overdue(self, now: float) -> dict[str, int]:
        return self.gaps.overdue(self.scheduler.views(), now)


def test_a_number_is_overdue_after_the_bound() -> None:
    world = World()
    world.scheduler.add(command(2))
    assert [world.overdue(now) for now in (0.0, 59.0, 60.0)] == [{}, {}, {"m": 1}]


def test_each_arrival_of_the_model_begins_the_time_again() -> None:
    """The SDK sends the first chunk of a pass after all other chunks."""
    world = World()
    for now, seq in ((0.0, 4), (50.0, 3), (100.0, 2)):
        world.scheduler.add(command(seq))
        assert world.overdue(now) == {}
    assert [world.overdue(now) for now in (159.0, 160.0)] == [{}, {"m": 1}]


def test_the_time_begins_when_the_earlier_command_has_ended() -> None:
    """Until then the client may compute a custom loss from a result that it does not have yet."""
    world = World()
    world.scheduler.add(command(1))
    world.scheduler.add(command(3))
    taken = world.scheduler.take_passes(["m"])
    assert world.overdue(0.0) == {}
    world.scheduler.finish(taken)
    assert [world.overdue(now) for now in (100.0, 159.0, 160.0)] == [{}, {}, {"m": 2}]


def test_a_number_that_has_arrived_is_waited_for_as_before() -> None:
    world = World()
    world.scheduler.add(command(2))
    assert world.overdue(0.0) == {}
    world.scheduler.add(replace(command(1), not_before=1e9))
    assert world.overdue(60.0) == {}, "the quota delays it"


def test_a_model_that_is_held_or_unloaded_misses_nothing() -> None:
    world = World()
    world.scheduler.add(command(2))
    world.scheduler.hold("m")
    assert [world.overdue(now) for now in (0.0, 100.0)] == [{}, {}]
    world.scheduler.release("m")
    assert world.overdue(200.0) == {}
    world.scheduler.add(command(None, Kind.UNLOAD_MODEL))
    assert world.overdue(260.0) == {}
