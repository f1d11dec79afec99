"""Whose sample is next: the numbers that samples get, and what a server that goes by them then does."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.sampling.completion import SampleAnswer
from skyrl.sampling.fair_order import FairOrder, Place
from skyrl.sampling.job import SampleJob
from skyrl.types.weights import BaseWeights

JOB = SampleJob(
    request_id="r",
    session_key="s:0",
    model="tiny",
    weights=BaseWeights(),
    prompt=[1],
    num_samples=1,
    max_tokens=9,
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    seed=None,
    stop_strings=[],
    stop_token_ids=[],
    ignore_eos=False,
    prompt_logprobs=False,
    prompt_logprobs_last_n=None,
    topk_prompt=0,
    topk_sample=0,
)
COST = 10
"""Of JOB, in tokens."""


class Server:
    """A server with so many slots that runs the lowest number first, as vLLM does."""

    def __init__(self, slots: int) -> None:
        self.order = FairOrder()
        self.slots = slots
        self.waiting: list[tuple[int, int, Place, SampleJob]] = []
        self.running: list[tuple[Place, SampleJob]] = []
        self.begun: list[tuple[str, int]] = []
        """Tenants in the order in which their samples began, with what each sample costs."""
        self._arrivals = 0

    def send(self, tenant: str, job: SampleJob = JOB) -> None:
        place = self.order.enter(tenant, job)
        self._arrivals += 1
        heapq.heappush(self.waiting, (place.priority, self._arrivals, place, job))
        self._begin()

    def _begin(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            *_, place, job = heapq.heappop(self.waiting)
            self.running.append((place, job))
            self.begun.append((place.tenant, len(job.prompt) + job.num_samples * (job.max_tokens or 0)))

    def end(self, which: int = 0, *, answered: bool = True, length: int | None = None) -> None:
        """One of those that run ends, with so many tokens in each sequence (the most, unless it is said)."""
        place, job = self.running.pop(which % len(self.running))
        tokens = job.num_samples * (job.max_tokens or 0 if length is None else length)
        answer = SampleAnswer(b"", len(job.prompt), 0, tokens) if answered else None
        self.order.leave(place, job.num_samples, answer)
        self._begin()

    @property
    def names(self) -> list[str]:
        return [tenant for tenant, _ in self.begun]

    def backlogged(self) -> set[str]:
        return {place.tenant for *_, place, _ in self.waiting}


def test_one_tenant_is_served_in_order_of_arrival() -> None:
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


def test_few_samples_go_before_what_another_has_queued() -> None:
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
    assert server.names.index("b") <= 25
    assert [tenant for tenant in server.names[24:44] if tenant == "b"] == ["b"] * 10, "at least in turn with a's"
    assert Counter(server.names) == {"a": 300, "b": 10}


def test_share_is_in_tokens() -> None:
    server = Server(1)
    for _ in range(100):
        server.send("long", replace(JOB, prompt=[1] * 10, max_tokens=190))
    for _ in range(2_000):
        server.send("short")
    for _ in range(1_000):
        server.end()
    tokens = Counter[str]()
    for tenant, cost in server.begun:
        tokens[tenant] += cost
    assert abs(tokens["long"] - tokens["short"]) <= 2 * (200 + COST)


def test_many_sequences_of_one_sample_do_not_go_before_a_newcomer() -> None:
    order = FairOrder()
    many = order.enter("a", replace(JOB, num_samples=4_096))
    assert order.enter("b", JOB).priority < many.priority
    half_of_it = [order.enter("b", JOB).priority for _ in range(4_096)]
    assert half_of_it[1_000] < many.priority < half_of_it[3_000]


def test_length_is_what_a_tenants_sequences_have_been() -> None:
    """Not what they may be: who allows for more than is used is not behind for it."""
    server = Server(1)
    generous = replace(JOB, max_tokens=4_000)
    for _ in range(50):
        server.send("generous", generous)
        server.end(length=9)
        server.send("exact")
        server.end()
    server.begun.clear()
    for _ in range(200):
        server.send("generous", generous)
        server.send("exact")
    for _ in range(200):
        server.end(length=9)
    assert abs(Counter(server.names)["generous"] - 100) <= 10


def test_what_was_never_run_moves_nobodys_time() -> None:
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
    assert "b" in server.names[:3]


def test_a_tenant_that_was_alone_owes_nothing() -> None:
    server = Server(1)
    server.send("a")
    for _ in range(1_000):  # and never has nothing on its way
        server.send("a")
        server.end()
    for _ in range(10):
        server.send("b")
        server.send("a")
    server.begun.clear()
    for _ in range(10):
        server.end()
    assert 4 <= Counter(server.names)["a"] <= 6


def test_two_processes_that_agree_on_the_time_share_a_server() -> None:
    """The other one has been at work for long, and knows no tenant of this one."""
    busy, fresh = FairOrder(), FairOrder()
    for _ in range(1_000):
        busy.leave(busy.enter("a", JOB), 1, SampleAnswer(b"", 1, 0, 9))
    fresh.catch_up(busy.now)
    busy.catch_up(0)
    assert abs(busy.enter("a", JOB).priority - fresh.enter("b", JOB).priority) <= COST


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 60)),  # who sends how many
        st.tuples(st.integers(0, 7), st.integers(1, 60)),  # which of those that run ends, and how often
    ),
    max_size=60,
)


def run(server: Server, step: tuple[str | int, int], lengths: Mapping[str, int]) -> None:
    what, times = step
    for _ in range(times):
        if isinstance(what, str):
            server.send(what, replace(JOB, max_tokens=lengths[what]))
        elif server.running:
            server.end(what)


@settings(max_examples=100)
@given(slots=st.integers(1, 6), steps=STEPS)
def test_tenants_that_both_wait_get_the_same(slots, steps) -> None:
    """Over any stretch in which two tenants always have samples waiting, the tokens of the samples that begin differ by
    at most what fits in the server at once and two samples more, of either."""
    server = Server(slots)
    states: list[tuple[set[str], int]] = []
    for step in steps:
        run(server, step, {"a": 4, "b": 9, "c": 29})
        states.append((server.backlogged(), len(server.begun)))
    largest = max((cost for _, cost in server.begun), default=0)
    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        first = None
        for both, begun in states:
            if not {one, other} <= both:
                first = None
                continue
            first = begun if first is None else first
            got = Counter[str]()
            for tenant, cost in server.begun[first:begun]:
                got[tenant] += cost
            assert abs(got[one] - got[other]) <= (slots + 2) * 2 * largest


@settings(max_examples=100)
@given(slots=st.integers(1, 6), steps=STEPS)
def test_who_has_nothing_on_its_way_soon_begins(slots, steps) -> None:
    """Until its first sample begins, no other tenant begins more than twice what runs at once and two more, where all
    samples are equal."""
    server = Server(slots)
    for step in steps:
        run(server, step, dict.fromkeys("abc", 9))
    before = len(server.begun)
    server.send("new")
    while "new" not in server.names:
        server.end()
    others = Counter(server.names[before:])
    assert max(others.values()) <= 2 * slots + 2
