"""The scheduler: order within a model, exclusive commands, and shares of tenants and of their models."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyrl.base.types.requests import FILE_COMMANDS, Command, Kind
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
SLOTS = "abcdef"
PASSES = [Kind.FORWARD, Kind.FORWARD_BACKWARD]
OTHERS = sorted(set(Kind) - {*PASSES, Kind.SAMPLE, Kind.EXTERNAL, Kind.UNLOAD_MODEL})


def command(
    model: str, seq: int, kind: Kind = Kind.FORWARD_BACKWARD, size: int = 10, tenant: str = "tenant"
) -> Command:
    row = next(_numbers)
    return Command(row, f"r{row}", kind, tenant, "session", model, seq, None, None, "json", size)


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


def model_and_number(commands: list[Command]) -> list[tuple[str | None, int | None]]:
    return [(item.model_id, item.seq_id) for item in commands]


def uses_store(item: Command) -> bool:
    return item.kind is not Kind.SAVE_WEIGHTS_FOR_SAMPLER


class Order(RuleBasedStateMachine):
    """What runs when, against a model in plain words: a model's commands run in the order of their numbers and one
    batch at a time, passes together and other commands alone; saves and loads apart from turns; a suspect alone."""

    models = st.sampled_from(SLOTS)

    def __init__(self) -> None:
        super().__init__()
        self.queue = Scheduler(4 * EXCLUSIVE_COST)
        self.generation = Counter[str]()
        """How often each slot's model was closed: ids are not used again."""
        self.next: dict[str, int] = {}
        self.numbered: dict[str, dict[int, Command]] = {}
        self.unloads: dict[str, list[Command]] = {}
        self.samples: list[Command] = []
        self.running: list[list[Command]] = []
        self.suspects: set[str] = set()

    def model(self, slot: str) -> str:
        """The open model of the slot."""
        name = f"{slot}{self.generation[slot]}"
        if name not in self.next:
            self.next[name], self.numbered[name], self.unloads[name] = 0, {}, []
            self.queue.open_model(name)
        return name

    def waiting(self, model: str) -> list[Command]:
        return [*self.numbered[model].values(), *self.unloads[model]]

    def runs(self) -> list[Command]:
        return [item for batch in self.running for item in batch]

    def head(self, model: str) -> Command | None:
        numbered, unload = self.numbered[model].get(self.next[model]), next(iter(self.unloads[model]), None)
        if model in {item.model_id for item in self.runs()}:
            return None
        return numbered if unload is None or (numbered is not None and numbered.n < unload.n) else unload

    def runnable(self) -> list[Command]:
        """The heads that may run."""
        heads = [head for model in self.next if (head := self.head(model)) is not None]
        if any(item.request_id in self.suspects for item in self.runs()):
            return []
        if suspects := [head for head in heads if head.request_id in self.suspects]:
            return [] if self.runs() else suspects
        return heads

    def check(self, batch: list[Command], kinds: Callable[[Command], bool]) -> None:
        """`batch` was taken of the runnable commands of these kinds: each model's in order, no suspect with others."""
        assert bool(batch) == any(kinds(head) for head in self.runnable())
        assert set(first_of_each(batch)) <= set(self.runnable())
        assert all(kinds(item) for item in batch)
        assert len(batch) <= 1 or self.suspects.isdisjoint(item.request_id for item in batch)
        for item in batch:
            model = str(item.model_id)
            if item.kind is Kind.UNLOAD_MODEL:
                self.unloads[model].remove(item)
            else:
                assert item.seq_id == self.next[model]
                assert self.numbered[model].pop(self.next[model]) is item
                self.next[model] += 1
        if batch:
            self.running.append(batch)

    @rule(
        slot=models,
        gap=st.sampled_from([0, 0, 0, 1, 3]),
        kind=st.sampled_from(PASSES) | st.sampled_from(OTHERS),
        size=st.integers(1, 4 * EXCLUSIVE_COST),
    )
    def arrive(self, slot: str, gap: int, kind: Kind, size: int) -> None:
        model = self.model(slot)
        missing = [n for n in range(self.next[model], self.next[model] + 40) if n not in self.numbered[model]]
        added = command(model, missing[gap], kind, size, tenant=slot)
        self.numbered[model][missing[gap]] = added
        self.queue.add(added)

    @rule(slot=models)
    def unload(self, slot: str) -> None:
        row, model = next(_numbers), self.model(slot)
        self.unloads[model].append(
            Command(row, f"r{row}", Kind.UNLOAD_MODEL, slot, "session", model, None, None, None, "json", 10)
        )
        self.queue.add(self.unloads[model][-1])

    @rule()
    def sample(self) -> None:
        self.samples.append(sample())
        self.queue.add(self.samples[-1])

    @rule(data=st.data())
    def suspect(self, data: st.DataObject) -> None:
        if waiting := [item for model in self.next for item in self.waiting(model)]:
            found = data.draw(st.sampled_from(waiting))
            self.suspects.add(found.request_id)
            self.queue.suspect([found.request_id])

    @rule()
    def take_passes(self) -> None:
        batch = self.queue.take_passes(self.queue.ready_models())
        assert len(batch) <= 1 or sum(map(cost_of, batch)) <= self.queue.budget
        self.check(batch, lambda item: item.is_pass)

    @rule()
    def take_exclusive(self) -> None:
        ready = [item for item in self.runnable() if not item.is_pass and item.kind not in FILE_COMMANDS]
        most = 1 if any(item.request_id in self.suspects for item in ready) else 4
        batch = self.queue.take_exclusive(list(self.next))
        assert len(batch) == len(first_of_each(batch)) == min(most, len(ready))
        self.check(batch, lambda item: not item.is_pass and item.kind not in FILE_COMMANDS)

    @rule()
    def take_file_commands(self) -> None:
        running = [item for item in self.runs() if item.kind in FILE_COMMANDS]
        free = FILES_AT_ONCE - len(running)
        free_for_store = FILES_AT_ONCE - 1 - sum(map(uses_store, running))
        batch = self.queue.take_file_commands()
        assert len(batch) == len(first_of_each(batch)) <= free
        assert sum(map(uses_store, batch)) <= free_for_store
        if free:
            self.check(batch, lambda item: item.kind in FILE_COMMANDS and (free_for_store > 0 or not uses_store(item)))

    @rule()
    def take_samples(self) -> None:
        assert self.queue.take_samples() == self.samples
        self.queue.finish(self.samples)
        self.samples = []

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.running))
        self.running.remove(batch)
        self.queue.finish(batch)
        self.suspects -= {item.request_id for item in batch}
        for item in batch:
            if item.kind is Kind.UNLOAD_MODEL:
                self.close(str(item.tenant))

    @rule(slot=models)
    def close(self, slot: str) -> None:
        """Its commands are forgotten, and a suspect among them delays no other model."""
        model = self.model(slot)
        left = self.waiting(model)
        assert model in self.queue
        assert self.queue.close_model(model) == left
        assert model not in self.queue
        assert self.queue.close_model(model) == []
        self.suspects -= {item.request_id for item in left}
        del self.next[model], self.numbered[model], self.unloads[model]
        self.generation[slot] += 1

    @rule(slot=models)
    def give_up(self, slot: str) -> None:
        model = self.model(slot)
        view = self.queue.views().get(model)
        if view is None or view.missing is None:
            return
        assert view.missing == self.next[model]
        last = max(self.numbered[model])
        late = [command(model, number) for number in range(last + 2)]
        assert self.queue.give_up(model) == [each for _, each in sorted(self.numbered[model].items())]
        assert [self.queue.is_late(each) for each in late] == [True] * (last + 1) + [False]
        self.suspects -= {item.request_id for item in self.numbered[model].values()}
        self.next[model], self.numbered[model] = last + 1, {}

    @rule(slot=models, number=st.integers(0, 9))
    def open_again(self, slot: str, number: int) -> None:
        """The next number stays."""
        self.queue.open_model(self.model(slot), number)

    @invariant()
    def shows_what_waits(self) -> None:
        waiting = [*self.samples, *(item for model in self.next for item in self.waiting(model))]
        turns = {str(head.model_id) for head in self.runnable() if head.kind not in FILE_COMMANDS}
        assert self.queue.waiting == len(waiting)
        assert self.queue.last_row == max((item.n for item in [*waiting, *self.runs()]), default=0)
        assert set(self.queue.ready_models()) == turns
        assert self.queue.has_work == bool(turns or self.samples)


def first_of_each(batch: list[Command]) -> list[Command]:
    """The first command of each model."""
    return list({item.model_id: item for item in reversed(batch)}.values())


TestOrder = Order.TestCase
TestOrder.settings = settings(max_examples=200, stateful_step_count=40)


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


def begun(queue: Scheduler) -> list[Command]:
    """The passes of a turn of one model, which run from now on."""
    return queue.take_passes(queue.ready_models()[:1])


def test_a_small_step_runs_within_a_long_pass_until_its_tenant_has_had_as_much() -> None:
    queue = scheduler(command("long", 0, size=100_000, tenant="long"))
    running = begun(queue)
    done = 0
    for number in range(0, 100, 2):
        for added in step("small", 1, size=10_000, first=number):
            queue.add(added)
        while taken := queue.take_before(running):
            queue.finish(taken)
            done += sum(map(cost_of, taken))
    assert 100_000 - 10_000 <= done <= 100_000 + EXCLUSIVE_COST


def test_the_rest_of_a_long_step_puts_its_pass_off_for_no_more_than_the_shares_of_a_step() -> None:
    passes = [command("long", number, size=1_000, tenant="long") for number in range(200)]
    queue = scheduler(*passes, budget=1_000)
    running = begun(queue)
    done = 0
    for number in range(0, 300, 2):
        for added in step("small", 1, size=500, first=number):
            queue.add(added)
        while taken := queue.take_before(running):
            queue.finish(taken)
            done += sum(map(cost_of, taken))
    charged = sum(map(cost_of, running))
    assert charged <= done <= charged + STEP_SHARES * queue.budget + EXCLUSIVE_COST


def test_a_step_runs_within_a_pass_whole_and_one_command_after_the_other() -> None:
    queue = scheduler(command("long", 0, size=100_000, tenant="long"), budget=250)
    running = begun(queue)
    for added in step("small", 3):
        queue.add(added)
    taken = []
    while batch := queue.take_before(running):
        taken.append([item.seq_id for item in batch])
        assert not queue.take_before(running), "its next command waits for it"
        queue.finish(batch)
    assert taken == [[0, 1], [2], [3]]


def test_no_equal_or_larger_step_runs_within_a_pass() -> None:
    for rest, size, interrupts in ((0, 1_000, False), (0, 999, True), (500, 1_000, True), (500, 1_500, False)):
        queue = scheduler(command("a", 0, size=1_000, tenant="a"), budget=1_000)
        running = begun(queue)
        if rest:
            queue.add(command("a", 1, size=rest, tenant="a"))
        queue.add(command("b", 0, size=size, tenant="b"))
        assert bool(queue.take_before(running)) is interrupts


def test_a_tenant_does_not_interrupt_its_own_pass() -> None:
    queue = scheduler(command("long", 0, size=100_000, tenant="a"))
    running = begun(queue)
    queue.add(command("small", 0, tenant="a"))
    assert queue.take_before(running) == []


def test_only_passes_and_optimizer_steps_run_within_a_pass() -> None:
    for kind in (*PASSES, *OTHERS, Kind.UNLOAD_MODEL):
        queue = scheduler(command("long", 0, size=100_000, tenant="long"))
        running = begun(queue)
        queue.add(command("small", 0, kind, tenant="small"))
        assert bool(queue.take_before(running)) is (kind in {*PASSES, Kind.OPTIM_STEP})


def test_a_pass_is_not_put_off_by_others_while_what_is_next_waits_for_its_turn_to_end() -> None:
    queue = scheduler(command("long", 0, size=100_000, tenant="long"), budget=1_000)
    running = begun(queue)
    queue.add(command("new", 0, Kind.CREATE_MODEL, tenant="new"))
    queue.add(command("small", 0, size=500, tenant="small"))
    assert queue.take_before(running) == []
    queue.close_model("new")
    queue.add(sample("other"))
    assert queue.take_before(running) == []
    queue.hold_samples(True)
    assert [taken.model_id for taken in queue.take_before(running)] == ["small"]


def test_no_suspect_runs_within_a_pass_and_nothing_within_a_suspect() -> None:
    for suspect in ("long", "small"):
        long, small = command("long", 0, size=100_000, tenant="long"), command("small", 0, tenant="small")
        queue = scheduler(long)
        if suspect == "long":
            queue.suspect([long.request_id])
        running = begun(queue)
        queue.add(small)
        if suspect == "small":
            queue.suspect([small.request_id])
        assert queue.take_before(running) == []


def test_models_take_turns_at_being_first() -> None:
    queue = scheduler(*(command(model, seq, size=100) for model in "abc" for seq in range(3)), budget=1)
    assert [passes_of(queue)[0].model_id for _ in range(3)] == ["a", "b", "c"]


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


def saves_of(tenant: str, count: int, kind: Kind = Kind.SAVE_WEIGHTS_FOR_SAMPLER) -> list[Command]:
    """One save of each of `count` models."""
    return [command(f"{tenant}{number}", 0, kind, tenant=tenant) for number in range(count)]


def test_a_store_that_hangs_leaves_a_place_for_saves_that_need_none() -> None:
    queue = scheduler(*saves_of("stores", 9, Kind.SAVE_WEIGHTS), *saves_of("samples", 2))
    kinds = [item.kind for item in queue.take_file_commands()]
    assert kinds.count(Kind.SAVE_WEIGHTS) < FILES_AT_ONCE == len(kinds)
    only = scheduler(*saves_of("stores", 9, Kind.SAVE_WEIGHTS))
    assert len(only.take_file_commands()) == FILES_AT_ONCE - 1
    only.add(saves_of("samples", 1)[0])
    assert [item.tenant for item in only.take_file_commands()] == ["samples"]


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
