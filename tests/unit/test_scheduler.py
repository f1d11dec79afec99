"""Whose command is next: order within a model, barriers, shares between models."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict

import pytest

from skyrl.engine.commands import Command
from skyrl.engine.scheduler import Scheduler
from skyrl.futures.kinds import Kind

_numbers = itertools.count(1)


def command(model: str, seq: int, kind: Kind = Kind.FORWARD_BACKWARD, size: int = 10) -> Command:
    n = next(_numbers)
    return Command(n, f"r{n}", kind, "tenant", "session", model, seq, None, None, "json", size)


def barrier(model: str, seq: int) -> Command:
    return command(model, seq, Kind.OPTIM_STEP)


def sample() -> Command:
    n = next(_numbers)
    return Command(n, f"r{n}", Kind.SAMPLE, "tenant", "session", None, None, "ss", 0, "json", 10)


def scheduler(*commands: Command, budget: int = 1_000_000) -> Scheduler:
    made = Scheduler(budget)
    for each in commands:
        made.add(each)
    return made


def passes_of(queue: Scheduler) -> list[Command]:
    """The passes of a new turn, of all ready models together, settled."""
    passes = queue.take_passes(queue.ready_models())
    queue.finish(passes)
    return passes


def barriers_of(queue: Scheduler) -> list[Command]:
    """The barriers and saves whose turn it is, settled."""
    barriers = [*queue.take_beside(), *queue.take_barriers("abcdefm")]
    queue.finish(barriers)
    return barriers


def places(commands: list[Command]) -> list[tuple[str | None, int | None]]:
    return [(each.model_id, each.seq_id) for each in commands]


@pytest.mark.parametrize("arrival", list(itertools.permutations([0, 1, 2])))
def test_order_is_by_number_whatever_the_arrival(arrival: tuple[int, ...]) -> None:
    queue = scheduler(*(command("m", seq) for seq in arrival))
    assert places(passes_of(queue)) == [("m", 0), ("m", 1), ("m", 2)]
    assert not queue.has_work


def test_later_numbers_wait_for_the_first() -> None:
    queue = scheduler(command("m", 2), command("m", 1))
    assert not queue.has_work
    assert queue.waiting == 2
    assert passes_of(queue) == []
    queue.add(command("m", 0))
    assert places(passes_of(queue)) == [("m", 0), ("m", 1), ("m", 2)]


def test_passes_go_up_to_the_next_barrier() -> None:
    queue = scheduler(command("m", 0), command("m", 1, Kind.FORWARD), barrier("m", 2), command("m", 3), barrier("m", 4))
    assert places(passes_of(queue)) == [("m", 0), ("m", 1)]
    assert passes_of(queue) == []
    assert places(barriers_of(queue)) == [("m", 2)]
    assert barriers_of(queue) == []
    assert places(passes_of(queue)) == [("m", 3)]
    assert places(barriers_of(queue)) == [("m", 4)]
    assert not queue.has_work


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.SAMPLE, Kind.EXTERNAL}))
def test_everything_but_passes_is_a_barrier(kind: Kind) -> None:
    queue = scheduler(command("m", 0, kind), command("m", 1))
    assert passes_of(queue) == []
    assert places(barriers_of(queue)) == [("m", 0)]


def test_one_barrier_per_model_and_turn() -> None:
    queue = scheduler(barrier("a", 0), barrier("a", 1), barrier("b", 0))
    assert places(barriers_of(queue)) == [("a", 0), ("b", 0)]
    assert places(barriers_of(queue)) == [("a", 1)]


def test_gap_holds_its_model_and_no_other() -> None:
    queue = scheduler(command("a", 0), command("a", 2), barrier("a", 3), command("b", 0), barrier("b", 1))
    assert places(passes_of(queue)) == [("a", 0), ("b", 0)]
    assert places(barriers_of(queue)) == [("b", 1)]
    assert not queue.has_work
    assert queue.waiting == 2
    queue.add(command("a", 1))
    assert places(passes_of(queue)) == [("a", 1), ("a", 2)]
    assert places(barriers_of(queue)) == [("a", 3)]


def test_long_queue_does_not_delay_a_short_one() -> None:
    queue = scheduler(*(command("long", seq, size=100) for seq in range(1_000)), budget=1_000)
    assert len(passes_of(queue)) == 10, "alone it has the whole budget"
    queue.add(command("short", 0, size=100))
    turn = passes_of(queue)
    assert ("short", 0) in places(turn), "it runs in the very next turn"
    assert len(turn) == 5 + 1, "the other keeps its half"


def test_shares_are_equal_and_every_model_gets_at_least_one_pass() -> None:
    queue = scheduler(
        *(command(model, seq, size=100) for model in "abcd" for seq in range(50)),
        command("huge", 0, size=1_000_000),
        budget=1_000,
    )
    turn = passes_of(queue)
    assert {model: sum(1 for c in turn if c.model_id == model) for model in "abcd"} == dict.fromkeys("abcd", 2)
    assert ("huge", 0) in places(turn)


def test_models_take_turns_at_going_first() -> None:
    queue = scheduler(*(command(model, seq, size=100) for model in "abc" for seq in range(3)), budget=1)
    assert [passes_of(queue)[0].model_id for _ in range(3)] == ["a", "b", "c"]


def test_number_whose_turn_has_passed_runs_when_nothing_else_can() -> None:
    queue = scheduler()
    queue.open_model("m", next_seq=10)
    queue.add(command("m", 4))
    queue.add(command("m", 3))
    queue.add(command("m", 10))
    assert places(passes_of(queue)) == [("m", 10), ("m", 3), ("m", 4)]
    queue.add(command("m", 11))
    assert places(passes_of(queue)) == [("m", 11)], "the late ones did not set the model back"


def test_opening_again_keeps_the_place() -> None:
    queue = scheduler()
    queue.open_model("m", next_seq=7)
    queue.open_model("m", next_seq=0)
    queue.add(command("m", 7))
    assert places(passes_of(queue)) == [("m", 7)]


def test_samples_are_taken_all_at_once() -> None:
    samples = [sample(), sample()]
    queue = scheduler(*samples)
    assert queue.has_work
    assert queue.waiting == 2
    assert queue.take_samples() == samples
    assert queue.take_samples() == []
    assert not queue.has_work


def test_closed_model_is_gone_with_its_queue() -> None:
    queue = scheduler(command("a", 0), command("a", 5), command("b", 0))
    assert "a" in queue
    assert sorted(places(queue.close_model("a"))) == [("a", 0), ("a", 5)]
    assert "a" not in queue
    assert queue.close_model("a") == []
    assert places(passes_of(queue)) == [("b", 0)]


def test_last_row_is_the_newest_that_still_waits() -> None:
    first, second, third = command("m", 5), command("m", 0), sample()
    queue = scheduler(first, second, third)
    assert queue.last_row == third.n
    queue.finish(queue.take_samples())
    passes_of(queue)
    assert queue.last_row == first.n
    queue.close_model("m")
    assert queue.last_row == 0


@pytest.mark.parametrize("seed", range(30))
def test_any_interleaving_keeps_every_models_order(seed: int) -> None:
    """Random kinds, sizes, arrivals and turns: each command once, by number, never a pass across a barrier."""
    rng = random.Random(seed)
    arrivals: list[Command] = []
    for model in "abcdef"[: rng.randint(1, 6)]:
        for seq in range(rng.randint(1, 30)):
            kind = rng.choice([Kind.FORWARD_BACKWARD, Kind.FORWARD, Kind.OPTIM_STEP, Kind.SAVE_WEIGHTS])
            arrivals.append(command(model, seq, kind, rng.randint(1, 400)))
    expected = defaultdict(list)
    for each in arrivals:
        expected[each.model_id].append(each.seq_id)
    rng.shuffle(arrivals)
    queue, ran = Scheduler(1_000), defaultdict(list)
    while arrivals or queue.waiting:
        for _ in range(rng.randint(0, 6)):
            if arrivals:
                queue.add(arrivals.pop())
        passes = passes_of(queue)
        assert all(each.is_pass for each in passes)
        for _ in range(rng.randint(0, 2)):  # the engine reads its log again between passes and barriers
            if arrivals:
                queue.add(arrivals.pop())
        barriers = barriers_of(queue)
        assert not any(each.is_pass for each in barriers)
        assert len({each.model_id for each in barriers}) == len(barriers)
        for each in (*passes, *barriers):
            ran[each.model_id].append(each.seq_id)
    assert ran == expected
    assert queue.waiting == 0


def test_a_model_has_no_next_command_while_one_runs() -> None:
    queue = scheduler(command("m", 0), command("n", 0), barrier("m", 1))
    running = queue.take_passes(["m"])
    assert places(running) == [("m", 0)]
    assert queue.ready_models() == ["n"]
    assert queue.take_barriers(["m", "n"]) == []
    assert queue.last_row >= running[0].n
    queue.finish(running)
    assert places(queue.take_barriers(["m"])) == [("m", 1)]


def test_saves_are_no_part_of_a_turn() -> None:
    queue = scheduler(command("m", 0, Kind.SAVE_WEIGHTS_FOR_SAMPLER), command("n", 0), command("m", 1))
    assert queue.ready_models() == ["n"]
    assert queue.take_barriers(["m"]) == []
    saves = queue.take_beside()
    assert places(saves) == [("m", 0)]
    assert queue.take_beside() == []
    assert queue.ready_models() == ["n"], "what comes after the save waits for it"
    queue.finish(saves)
    assert set(queue.ready_models()) == {"m", "n"}


def unload(model: str) -> Command:
    n = next(_numbers)
    return Command(n, f"r{n}", Kind.UNLOAD_MODEL, "tenant", "session", model, None, None, None, "json", 10)


def test_unload_comes_after_what_arrived_before_it_and_before_what_came_later() -> None:
    first, step, last, later = command("m", 0), barrier("m", 1), unload("m"), command("m", 2)
    queue = scheduler(last, later, step, first)
    assert places(passes_of(queue)) == [("m", 0)]
    assert places(barriers_of(queue)) == [("m", 1)]
    assert passes_of(queue) == []
    assert barriers_of(queue) == [last]
    assert queue.close_model("m") == [later]


def test_unload_does_not_wait_for_a_missing_number() -> None:
    stuck, last = command("m", 3), unload("m")
    queue = scheduler(stuck, last)
    assert queue.waiting == 2
    assert queue.last_row == last.n
    assert barriers_of(queue) == [last]
    assert queue.close_model("m") == [stuck]


def test_suspects_run_alone_and_before_all_others() -> None:
    commands = [command("a", 0), command("a", 1), command("a", 2), command("b", 0), barrier("b", 1), command("c", 0)]
    queue = scheduler(*commands)
    queue.suspect([commands[1].request_id, commands[3].request_id, commands[4].request_id])
    batches: list[list[tuple[str | None, int | None]]] = []
    while queue.has_work:
        models = queue.ready_models()
        for batch in (queue.take_passes(models), queue.take_barriers(models)):
            if batch:
                batches.append(places(batch))
            queue.finish(batch)
    assert batches[0] == [("b", 0)], "due at once, so nothing of other models runs before it"
    assert Counter(itertools.chain(*batches)) == Counter(places(commands))
    alone = {("a", 1), ("b", 0), ("b", 1)}
    assert all(len(batch) == 1 for batch in batches if alone & set(batch)), batches


def test_a_suspect_waits_for_what_runs_and_others_wait_for_it() -> None:
    save, step, other = command("a", 0, Kind.SAVE_WEIGHTS), barrier("b", 0), command("c", 0, Kind.SAVE_WEIGHTS)
    queue = scheduler(save)
    assert queue.take_beside() == [save]
    for each in (step, other):
        queue.add(each)
    queue.suspect([step.request_id])
    assert not queue.has_work
    assert queue.take_beside() == []
    queue.finish([save])
    assert queue.take_barriers(queue.ready_models()) == [step]
    assert queue.take_beside() == []
    queue.finish([step])
    assert queue.take_beside() == [other]


def test_a_suspect_of_a_closed_model_holds_nobody_up() -> None:
    poison, other = command("a", 0), command("b", 0)
    queue = scheduler(poison, other)
    queue.suspect([poison.request_id])
    assert queue.take_passes(["b"]) == []
    queue.close_model("a")
    assert queue.take_passes(["b"]) == [other]
