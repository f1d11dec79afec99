"""Which worker each policy chooses."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl.router import policies
from skyrl.router.policies import (
    LOAD_FACTOR,
    LOAD_SLACK,
    POLICIES,
    AdapterAffinity,
    AdapterPlacement,
    ConsistentHashing,
    KeyOrders,
    LeastInFlight,
    Policy,
    RequestFacts,
    make_policy,
)
from skyrl.router.worker import Worker

NOTHING = RequestFacts()
KEYS = [f"session-{number}" for number in range(400)]


def workers_with(*in_flight: int) -> tuple[Worker, ...]:
    return tuple(Worker(f"http://w{index}:1", in_flight=load) for index, load in enumerate(in_flight))


def chosen(policy: Policy, keys: list[str], workers: tuple[Worker, ...]) -> dict[str, Worker]:
    return {key: policy.choose(RequestFacts(key), workers) for key in keys}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("facts", [NOTHING, RequestFacts("k"), RequestFacts("", "a"), RequestFacts("k", "a")])
def test_every_policy_chooses_the_only_worker(name: str, facts: RequestFacts) -> None:
    workers = workers_with(1000)
    assert make_policy(name).choose(facts, workers) is workers[0]


@pytest.mark.parametrize("name", ["least_in_flight", "consistent_hashing", "adapter_affinity", "round_robin"])
def test_without_keys_idle_workers_take_turns(name: str) -> None:
    policy, workers = make_policy(name), workers_with(0, 0, 0)
    assert [policy.choose(NOTHING, workers) for _ in range(6)] == [*workers, *workers]


def test_least_in_flight_rotates_over_ties_alone() -> None:
    policy, workers = LeastInFlight(), workers_with(1, 5, 1, 1)
    turns = [policy.choose(NOTHING, workers) for _ in range(4)]
    assert turns == [workers[0], workers[2], workers[3], workers[0]]


@pytest.mark.parametrize("name", ["least_in_flight", "round_robin"])
def test_turns_go_on_when_workers_leave(name: str) -> None:
    policy, workers = make_policy(name), workers_with(0, 0, 0)
    for _ in range(2):
        policy.choose(NOTHING, workers)
    assert policy.choose(NOTHING, workers[:1]) is workers[0]


def test_round_robin_does_not_look_at_load() -> None:
    policy, workers = make_policy("round_robin"), workers_with(100, 0)
    assert [policy.choose(NOTHING, workers) for _ in range(3)] == [workers[0], workers[1], workers[0]]


def test_a_key_keeps_its_worker_and_keys_spread() -> None:
    policy, workers = ConsistentHashing(), workers_with(0, 0, 0, 0)
    first = chosen(policy, KEYS, workers)
    assert chosen(policy, KEYS, workers) == first
    assert chosen(ConsistentHashing(), KEYS, workers) == first, "another router chooses the same"
    assert min(Counter(first.values()).values()) > len(KEYS) / 4 * 0.7


@given(st.integers(2, 9), st.data())
def test_a_worker_that_leaves_moves_its_own_keys_alone(count: int, data: st.DataObject) -> None:
    policy, workers = ConsistentHashing(), workers_with(*[0] * count)
    left = data.draw(st.sampled_from(workers))
    keys = data.draw(st.lists(st.text(min_size=1), min_size=1, max_size=30))
    before = chosen(policy, keys, workers)
    after = chosen(policy, keys, tuple(worker for worker in workers if worker is not left))
    assert {key: worker for key, worker in after.items() if before[key] is not left} == {
        key: worker for key, worker in before.items() if worker is not left
    }
    assert chosen(policy, keys, workers) == before, "a worker that comes back gets its own keys back"


@given(st.lists(st.integers(0, 200), min_size=1, max_size=9), st.text(min_size=1))
def test_a_key_goes_to_its_first_worker_that_is_not_overloaded(loads: list[int], key: str) -> None:
    workers = workers_with(*loads)
    bound = LOAD_FACTOR * sum(loads) / len(loads) + LOAD_SLACK
    order = KeyOrders().order(key, workers)
    worker = ConsistentHashing().choose(RequestFacts(key), workers)
    assert worker.in_flight <= bound
    assert all(earlier.in_flight > bound for earlier in order[: order.index(worker)])


def test_orders_are_kept_for_as_many_keys_as_fit() -> None:
    workers = workers_with(0, 0)
    orders = KeyOrders(kept_places=6)
    first = orders.order("a", workers)
    assert orders.order("a", workers) is first
    for key in "bcd":
        orders.order(key, workers)
    again = orders.order("a", workers)
    assert again == first
    assert again is not first, "the oldest of four orders gave way"


def test_neither_long_keys_nor_long_names_are_kept() -> None:
    workers = workers_with(0, 0)
    orders, homes = KeyOrders(), AdapterPlacement()
    assert orders.order("k" * 10_000, workers) is not orders.order("k" * 10_000, workers)
    AdapterAffinity(homes).choose(RequestFacts("k", "a" * 10_000), workers)
    assert len(homes) == 0


def homes_of(policy: Policy, adapter: str, workers: tuple[Worker, ...]) -> set[Worker]:
    return {policy.choose(RequestFacts(key, adapter), workers) for key in KEYS[:40]}


def test_each_adapter_has_one_home_and_workers_have_equally_many_adapters() -> None:
    policy, workers = AdapterAffinity(), workers_with(0, 0)
    homes = [homes_of(policy, f"adapter-{number}", workers) for number in range(8)]
    assert [len(home) for home in homes] == [1] * 8
    assert sorted(Counter(worker for home in homes for worker in home).values()) == [4, 4]


def test_a_busy_adapter_gets_another_home_and_gives_it_up_later() -> None:
    clock = Clock()
    policy, workers = AdapterAffinity(AdapterPlacement(clock)), workers_with(0, 0, 0, 0)
    (home,) = homes_of(policy, "a", workers)
    home.in_flight = 100
    (second,) = homes_of(policy, "a", workers)
    assert second is not home
    home.in_flight = 0
    assert homes_of(policy, "a", workers) == {home, second}
    clock.now += policies.EXTRA_HOME_S + 1
    assert homes_of(policy, "a", workers) == {home}


def test_an_extra_home_stays_while_the_others_are_overloaded() -> None:
    clock = Clock()
    policy, workers = AdapterAffinity(AdapterPlacement(clock)), workers_with(0, 0, 0, 0)
    (home,) = homes_of(policy, "a", workers)
    home.in_flight = 100
    (second,) = homes_of(policy, "a", workers)
    clock.now += policies.EXTRA_HOME_S + 1
    assert homes_of(policy, "a", workers) == {second}
    home.in_flight = 0
    assert len(homes_of(policy, "a", workers)) == 2


def test_among_homes_the_session_decides_and_without_one_the_load() -> None:
    policy, workers = AdapterAffinity(), workers_with(0, 0, 0, 0)
    (home,) = homes_of(policy, "a", workers)
    home.in_flight = 100
    (second,) = homes_of(policy, "a", workers)
    home.in_flight, second.in_flight = 1, 0
    for key in KEYS[:20]:
        assert len({policy.choose(RequestFacts(key, "a"), workers) for _ in range(3)}) == 1
    assert {policy.choose(RequestFacts(None, "a"), workers) for _ in range(3)} == {second}


@given(st.data())
def test_adapters_go_to_candidates_within_the_bound(data: st.DataObject) -> None:
    """Whatever workers come and go, and whatever their load is."""
    clock = Clock()
    policy, everyone = AdapterAffinity(AdapterPlacement(clock)), workers_with(*[0] * 5)
    for _ in range(data.draw(st.integers(1, 12))):
        workers = tuple(data.draw(st.lists(st.sampled_from(everyone), min_size=1, unique=True)))
        clock.now += data.draw(st.sampled_from([0.0, policies.EXTRA_HOME_S + 1, policies.IDLE_S + 1]))
        for worker in workers:
            worker.in_flight = data.draw(st.integers(0, 30))
        bound = LOAD_FACTOR * sum(worker.in_flight for worker in workers) / len(workers) + LOAD_SLACK
        for adapter in data.draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8)):
            key = data.draw(st.sampled_from([None, "", "s1", "s2"]))
            worker = policy.choose(RequestFacts(key, adapter), workers)
            assert worker in workers
            assert worker.in_flight <= bound


def test_a_worker_that_comes_back_gets_its_share_of_adapters_again() -> None:
    policy, workers = AdapterAffinity(), workers_with(0, 0)
    names = [f"adapter-{number}" for number in range(8)]
    for name in names:
        homes_of(policy, name, workers)
    alone = workers[:1]
    assert [homes_of(policy, name, alone) for name in names] == [{workers[0]}] * 8
    both = workers_with(0, 0)
    both = (workers[0], both[1])
    homes = [homes_of(policy, name, both) for name in names]
    assert sorted(Counter(worker for home in homes for worker in home).values()) == [4, 4]


def test_idle_adapters_and_adapters_over_the_bound_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "MAX_ADAPTERS", 3)
    clock, workers = Clock(), workers_with(0, 0)
    homes = AdapterPlacement(clock)
    for number in range(10):
        homes.homes(str(number), workers, 10)
    assert len(homes) == 3
    clock.now += policies.IDLE_S + 1
    homes.homes("new", workers, 10)
    assert len(homes) == 1


def test_forgotten_adapters_take_no_place() -> None:
    clock, workers = Clock(), workers_with(0, 0)
    homes = AdapterPlacement(clock)
    for number in range(3):
        homes.homes(str(number), workers[:1], 10)
    clock.now += policies.IDLE_S + 1
    assert {homes.homes(name, workers, 10)[0] for name in ("new", "other")} == {*workers}


def test_requests_for_no_adapter_go_by_key() -> None:
    workers = workers_with(0, 0, 0)
    assert chosen(AdapterAffinity(), KEYS, workers) == chosen(ConsistentHashing(), KEYS, workers)


@pytest.mark.parametrize("name", ["cache_aware", "power_of_two", "random", "manual", "nonsense"])
def test_an_unknown_policy_is_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(ValueError, match=f"policy: '{name}' .*use one of consistent_hashing, least_in_flight"):
        make_policy(name)


def test_another_spelling_of_consistent_hashing_is_taken() -> None:
    assert isinstance(make_policy("consistent_hash"), ConsistentHashing)
