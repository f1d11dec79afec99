"""Fair order of samples: the priorities that samples get, and the order in which a server runs them."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from skyrl.sampling.gate import FIRST_LENGTH, FairOrder, Place
from skyrl.sampling.job import SampleJob
from skyrl.sampling.metrics import Used
from tests import sample_jobs

JOB = replace(sample_jobs.JOB, prompt=[1], max_tokens=9)
COST = 10
"""The cost of JOB in tokens: one prompt token and nine sampled tokens."""


class Server:
    """Runs `slots` samples at once. The sample with the lowest priority number starts first, as in vLLM. `order` is
    shared with other servers behind a router, which tells them apart by `name`."""

    def __init__(self, slots: int, order: FairOrder | None = None, name: str | None = None) -> None:
        self.order = FairOrder() if order is None else order
        self.name = name
        self.slots = slots
        self.waiting: list[tuple[int, int, Place, SampleJob]] = []
        self.running: list[tuple[Place, SampleJob]] = []
        self.started: list[tuple[str, int]] = []
        """Tenant and cost of each sample, in the order in which the samples started."""
        self._arrivals = 0

    def send(self, tenant: str, job: SampleJob = JOB) -> None:
        place = self.order.enter(tenant, job)
        self._arrivals += 1
        heapq.heappush(self.waiting, (place.priority, self._arrivals, place, job))
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            *_, place, job = heapq.heappop(self.waiting)
            self.running.append((place, job))
            self.started.append((place.tenant, len(job.prompt) + job.num_samples * (job.max_tokens or 0)))

    def end(self, index: int = 0, *, length: int | None = None) -> None:
        """End a running sample with `length` tokens in each sequence, by default `max_tokens`."""
        place, job = self.running.pop(index % len(self.running))
        tokens = job.num_samples * (job.max_tokens or 0 if length is None else length)
        self.order.leave(place, job.num_samples, Used(len(job.prompt), 0, tokens), self.name)
        self._start_waiting()

    @property
    def tenants(self) -> list[str]:
        return [tenant for tenant, _ in self.started]

    def backlogged(self) -> set[str]:
        return {place.tenant for *_, place, _ in self.waiting}


def test_samples_of_one_tenant_start_in_order_of_arrival() -> None:
    server = Server(2)
    places = []
    for number in range(50):
        server.send("a", replace(JOB, max_tokens=1 + 7 * number % 90))
        if number % 3 == 0:
            server.end()
        places = [place.priority for *_, place, _ in sorted(server.waiting)]
        assert places == sorted(places)
    arrivals = [arrival for _, arrival, _, _ in sorted(server.waiting)]
    assert arrivals == sorted(arrivals)


def test_a_tenants_few_samples_start_before_anothers_long_queue() -> None:
    server = Server(4)
    for _ in range(300):
        server.send("a")
    for _ in range(20):
        server.end()
    for _ in range(10):
        server.send("b")
    for _ in range(300):
        if server.running:
            server.end()
    assert server.tenants.index("b") <= 25
    assert [tenant for tenant in server.tenants[24:44] if tenant == "b"] == ["b"] * 10, (
        "b starts at least every second sample"
    )
    assert Counter(server.tenants) == {"a": 300, "b": 10}


def test_tenants_share_tokens_and_not_samples() -> None:
    server = Server(1)
    for _ in range(100):
        server.send("long", replace(JOB, prompt=[1] * 10, max_tokens=190))
    for _ in range(2_000):
        server.send("short")
    for _ in range(1_000):
        server.end()
    tokens = Counter[str]()
    for tenant, cost in server.started:
        tokens[tenant] += cost
    assert abs(tokens["long"] - tokens["short"]) <= 2 * (200 + COST)


def test_a_sample_with_many_sequences_starts_after_a_newcomer() -> None:
    order = FairOrder()
    many = order.enter("a", replace(JOB, num_samples=4_096))
    assert order.enter("b", JOB).priority < many.priority
    priorities = [order.enter("b", JOB).priority for _ in range(4_096)]
    assert priorities[1_000] < many.priority < priorities[3_000], "the priority is the middle of a sample's stretch"


def test_cost_is_estimated_from_the_lengths_of_earlier_sequences() -> None:
    """A tenant whose `max_tokens` is larger than its sequences does not pay for the difference."""
    server = Server(1)
    generous = replace(JOB, max_tokens=4_000)
    for _ in range(50):
        server.send("generous", generous)
        server.end(length=9)
        server.send("exact")
        server.end()
    server.started.clear()
    for _ in range(200):
        server.send("generous", generous)
        server.send("exact")
    for _ in range(200):
        server.end(length=9)
    assert abs(Counter(server.tenants)["generous"] - 100) <= 10


def test_short_answers_say_nothing_about_those_with_another_bound() -> None:
    order, scored, rollout = FairOrder(), replace(JOB, max_tokens=1), replace(JOB, max_tokens=4_000)
    for _ in range(50):
        order.leave(order.enter("a", scored), 1, Used(3, 0, 1))
    assert order.enter("a", rollout).length == FIRST_LENGTH
    order.leave(order.enter("a", rollout), 1, Used(3, 0, 9))
    assert order.enter("a", rollout).length == 9


def test_samples_that_never_ran_do_not_advance_the_time() -> None:
    server = Server(1)
    for _ in range(1_000):
        server.send("a")
    for *_, place, job in server.waiting[500:]:
        server.order.leave(place, job.num_samples, None)
    del server.waiting[500:]
    heapq.heapify(server.waiting)
    server.send("b")
    server.end()
    server.end()
    assert "b" in server.tenants[:3]


def test_a_tenant_pays_nothing_for_the_time_in_which_it_was_alone() -> None:
    server = Server(1)
    server.send("a")
    for _ in range(1_000):  # the tenant always has a sample in flight
        server.send("a")
        server.end()
    for _ in range(10):
        server.send("b")
        server.send("a")
    server.started.clear()
    for _ in range(10):
        server.end()
    assert 4 <= Counter(server.tenants)["a"] <= 6


def test_two_processes_that_agree_on_the_time_give_comparable_priorities() -> None:
    """One process has run for long. The processes know different tenants."""
    busy, fresh = FairOrder(), FairOrder()
    for _ in range(1_000):
        busy.leave(busy.enter("a", JOB), 1, Used(1, 0, 9))
    fresh.catch_up(busy.now)
    busy.catch_up(0)
    assert abs(busy.enter("a", JOB).priority - fresh.enter("b", JOB).priority) <= COST


def replicas(number: int) -> list[Server]:
    order = FairOrder()
    return [Server(4, order, f"http://10.0.0.{index}:8000") for index in range(number)]


def test_a_tenants_samples_start_soon_on_a_replica_that_is_behind() -> None:
    """A router keeps a session on one replica. A tenant's first session fills one of four, and its later samples run on
    the others at once. The other tenant's session is on the full replica."""
    servers = replicas(4)
    full, *idle = servers
    for _ in range(300):
        full.send("a")
    for number in range(99):
        idle[number % 3].send("a")
        idle[number % 3].end()
    full.end()
    full.started.clear()
    for _ in range(10):
        full.send("b")
    for _ in range(30):
        full.end()
    assert full.tenants.index("b") <= 4
    assert full.tenants[:24].count("b") == 10, "b starts every second sample"


def test_a_replica_that_gives_no_answers_does_not_hold_the_time() -> None:
    """It may be idle, or gone."""
    gone, stays = replicas(2)
    gone.send("a")
    stays.send("a")  # the tenant always has a sample in flight
    gone.end()
    for _ in range(3_000):
        stays.send("a")
        stays.end()
    assert stays.order.now >= 2_900 * COST


def test_the_servers_that_are_remembered_have_a_bound() -> None:
    order = FairOrder()
    for number in range(5_000):
        order.leave(order.enter("a", JOB), 1, Used(1, 0, 9), f"http://10.0.0.1:{number}")
    assert len(order._servers) <= 2_000


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 60)),  # a tenant and its number of new samples
        st.tuples(st.integers(0, 7), st.integers(1, 60)),  # the index of the running sample that ends, how often
    ),
    max_size=60,
)


def run(server: Server, step: tuple[str | int, int], lengths: Mapping[str, int]) -> None:
    tenant_or_index, times = step
    for _ in range(times):
        if isinstance(tenant_or_index, str):
            server.send(tenant_or_index, replace(JOB, max_tokens=lengths[tenant_or_index]))
        elif server.running:
            server.end(tenant_or_index)


@settings(max_examples=100)
@given(slots=st.integers(1, 6), steps=STEPS)
def test_two_tenants_that_wait_get_about_the_same_tokens(slots, steps) -> None:
    """Over any stretch in which two tenants always have waiting samples, the tokens of their started samples differ by
    at most `slots + 2` of the largest samples of each."""
    server = Server(slots)
    states: list[tuple[set[str], int]] = []
    for step in steps:
        run(server, step, {"a": 4, "b": 9, "c": 29})
        states.append((server.backlogged(), len(server.started)))
    largest = max((cost for _, cost in server.started), default=0)
    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        first = None
        for waiting, started in states:
            if not {one, other} <= waiting:
                first = None
                continue
            first = started if first is None else first
            tokens = Counter[str]()
            for tenant, cost in server.started[first:started]:
                tokens[tenant] += cost
            assert abs(tokens[one] - tokens[other]) <= (slots + 2) * 2 * largest


@settings(max_examples=100)
@given(slots=st.integers(1, 6), steps=STEPS)
def test_the_first_sample_of_a_new_tenant_starts_soon(slots, steps) -> None:
    """If all samples are equal, each other tenant starts at most `2 * slots + 2` samples before it."""
    server = Server(slots)
    for step in steps:
        run(server, step, dict.fromkeys("abc", 9))
    before = len(server.started)
    server.send("new")
    while "new" not in server.tenants:
        server.end()
    others = Counter(server.tenants[before:])
    assert max(others.values()) <= 2 * slots + 2
