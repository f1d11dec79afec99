"""Commands that are not to start yet: they keep their place in their model's order, and hold up nobody else."""

from __future__ import annotations

import itertools

from skyrl.engine.scheduler import Scheduler
from skyrl.types.command import Command
from skyrl.types.kinds import Kind

_numbers = itertools.count(1)
NOON, ONE, TWO = 1000.0, 2000.0, 3000.0


def command(model: str | None, seq: int | None, start: float | None = None, kind: Kind = Kind.FORWARD) -> Command:
    n = next(_numbers)
    sampler = "ss" if kind is Kind.SAMPLE else None
    return Command(n, f"r{n}", kind, f"tenant of {model}", "session", model, seq, sampler, seq, "json", 10, start)


def scheduler(*commands: Command) -> Scheduler:
    made = Scheduler(1_000_000)
    for each in commands:
        made.add(each)
    return made


def ran(queue: Scheduler, now: float) -> list[tuple[str | None, int | None]]:
    """What one turn at that time runs."""
    queue.start_due(now)
    models = queue.ready_models()
    taken = queue.take_passes(models)
    queue.finish(taken)
    for more in (queue.take_file_commands(), queue.take_barriers(models), queue.take_samples()):
        queue.finish(more)
        taken += more
    return [(each.model_id, each.seq_id) for each in taken]


def test_a_command_waits_for_its_time_and_its_model_for_the_command() -> None:
    queue = scheduler(command("a", 0), command("a", 1, ONE), command("a", 2), command("b", 0))
    assert ran(queue, NOON) == [("a", 0), ("b", 0)]
    assert not queue.has_work, "the engine sleeps"
    assert queue.next_start == ONE
    assert queue.waiting == 2
    assert ran(queue, ONE) == [("a", 1), ("a", 2)]
    assert queue.next_start is None


def test_the_earliest_comes_first_whatever_the_arrival() -> None:
    queue = scheduler(command("a", 0, TWO), command("b", 0, ONE))
    assert queue.next_start == ONE
    assert ran(queue, ONE) == [("b", 0)]
    assert queue.next_start == TWO


def test_time_that_has_passed_already_holds_nothing_up() -> None:
    queue = scheduler(command("a", 0, ONE))
    assert ran(queue, TWO) == [("a", 0)]


def test_an_unload_comes_after_what_its_model_was_told_before() -> None:
    early, unload = command("a", 0, ONE), command("a", None, kind=Kind.UNLOAD_MODEL)
    queue = scheduler(early, unload, command("b", None, kind=Kind.UNLOAD_MODEL))
    assert ran(queue, NOON) == [("b", None)]
    assert ran(queue, ONE) == [("a", 0), ("a", None)]


def test_samples_of_the_engine_wait_too() -> None:
    queue = scheduler(command(None, 7, ONE, Kind.SAMPLE), command(None, 8, kind=Kind.SAMPLE))
    assert ran(queue, NOON) == [(None, 8)]
    assert not queue.has_work
    assert ran(queue, ONE) == [(None, 7)]


def test_a_closed_model_leaves_nothing_to_start() -> None:
    gone, other = command("a", 0, ONE), command("b", 0, TWO)
    queue = scheduler(gone, other)
    assert queue.close_model("a") == [gone]
    assert queue.next_start == TWO
    assert ran(queue, TWO) == [("b", 0)]


def test_what_waits_for_its_time_is_not_read_from_the_log_again() -> None:
    first, delayed = command("a", 0), command("a", 1, ONE)
    queue = scheduler(first, delayed)
    ran(queue, NOON)
    assert queue.last_row == delayed.n
