"""The scheduler: order within a model, exclusive commands, and shares of tenants and of their models."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.base.types.requests import Command, Kind
from skyrl.engine.queues import ModelQueue, ModelView
from skyrl.engine.scheduler import (
    EXCLUSIVE_COST,
    FILES_AT_ONCE,
    SAMPLES_AT_ONCE,
    STEP_SHARES,
    Scheduler,
    cost_of,
)

_numbers = itertools.count(1)


def command(
    model: str, seq: int, kind: Kind = Kind.FORWARD_BACKWARD, size: int = 10, tenant: str = "tenant"
) -> Command:
    row = next(_numbers)
    return Command(row, f"r{row}", kind, tenant, "session", model, seq, None, None, "json", size)


def exclusive_command(model: str, seq: int) -> Command:
    return command(model, seq, Kind.OPTIM_STEP)


def sample(tenant: str = "tenant") -> Command:
    row = next(_numbers)
    return Command(row, f"r{row}", Kind.SAMPLE, tenant, "session", None, None, "ss", 0, "json", 10)


def scheduler(*commands: Command, budget: int = 1_000_000) -> Scheduler:
    queue = Scheduler(budget)
    for added in commands:
        queue.add(added)
    return queue


def passes_of(queue: Scheduler) -> list[Command]:
    """Take and finish the passes of a new turn, of all ready models together."""
    passes = queue.take_passes(queue.ready_models())
    queue.finish(passes)
    return passes


def exclusive_of(queue: Scheduler) -> list[Command]:
    """Take and finish the exclusive commands and saves that may run now."""
    exclusive = [*queue.take_file_commands(), *queue.take_exclusive("abcdefm")]
    queue.finish(exclusive)
    return exclusive


def model_and_number(commands: list[Command]) -> list[tuple[str | None, int | None]]:
    return [(item.model_id, item.seq_id) for item in commands]


@pytest.mark.parametrize("arrival", list(itertools.permutations([0, 1, 2])))
def test_passes_of_a_model_run_in_order_of_number_whatever_the_arrival(arrival: tuple[int, ...]) -> None:
    queue = scheduler(*(command("m", seq) for seq in arrival))
    assert model_and_number(passes_of(queue)) == [("m", 0), ("m", 1), ("m", 2)]
    assert not queue.has_work


def test_commands_wait_for_a_missing_lower_number() -> None:
    queue = scheduler(command("m", 2), command("m", 1))
    assert not queue.has_work
    assert queue.waiting == 2
    assert passes_of(queue) == []
    queue.add(command("m", 0))
    assert model_and_number(passes_of(queue)) == [("m", 0), ("m", 1), ("m", 2)]


def test_a_turn_takes_passes_up_to_the_next_exclusive_command() -> None:
    queue = scheduler(
        command("m", 0),
        command("m", 1, Kind.FORWARD),
        exclusive_command("m", 2),
        command("m", 3),
        exclusive_command("m", 4),
    )
    assert model_and_number(passes_of(queue)) == [("m", 0), ("m", 1)]
    assert passes_of(queue) == []
    assert model_and_number(exclusive_of(queue)) == [("m", 2)]
    assert exclusive_of(queue) == []
    assert model_and_number(passes_of(queue)) == [("m", 3)]
    assert model_and_number(exclusive_of(queue)) == [("m", 4)]
    assert not queue.has_work


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.SAMPLE, Kind.EXTERNAL}))
def test_every_command_but_a_pass_is_an_exclusive_command(kind: Kind) -> None:
    queue = scheduler(command("m", 0, kind), command("m", 1))
    assert passes_of(queue) == []
    assert model_and_number(exclusive_of(queue)) == [("m", 0)]


def test_a_turn_takes_one_exclusive_command_of_each_model() -> None:
    queue = scheduler(exclusive_command("a", 0), exclusive_command("a", 1), exclusive_command("b", 0))
    assert model_and_number(exclusive_of(queue)) == [("a", 0), ("b", 0)]
    assert model_and_number(exclusive_of(queue)) == [("a", 1)]


def test_a_missing_number_delays_its_model_and_no_other() -> None:
    queue = scheduler(
        command("a", 0), command("a", 2), exclusive_command("a", 3), command("b", 0), exclusive_command("b", 1)
    )
    assert model_and_number(passes_of(queue)) == [("a", 0), ("b", 0)]
    assert model_and_number(exclusive_of(queue)) == [("b", 1)]
    assert not queue.has_work
    assert queue.waiting == 2
    queue.add(command("a", 1))
    assert model_and_number(passes_of(queue)) == [("a", 1), ("a", 2)]
    assert model_and_number(exclusive_of(queue)) == [("a", 3)]


def count_by_model(commands: list[Command]) -> Counter[str | None]:
    return Counter(item.model_id for item in commands)


def test_a_models_long_queue_does_not_delay_another_models_pass() -> None:
    queue = scheduler(*(command("long", seq, size=100) for seq in range(1_000)), budget=1_000)
    assert len(passes_of(queue)) == 10, "one model alone gets the whole budget"
    queue.add(command("short", 0, size=100))
    turn = passes_of(queue)
    assert ("short", 0) in model_and_number(turn), "the new pass runs in the next turn"
    assert count_by_model(turn) == {"short": 1, "long": 9}, "the long queue gets the rest of the budget"


def step(model: str, passes: int, size: int = 100, first: int = 0) -> list[Command]:
    """The commands of one step, of a tenant with this one model."""
    last = first + passes
    forward = [command(model, seq, size=size, tenant=model) for seq in range(first, last)]
    return [*forward, command(model, last, Kind.OPTIM_STEP, tenant=model)]


STEP_OF_TWO = ((0, Kind.FORWARD_BACKWARD), (1, Kind.FORWARD_BACKWARD), (2, Kind.OPTIM_STEP))


def order_of_passes(queue: Scheduler, count: int) -> str:
    """The models of the next passes, one letter each."""
    taken: list[Command] = []
    while len(taken) < count:
        taken += passes_of(queue)
        queue.finish(queue.take_exclusive(queue.ready_models()))
    return "".join(str(item.model_id) for item in taken)


def test_a_step_that_has_begun_ends_before_another_tenants_step() -> None:
    """If steps took turns pass by pass, all tenants would wait until the last pass of all."""
    queue = scheduler(*step("a", 6), *step("b", 6), budget=200)
    assert order_of_passes(queue, 12) == "aaaaaabbbbbb"


def test_a_step_that_has_begun_ends_before_an_equal_step_that_arrives_later() -> None:
    queue = scheduler(*step("b", 6), budget=200)
    assert model_and_number(passes_of(queue)) == [("b", 0), ("b", 1)]
    for added in step("a", 6):
        queue.add(added)
    assert order_of_passes(queue, 10) == "bbbbaaaaaa"


def test_passes_that_have_arrived_run_in_one_go_also_without_their_exclusive_command() -> None:
    queue = scheduler(*step("a", 4)[:-1], *step("b", 4)[:-1], budget=200)
    assert order_of_passes(queue, 8) == "aaaabbbb"


def test_a_small_step_goes_before_the_rest_of_a_large_step() -> None:
    queue = scheduler(*step("a", 12), budget=200)
    begun = order_of_passes(queue, 4)
    for added in [*step("b", 1), command("c", 0, Kind.FORWARD, size=100, tenant="c")]:
        queue.add(added)
    assert begun + order_of_passes(queue, 10) == "aaaa" + "bc" + "aaaaaaaa"


def test_a_step_of_many_shares_takes_turns_until_its_last_eight() -> None:
    turns, whole = 40 - 2 * STEP_SHARES, 2 * STEP_SHARES
    queue = scheduler(*step("a", 40), *step("b", 40), budget=200)
    assert order_of_passes(queue, 80) == "ab" * turns + "a" * whole + "b" * whole


@pytest.mark.parametrize("size", [5_000, 20_000, 100_000])
def test_small_steps_delay_a_large_step_until_their_tenant_has_had_as_much(size: int) -> None:
    """A tenant whose next small step always waits cannot keep out a large step, even one of more than eight shares."""
    budget, numbers = 10_000, itertools.count(0, 2)
    queue = scheduler(*step("large", 20, size=size), budget=budget)
    small, large = 0, 0
    while "large" in queue.ready_models():
        if "small" not in queue.ready_models():
            for added in step("small", 1, size=1_000, first=next(numbers)):
                queue.add(added)
        ready = queue.ready_models()
        taken = queue.take_passes(ready)
        queue.finish(taken)
        exclusive = queue.take_exclusive(ready)
        queue.finish(exclusive)
        cost = Counter[str | None]()
        for done in (*taken, *exclusive):
            cost[done.model_id] += cost_of(done)
        small, large = small + cost["small"], large + cost["large"]
        assert small <= large + STEP_SHARES * budget + cost["small"]
    assert large == 20 * size + EXCLUSIVE_COST


def test_a_small_step_of_a_tenant_that_has_had_much_waits_for_the_large_step() -> None:
    before = [command("b", seq, size=10_000, tenant="b") for seq in range(7)]
    queue = scheduler(*before, *step("a", 3, size=10_000), *step("c", 1, size=80_000), budget=10_000)
    assert order_of_passes(queue, 10) == "aaabbbbbbb"
    for added in step("a", 3, size=10_000, first=4):
        queue.add(added)
    begun = order_of_passes(queue, 1)
    queue.add(command("b", 7, size=1_000, tenant="b"))
    assert begun + order_of_passes(queue, 3) == "aaab"


def test_a_small_step_of_the_same_tenants_other_model_goes_first_too() -> None:
    own = [command(model, seq, size=1_000) for model, passes in (("large", 6), ("small", 1)) for seq in range(passes)]
    queue = scheduler(*own[:6], budget=1_000)
    begun = passes_of(queue)
    queue.add(own[6])
    taken = [*begun, *(item for _ in range(6) for item in passes_of(queue))]
    assert [item.model_id for item in taken] == ["large", "small", *["large"] * 5]


def test_small_steps_of_a_model_do_not_keep_out_a_large_step_of_the_same_tenant() -> None:
    queue = scheduler(*(command("large", seq, size=1_000) for seq in range(6)), budget=1_000)
    order: list[str | None] = []
    for seq in range(20):
        queue.add(command("small", seq, size=1_000))
        order += [item.model_id for item in passes_of(queue)]
    assert order == ["small"] * 6 + ["large"] * 6 + ["small"] * 8


def test_the_work_of_a_whole_step_counts_in_its_tenants_share() -> None:
    large = [*step("a", 2, size=10_000), *step("a", 2, size=10_000, first=3)]
    small = [*step("b", 1, size=10_000), *step("b", 1, size=10_000, first=2)]
    assert order_of_passes(scheduler(*large, *small, budget=10_000), 6) == "baabaa"


def test_the_passes_of_a_model_that_ends_within_its_step_count_in_its_tenants_share() -> None:
    own = [command(model, seq, kind, size=1_000, tenant="a") for model in ("a1", "a2") for seq, kind in STEP_OF_TWO]
    queue = scheduler(*own, *step("b", 1, size=2_500), budget=1_000)
    (taken,) = passes_of(queue)
    assert taken.tenant == "a"
    queue.finish([taken])
    queue.close_model(str(taken.model_id))
    (following,) = passes_of(queue)
    assert following.model_id == "b"


@pytest.mark.parametrize("seed", range(20))
def test_the_size_of_a_models_step_is_that_of_its_waiting_passes_up_to_the_exclusive_command(seed: int) -> None:
    rng = random.Random(seed)
    kinds = rng.choices([Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP], [6, 6, 1], k=40)
    arrivals = [command("m", seq, kind, rng.randint(1, 100)) for seq, kind in enumerate(kinds)]
    rng.shuffle(arrivals)
    queue = ModelQueue(0)
    while arrivals or queue.head() is not None:
        if arrivals and rng.random() < 0.6:
            queue.add(arrivals.pop())
        elif queue.head() is not None:
            queue.take()
        size, seq = 0, queue.next_seq
        while (waiting := queue.waiting.get(seq)) is not None and waiting.is_pass:
            size, seq = size + waiting.size, seq + 1
        assert queue.step_size == size


def test_shares_count_work_and_not_commands() -> None:
    queue = scheduler(
        *(command(model, seq, size=100) for model in "abcd" for seq in range(200)),
        *(command("huge", seq, size=10_000) for seq in range(2)),
        budget=1_000,
    )
    assert count_by_model(passes_of(queue)) == dict.fromkeys("abcd", 1), "a batch is no larger than the budget"
    assert model_and_number(passes_of(queue)) == [("huge", 0)], "a turn takes one pass, even if it exceeds the budget"
    for _ in range(40):
        others = count_by_model(passes_of(queue))
        assert sum(others.values()) == 10
        assert set(others) == set("abcd")
    assert model_and_number(passes_of(queue)) == [("huge", 1)], "each of the four has had as much"


def test_a_tenant_with_ten_models_gets_the_share_of_one_tenant() -> None:
    many = [command(f"m{model}", seq, size=100, tenant="many") for model in range(10) for seq in range(100)]
    few = [command("one", seq, size=100, tenant="few") for seq in range(100)]
    queue = scheduler(*many, *few, budget=1_000)
    both = passes_of(queue) + passes_of(queue)
    assert count_by_model(both) == {f"m{model}": 1 for model in range(10)} | {"one": 10}


def test_a_tenant_pays_little_for_work_done_while_it_was_alone() -> None:
    alone = [command("a", seq, size=100, tenant="first") for seq in range(200)]
    queue = scheduler(*alone, budget=1_000)
    for _ in range(3):
        passes_of(queue)
    for seq in range(200):
        queue.add(command("b", seq, size=100, tenant="second"))
    assert count_by_model(passes_of(queue) + passes_of(queue)) == {"b": 15, "a": 5}, (
        "the new tenant is less than one turn ahead"
    )


def share_of_one_model(queue: Scheduler) -> list[Command]:
    """Run one turn as the engine does without merged passes: commands of the first ready model, up to the budget."""
    ready = queue.ready_models()[:1]
    taken: list[Command] = []
    while sum(map(cost_of, taken)) < queue.budget:
        part = queue.take_passes(ready)
        queue.finish(part)
        exclusive = queue.take_exclusive(ready)
        queue.finish(exclusive)
        if not part and not exclusive:
            break
        taken += [*part, *exclusive]
    return taken


def all_together(queue: Scheduler) -> list[Command]:
    return passes_of(queue)


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 2),  # turns before the arrival
        st.sampled_from(["a", "b", "c"]),  # tenant
        st.integers(0, 3),  # number of the tenant's model
        st.booleans(),  # True: a pass; False: an optimizer step
        st.integers(1, 3_000),  # size
    ),
    max_size=80,
)


def step_size(view: ModelView) -> int:
    """The bytes of the model's waiting passes up to its next exclusive command."""
    size, numbered = 0, {item.seq_id: item for item in view.waiting}
    for seq in itertools.count(view.next_seq):
        item = numbered.get(seq)
        if item is None or not item.is_pass:
            return size
        size += item.size
    raise AssertionError


@pytest.mark.parametrize("run_turn", [share_of_one_model, all_together])
@settings(max_examples=100)
@given(arrivals=ARRIVALS)
def test_two_tenants_that_wait_get_about_the_same_work(run_turn, arrivals) -> None:
    """Over any stretch of turns in which two tenants always have a command that can run, the work done for them differs
    by at most the largest step of each, at most eight shares, and the largest share of each in one turn. With merged
    passes one budget more is allowed, for a turn in which a tenant runs out. The merged case has passes only: a merged
    turn takes one step of each model, however many the model has."""
    queue, numbers = Scheduler(2_000), Counter[str]()
    work_until_turn: list[Counter[str]] = [Counter()]
    ready_tenants: list[set[str]] = []
    largest, largest_step = Counter[str](), Counter[str]()
    pending = deque(arrivals)
    while pending or queue.has_work:
        for _ in range(8):
            if not pending or (pending[0][0] > 0 and queue.has_work):
                break
            _, tenant, number, is_pass, size = pending.popleft()
            model = f"{tenant}{number}"
            kind = Kind.FORWARD if is_pass or run_turn is all_together else Kind.OPTIM_STEP
            queue.add(command(model, numbers[model], kind, size, tenant))
            numbers[model] += 1
        if pending and pending[0][0] > 0:
            pending[0] = (pending[0][0] - 1, *pending[0][1:])
        ready_tenants.append({model[0] for model in queue.ready_models()})
        for model, view in queue.views().items():
            largest_step |= Counter({model[0]: min(step_size(view), STEP_SHARES * queue.budget)})
        work = Counter[str]()
        for done in run_turn(queue):
            work[done.tenant] += cost_of(done)
        work_until_turn.append(work_until_turn[-1] + work)
        largest |= work
    tolerance = queue.budget if run_turn is all_together else 0
    for one, other in itertools.combinations("abc", 2):
        start = 0
        for end in range(len(ready_tenants)):
            if not {one, other} <= ready_tenants[end]:
                start = end + 1
                continue
            for begin in range(start, end + 1):
                difference = (work_until_turn[end + 1][one] - work_until_turn[begin][one]) - (
                    work_until_turn[end + 1][other] - work_until_turn[begin][other]
                )
                steps = largest_step[one] + largest_step[other]
                assert abs(difference) <= steps + largest[one] + largest[other] + tolerance


def test_models_take_turns_at_being_first() -> None:
    queue = scheduler(*(command(model, seq, size=100) for model in "abc" for seq in range(3)), budget=1)
    assert [passes_of(queue)[0].model_id for _ in range(3)] == ["a", "b", "c"]


def test_a_missing_number_that_is_given_up_is_late_and_the_model_goes_on() -> None:
    queue = scheduler(command("m", 1), command("m", 0), command("m", 3), exclusive_command("m", 6))
    later = replace(command("m", 4), not_before=9.0)
    queue.add(later)
    assert model_and_number(passes_of(queue)) == [("m", 0), ("m", 1)]
    assert queue.views()["m"].missing == 2
    assert model_and_number(queue.give_up("m")) == [("m", 3), ("m", 4), ("m", 6)]
    assert queue.waiting == 0
    assert [queue.is_late(command("m", seq)) for seq in (2, 5, 7)] == [True, True, False]
    queue.add(command("m", 7))
    assert model_and_number(passes_of(queue)) == [("m", 7)]
    assert not queue.is_late(command("unknown", 0))


def test_opening_a_model_again_keeps_its_next_number() -> None:
    queue = scheduler()
    queue.open_model("m", next_seq=7)
    queue.open_model("m", next_seq=0)
    queue.add(command("m", 7))
    assert model_and_number(passes_of(queue)) == [("m", 7)]


def test_all_waiting_samples_are_taken_at_once() -> None:
    samples = [sample(), sample()]
    queue = scheduler(*samples)
    assert queue.has_work
    assert queue.waiting == 2
    assert queue.take_samples() == samples
    assert queue.take_samples() == []
    assert not queue.has_work


def test_many_samples_of_one_tenant_do_not_keep_out_another_tenants() -> None:
    many = [sample("many") for _ in range(2 * SAMPLES_AT_ONCE)]
    few = [sample("few") for _ in range(3)]
    queue = scheduler(*many, *few)
    turn = queue.take_samples()
    assert len(turn) == SAMPLES_AT_ONCE
    assert set(few) <= set(turn)
    assert [item for item in turn if item.tenant == "many"] == many[: SAMPLES_AT_ONCE - 3], "in order of arrival"
    assert queue.last_row == few[-1].n
    assert queue.waiting == len(many) + 3 - SAMPLES_AT_ONCE
    queue.finish(turn)
    rest = queue.take_samples() + queue.take_samples()
    assert [item.n for item in rest] == [item.n for item in many[SAMPLES_AT_ONCE - 3 :]]
    assert not queue.has_work


def test_closing_a_model_removes_its_commands() -> None:
    queue = scheduler(command("a", 0), command("a", 5), command("b", 0))
    assert "a" in queue
    assert sorted(model_and_number(queue.close_model("a"))) == [("a", 0), ("a", 5)]
    assert "a" not in queue
    assert queue.close_model("a") == []
    assert model_and_number(passes_of(queue)) == [("b", 0)]


def test_last_row_is_the_newest_waiting_row() -> None:
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
    """With random kinds, sizes, arrivals and turns, each command runs once, in order of number, and no pass runs before
    an earlier exclusive command or after a later one."""
    rng = random.Random(seed)
    arrivals: list[Command] = []
    for model in "abcdef"[: rng.randint(1, 6)]:
        for seq in range(rng.randint(1, 30)):
            kind = rng.choice([Kind.FORWARD_BACKWARD, Kind.FORWARD, Kind.OPTIM_STEP, Kind.SAVE_WEIGHTS])
            arrivals.append(command(model, seq, kind, rng.randint(1, 400)))
    expected = defaultdict(list)
    for arrival in arrivals:
        expected[arrival.model_id].append(arrival.seq_id)
    rng.shuffle(arrivals)
    queue, ran = Scheduler(1_000), defaultdict(list)
    while arrivals or queue.waiting:
        for _ in range(rng.randint(0, 6)):
            if arrivals:
                queue.add(arrivals.pop())
        passes = passes_of(queue)
        assert all(item.is_pass for item in passes)
        for _ in range(rng.randint(0, 2)):  # the engine reads its log again
            if arrivals:
                queue.add(arrivals.pop())
        exclusive = exclusive_of(queue)
        assert not any(item.is_pass for item in exclusive)
        assert len({item.model_id for item in exclusive}) == len(exclusive)
        for done in (*passes, *exclusive):
            ran[done.model_id].append(done.seq_id)
    assert ran == expected
    assert queue.waiting == 0


def test_a_model_is_not_ready_while_one_of_its_commands_runs() -> None:
    queue = scheduler(command("m", 0), command("n", 0), exclusive_command("m", 1))
    running = queue.take_passes(["m"])
    assert model_and_number(running) == [("m", 0)]
    assert queue.ready_models() == ["n"]
    assert queue.take_exclusive(["m", "n"]) == []
    assert queue.last_row >= running[0].n
    queue.finish(running)
    assert model_and_number(queue.take_exclusive(["m"])) == [("m", 1)]


def test_saves_are_taken_apart_from_turns() -> None:
    queue = scheduler(command("m", 0, Kind.SAVE_WEIGHTS_FOR_SAMPLER), command("n", 0), command("m", 1))
    assert queue.ready_models() == ["n"]
    assert queue.take_exclusive(["m"]) == []
    saves = queue.take_file_commands()
    assert model_and_number(saves) == [("m", 0)]
    assert queue.take_file_commands() == []
    assert queue.ready_models() == ["n"], "the command after the save waits for it"
    queue.finish(saves)
    assert set(queue.ready_models()) == {"m", "n"}


def saves_of(tenant: str, count: int) -> list[Command]:
    """One save of each of `count` models."""
    return [command(f"{tenant}{number}", 0, Kind.SAVE_WEIGHTS, tenant=tenant) for number in range(count)]


def test_many_saves_of_one_tenant_do_not_delay_another_tenants_save() -> None:
    queue = scheduler(*saves_of("many", 500), *saves_of("few", 1))
    taken = queue.take_file_commands()
    assert len(taken) == FILES_AT_ONCE
    assert [item.tenant for item in taken].index("few") <= 1
    assert queue.take_file_commands() == [], "no file thread is free"


def test_a_new_tenants_save_is_next_while_another_tenants_saves_run() -> None:
    queue = scheduler(*saves_of("many", 500))
    running = queue.take_file_commands()
    for _ in range(20):
        queue.finish(running[:1])
        running = running[1:] + queue.take_file_commands()
        assert len(running) == FILES_AT_ONCE
    for save in saves_of("few", 1):
        queue.add(save)
    queue.finish(running[:2])
    assert "few" in [item.tenant for item in queue.take_file_commands()]


def test_a_tenant_that_trains_much_does_not_wait_for_all_saves_of_another_tenant() -> None:
    queue = scheduler(
        *(command("trains", seq, size=1_000_000, tenant="trainer") for seq in range(10)),
        command("trains", 10, Kind.SAVE_WEIGHTS_FOR_SAMPLER, tenant="trainer"),
        *saves_of("saver", 500),
        budget=1_000_000,
    )
    running = queue.take_file_commands()
    while "trains" in queue.ready_models():
        passes_of(queue)
        queue.finish(running)
        running = queue.take_file_commands()
    assert "trainer" in [item.tenant for item in running]


def test_two_tenants_that_save_get_equally_many_file_threads() -> None:
    queue = scheduler(*saves_of("many", 300), *saves_of("few", 30))
    taken: list[Command] = []
    while len(taken) < 60:
        batch = queue.take_file_commands()
        queue.finish(batch)
        taken += batch
    assert Counter(item.tenant for item in taken) == {"many": 30, "few": 30}


def test_saves_of_a_tenant_run_in_order_of_arrival() -> None:
    saves = saves_of("one", 20)
    queue, taken = scheduler(*saves), []
    while batch := queue.take_file_commands():
        queue.finish(batch)
        taken += batch
    assert taken == saves


def test_saves_count_toward_their_tenants_share_of_training() -> None:
    queue = scheduler(
        *(command(f"{tenant}-trains", seq, size=1_000, tenant=tenant) for tenant in ("a", "b") for seq in range(40)),
        budget=2_000,
    )
    assert count_by_model(passes_of(queue)) == {"a-trains": 1, "b-trains": 1}
    for save in saves_of("a", 2):
        queue.add(save)
    saves = queue.take_file_commands()
    queue.finish(saves)
    assert len(saves) == 2
    ahead = 2 * EXCLUSIVE_COST // 1_000
    taken = [item.tenant for _ in range(ahead // 2) for item in passes_of(queue)]
    assert Counter(taken) == {"b": ahead}, "the other tenant catches up on the work of the saves"
    assert count_by_model(passes_of(queue)) == {"a-trains": 1, "b-trains": 1}


def unload(model: str) -> Command:
    row = next(_numbers)
    return Command(row, f"r{row}", Kind.UNLOAD_MODEL, "tenant", "session", model, None, None, None, "json", 10)


def test_an_unload_runs_after_earlier_commands_and_before_later_ones() -> None:
    first, step, last, later = command("m", 0), exclusive_command("m", 1), unload("m"), command("m", 2)
    queue = scheduler(last, later, step, first)
    assert model_and_number(passes_of(queue)) == [("m", 0)]
    assert model_and_number(exclusive_of(queue)) == [("m", 1)]
    assert passes_of(queue) == []
    assert exclusive_of(queue) == [last]
    assert queue.close_model("m") == [later]


def test_an_unload_does_not_wait_for_a_missing_number() -> None:
    stuck, last = command("m", 3), unload("m")
    queue = scheduler(stuck, last)
    assert queue.waiting == 2
    assert queue.last_row == last.n
    assert exclusive_of(queue) == [last]
    assert queue.close_model("m") == [stuck]


def test_a_suspect_runs_alone_and_before_other_models() -> None:
    commands = [
        command("a", 0),
        command("a", 1),
        command("a", 2),
        command("b", 0),
        exclusive_command("b", 1),
        command("c", 0),
    ]
    queue = scheduler(*commands)
    queue.suspect([commands[1].request_id, commands[3].request_id, commands[4].request_id])
    batches: list[list[tuple[str | None, int | None]]] = []
    while queue.has_work:
        models = queue.ready_models()
        for batch in (queue.take_passes(models), queue.take_exclusive(models)):
            if batch:
                batches.append(model_and_number(batch))
            queue.finish(batch)
    assert batches[0] == [("b", 0)], "this suspect is the first of its model, so it runs before all other models"
    assert Counter(itertools.chain(*batches)) == Counter(model_and_number(commands))
    alone = {("a", 1), ("b", 0), ("b", 1)}
    assert all(len(batch) == 1 for batch in batches if alone & set(batch)), batches


def test_a_suspect_waits_for_running_commands_and_the_others_wait_for_it() -> None:
    save, step, other = (
        command("a", 0, Kind.SAVE_WEIGHTS),
        exclusive_command("b", 0),
        command("c", 0, Kind.SAVE_WEIGHTS),
    )
    queue = scheduler(save)
    assert queue.take_file_commands() == [save]
    for added in (step, other):
        queue.add(added)
    queue.suspect([step.request_id])
    assert not queue.has_work
    assert queue.take_file_commands() == []
    queue.finish([save])
    assert queue.take_exclusive(queue.ready_models()) == [step]
    assert queue.take_file_commands() == []
    queue.finish([step])
    assert queue.take_file_commands() == [other]


def test_a_suspect_of_a_closed_model_delays_no_other_model() -> None:
    poison, other = command("a", 0), command("b", 0)
    queue = scheduler(poison, other)
    queue.suspect([poison.request_id])
    assert queue.take_passes(["b"]) == []
    queue.close_model("a")
    assert queue.take_passes(["b"]) == [other]
