"""Commands with a start time: they keep their place in their model's order, and delay no other model."""

from __future__ import annotations

import itertools

from skyrl.base.types.requests import Command, Kind
from skyrl.engine.scheduler import Scheduler

_numbers = itertools.count(1)
NOON, ONE, TWO = 1000.0, 2000.0, 3000.0


def command(model: str | None, seq: int | None, start: float | None = None, kind: Kind = Kind.FORWARD) -> Command:
    row = next(_numbers)
    sampler = "ss" if kind is Kind.SAMPLE else None
    return Command(row, f"r{row}", kind, f"tenant of {model}", "session", model, seq, sampler, seq, "json", 10, start)


def scheduler(*commands: Command) -> Scheduler:
    queue = Scheduler(1_000_000)
    for added in commands:
        queue.add(added)
    return queue


def run_turn(queue: Scheduler, now: float) -> list[tuple[str | None, int | None]]:
    """Run one turn at the time `now`; returns model and number of each command that ran."""
    queue.start_due(now)
    models = queue.ready_models()
    taken = queue.take_passes(models)
    queue.finish(taken)
    for batch in (queue.take_file_commands(), queue.take_exclusive(models), queue.take_samples()):
        queue.finish(batch)
        taken += batch
    return [(item.model_id, item.seq_id) for item in taken]


def test_a_command_waits_for_its_time_and_the_models_later_commands_wait_for_it() -> None:
    queue = scheduler(command("a", 0), command("a", 1, ONE), command("a", 2), command("b", 0))
    assert run_turn(queue, NOON) == [("a", 0), ("b", 0)]
    assert not queue.has_work, "the engine has nothing to run before ONE"
    assert queue.next_start == ONE
    assert queue.waiting == 2
    assert run_turn(queue, ONE) == [("a", 1), ("a", 2)]
    assert queue.next_start is None


def test_the_earliest_start_comes_first_whatever_arrives_first() -> None:
    queue = scheduler(command("a", 0, TWO), command("b", 0, ONE))
    assert queue.next_start == ONE
    assert run_turn(queue, ONE) == [("b", 0)]
    assert queue.next_start == TWO


def test_a_start_time_in_the_past_delays_nothing() -> None:
    queue = scheduler(command("a", 0, ONE))
    assert run_turn(queue, TWO) == [("a", 0)]


def test_an_unload_waits_for_the_models_earlier_delayed_commands() -> None:
    early, unload = command("a", 0, ONE), command("a", None, kind=Kind.UNLOAD_MODEL)
    queue = scheduler(early, unload, command("b", None, kind=Kind.UNLOAD_MODEL))
    assert run_turn(queue, NOON) == [("b", None)]
    assert run_turn(queue, ONE) == [("a", 0), ("a", None)]


def test_a_sample_of_the_engine_waits_for_its_start_time() -> None:
    queue = scheduler(command(None, 7, ONE, Kind.SAMPLE), command(None, 8, kind=Kind.SAMPLE))
    assert run_turn(queue, NOON) == [(None, 8)]
    assert not queue.has_work
    assert run_turn(queue, ONE) == [(None, 7)]


def test_closing_a_model_removes_its_delayed_commands() -> None:
    removed, other = command("a", 0, ONE), command("b", 0, TWO)
    queue = scheduler(removed, other)
    assert queue.close_model("a") == [removed]
    assert queue.next_start == TWO
    assert run_turn(queue, TWO) == [("b", 0)]


def test_a_delayed_command_is_not_read_from_the_log_again() -> None:
    first, delayed = command("a", 0), command("a", 1, ONE)
    queue = scheduler(first, delayed)
    run_turn(queue, NOON)
    assert queue.last_row == delayed.n
