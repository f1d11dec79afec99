"""The pool: registration, draining, quarantine, waiting."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyrl.router.policies import LeastInFlight, RequestFacts
from skyrl.router.pool import Change, TooManyWorkers, WorkerPool
from skyrl.router.worker import Worker, WorkerState

ANY = RequestFacts()
HELD: dict[str, object] = {"revive": "registration"}
FOREVER_S = 60
THRESHOLD = 2


@pytest.fixture
def pool() -> WorkerPool:
    return WorkerPool(LeastInFlight())


def changes(pool: WorkerPool) -> list[tuple[str, Change]]:
    seen: list[tuple[str, Change]] = []
    pool.subscribe(lambda worker, change: seen.append((worker.url, change)))
    return seen


def test_a_worker_is_registered_once_whatever_the_form_of_its_url(pool: WorkerPool) -> None:
    worker = pool.add("http://Host:80/")
    assert pool.add("http://host") is worker
    assert pool.workers == [worker]
    assert worker.url == "http://host"
    assert pool.find(worker.id) is pool.find("HTTP://HOST/") is worker
    assert pool.find("no url") is None


def test_what_a_second_registration_leaves_out_stays(pool: WorkerPool) -> None:
    pool.add("http://a", "http://a:1/", labels={"zone": 1})
    worker = pool.add("http://a", labels={"rack": 2})
    assert (worker.completions_url, worker.labels) == ("http://a:1", {"zone": 1, "rack": 2})


@pytest.mark.parametrize("urls", [("ftp://a", None), ("http://a", "nonsense"), ("", None)])
def test_a_bad_url_registers_nothing(pool: WorkerPool, urls: tuple[str, str | None]) -> None:
    with pytest.raises(ValueError, match="url"):
        pool.add(*urls)
    assert pool.workers == []


def test_the_number_of_workers_is_bounded() -> None:
    pool = WorkerPool(LeastInFlight(), max_workers=1)
    pool.add("http://a")
    pool.add("http://a")
    with pytest.raises(TooManyWorkers):
        pool.add("http://b")


def test_an_empty_pool_has_no_worker_to_choose(pool: WorkerPool) -> None:
    assert pool.choose(ANY) is None
    assert pool.routable == 0


def test_a_removed_worker_gets_nothing_and_is_forgotten_after_its_last_request(pool: WorkerPool) -> None:
    worker = pool.add("http://a")
    pool.begin(worker)
    seen = changes(pool)
    assert pool.remove(worker.id)
    assert pool.choose(ANY) is None
    assert pool.find("http://a") is worker
    pool.end(worker)
    assert pool.find("http://a") is None
    assert seen == [("http://a", Change.DRAINING), ("http://a", Change.FORGOTTEN)]
    assert not pool.remove("http://a")


def test_a_draining_worker_that_is_registered_again_comes_back_as_new(pool: WorkerPool) -> None:
    worker = pool.add("http://a", "http://a:1", labels=HELD)
    pool.begin(worker)
    pool.remove("http://a")
    assert pool.add("http://a") is worker
    assert (worker.completions_url, worker.labels, worker.in_flight) == (None, {}, 1)
    pool.end(worker)
    assert pool.choose(ANY) is worker


def test_a_request_that_outlives_its_worker_does_not_touch_the_next_one(pool: WorkerPool) -> None:
    """The worker was removed when idle, and another one is registered under its URL."""
    old = pool.add("http://a")
    pool.remove("http://a")
    new = pool.add("http://a")
    pool.begin(old)
    pool.end(old)
    assert pool.find("http://a") is new


def test_an_end_without_a_begin_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(AssertionError):
        pool.end(pool.add("http://a"))


def test_a_refused_connection_quarantines_until_a_probe_is_answered(pool: WorkerPool) -> None:
    worker = pool.add("http://a")
    seen = changes(pool)
    pool.refused(worker)
    pool.refused(worker)
    assert pool.choose(ANY) is None
    pool.probe_answered(worker)
    assert pool.choose(ANY) is worker
    assert [change for _, change in seen] == [Change.QUARANTINED, Change.REVIVED]


def test_failures_in_a_row_quarantine(pool: WorkerPool) -> None:
    worker = pool.add("http://a")
    pool.probe_failed(worker, "why", THRESHOLD)
    pool.probe_answered(worker)
    pool.probe_failed(worker, "why", THRESHOLD)
    assert worker.routable
    pool.probe_failed(worker, "why", THRESHOLD)
    assert worker.state is WorkerState.QUARANTINED


def test_a_registration_forgets_failed_probes(pool: WorkerPool) -> None:
    worker = pool.add("http://a")
    pool.probe_failed(worker, "why", THRESHOLD)
    pool.add("http://a")
    pool.probe_failed(worker, "why", THRESHOLD)
    assert worker.routable


def test_a_probe_of_a_draining_worker_changes_nothing(pool: WorkerPool) -> None:
    worker = pool.add("http://a")
    pool.begin(worker)
    pool.remove("http://a")
    pool.refused(worker)
    pool.probe_failed(worker, "why", 1)
    pool.probe_answered(worker)
    assert worker.state is WorkerState.DRAINING


def test_registering_a_quarantined_worker_makes_it_routable(pool: WorkerPool) -> None:
    worker = pool.add("http://a")
    pool.refused(worker)
    pool.add("http://a")
    assert pool.choose(ANY) is worker


def test_a_held_worker_waits_for_its_registration(pool: WorkerPool) -> None:
    held, other = pool.add("http://held", labels=HELD), pool.add("http://other")
    pool.refused(held)
    pool.probe_answered(held)
    assert pool.candidates == (other,)
    pool.add("http://held")
    assert pool.candidates == (held, other)


def test_a_held_worker_that_answers_is_the_last_resort(pool: WorkerPool) -> None:
    held, other = pool.add("http://held", labels=HELD), pool.add("http://other")
    pool.refused(held)
    pool.refused(other)
    assert pool.candidates == ()
    pool.probe_answered(held)
    assert pool.candidates == (held,)
    assert held.state is WorkerState.QUARANTINED
    pool.refused(held)
    assert pool.candidates == ()
    pool.probe_answered(held)
    pool.probe_failed(held, "why", THRESHOLD)
    assert pool.candidates == ()
    pool.probe_answered(held)
    pool.probe_answered(other)
    assert pool.candidates == (other,)


def test_excluded_workers_are_not_chosen(pool: WorkerPool) -> None:
    first, second = pool.add("http://a"), pool.add("http://b")
    assert {pool.choose(ANY, exclude=[first]) for _ in range(3)} == {second}
    assert pool.choose(ANY, exclude=[first, second]) is None


def test_the_policy_gets_the_same_candidates_until_they_change() -> None:
    given: list[object] = []

    class Spy(LeastInFlight):
        def choose(self, facts: RequestFacts, candidates: object) -> Worker:
            given.append(candidates)
            return super().choose(facts, candidates)  # pyright: ignore[reportArgumentType]

    pool = WorkerPool(Spy())
    first = pool.add("http://a")
    pool.choose(ANY)
    pool.add("http://a")
    pool.choose(ANY)
    pool.add("http://b")
    pool.choose(ANY)
    pool.choose(ANY, exclude=[first])
    assert given[0] is given[1]
    assert given[2] is not given[0]
    assert len(given) == 3


def test_counts_of_each_worker(pool: WorkerPool) -> None:
    worker = pool.add("http://a")
    pool.begin(worker)
    pool.probe_failed(worker, "why", THRESHOLD)
    expected = {"url": "http://a", "state": "healthy", "in_flight": 1, "served": 1, "failed_probes": 1}
    in_service = {"disabled": None, "is_dead": False, "missed": None, "changing": False}
    assert pool.counts() == [expected | in_service]


def test_a_worker_out_of_service_gets_nothing_until_it_is_back(pool: WorkerPool) -> None:
    first, second = pool.add("http://a"), pool.add("http://b")
    pool.set_service(first, disabled="by hand", is_dead=False)
    assert pool.candidates == (second,)
    pool.add("http://a")
    assert pool.candidates == (second,), "registering again does not enable it"
    pool.set_missed(second, "an update")
    assert pool.candidates == ()
    pool.set_service(first, disabled=None, is_dead=False)
    pool.set_service(second, disabled=None, is_dead=False)
    assert pool.candidates == (first,), "it still lacks the update"
    pool.set_missed(second, None)
    assert pool.candidates == (first, second)
    pool.set_service(first, disabled=None, is_dead=True)
    assert pool.candidates == (second,)


def test_a_change_of_weights_keeps_what_is_set_meanwhile(pool: WorkerPool) -> None:
    first, second = pool.add("http://a"), pool.add("http://b")

    def change() -> None:
        with pool.weights_change([first, second]):
            assert pool.changing
            assert pool.candidates == ()
            with pool.weights_change([second]):
                pool.set_service(first, disabled="by hand", is_dead=False)
            raise LookupError("on purpose")

    with pytest.raises(LookupError):
        change()
    assert not pool.changing
    assert pool.candidates == (second,)


def test_a_removed_worker_is_not_told_of_the_end_of_a_change(pool: WorkerPool) -> None:
    worker, told = pool.add("http://a"), []
    with pool.weights_change([worker]):
        pool.remove("http://a")
        pool.subscribe(lambda one, change: told.append((one, change)))
    pool.set_missed(worker, "an update")
    pool.set_service(worker, disabled="why", is_dead=True)
    assert told == []


def test_the_next_change_of_the_candidates_wakes_who_waits(pool: WorkerPool) -> None:
    worker = pool.add("http://a")
    with pool.weights_change([worker]):
        event = pool.next_change
        assert not event.is_set()
    assert event.is_set()
    assert not pool.next_change.is_set()


class Model(RuleBasedStateMachine):
    """Any order of registrations, removals, requests and probes, against a plain model of what is known."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = WorkerPool(LeastInFlight())
        self.requests: list[Worker] = []
        self.removed: set[str] = set()
        self.changes: list[tuple[Any, Worker]] = []

    urls = st.sampled_from(["http://a", "http://b", "http://c"])

    @rule(url=urls, labels=st.sampled_from([None, HELD]))
    def add(self, url: str, labels: dict[str, object] | None) -> None:
        self.pool.add(url, labels=labels)
        self.removed.discard(url)

    @rule(url=urls)
    def remove(self, url: str) -> None:
        if self.pool.remove(url):
            self.removed.add(url)

    @rule(excluded=st.lists(urls))
    def request(self, excluded: list[str]) -> None:
        exclude = [worker for worker in self.pool.workers if worker.url in excluded]
        worker = self.pool.choose(ANY, exclude)
        if worker is None:
            assert all(candidate in exclude for candidate in self.pool.candidates)
            return
        assert worker in self.pool.candidates
        assert worker not in exclude
        assert worker.url not in self.removed
        self.pool.begin(worker)
        self.requests.append(worker)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.requests))
        self.requests.remove(worker)
        self.pool.end(worker)

    @precondition(lambda self: self.pool.workers)
    @rule(data=st.data(), report=st.sampled_from(["refused", "failed", "answered"]))
    def probe(self, data: st.DataObject, report: str) -> None:
        worker = data.draw(st.sampled_from(self.pool.workers))
        if report == "refused":
            self.pool.refused(worker)
        elif report == "failed":
            self.pool.probe_failed(worker, "why", THRESHOLD)
        else:
            self.pool.probe_answered(worker)

    @precondition(lambda self: self.pool.workers)
    @rule(data=st.data(), disabled=st.sampled_from([None, "why"]), is_dead=st.booleans())
    def set_service(self, data: st.DataObject, disabled: str | None, is_dead: bool) -> None:
        self.pool.set_service(data.draw(st.sampled_from(self.pool.workers)), disabled=disabled, is_dead=is_dead)

    @precondition(lambda self: self.pool.workers)
    @rule(data=st.data(), missed=st.sampled_from([None, "what"]))
    def miss(self, data: st.DataObject, missed: str | None) -> None:
        self.pool.set_missed(data.draw(st.sampled_from(self.pool.workers)), missed)

    @precondition(lambda self: self.pool.workers)
    @rule(data=st.data())
    def begin_change(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.pool.workers))
        change = self.pool.weights_change([worker])
        change.__enter__()
        self.changes.append((change, worker))

    @precondition(lambda self: self.changes)
    @rule()
    def end_change(self) -> None:
        change, _ = self.changes.pop()
        change.__exit__(None, None, None)

    @invariant()
    def holds_count_the_changes(self) -> None:
        for worker in self.pool.workers:
            assert worker.holds == [one for _, one in self.changes].count(worker)

    @invariant()
    def in_flight_counts_the_requests(self) -> None:
        for worker in self.pool.workers:
            assert worker.in_flight == self.requests.count(worker)

    @invariant()
    def a_removed_worker_is_known_exactly_while_it_has_requests(self) -> None:
        known = {worker.url: worker for worker in self.pool.workers}
        running = {worker.url for worker in self.requests}
        for url in self.removed:
            assert (url in known) == (url in running)
            assert url not in known or known[url].state is WorkerState.DRAINING

    @invariant()
    def candidates_are_the_healthy_workers_else_the_last_resort(self) -> None:
        serving = [w for w in self.pool.workers if not (w.disabled or w.is_dead or w.missed or w.holds)]
        healthy = [worker for worker in serving if worker.state is WorkerState.HEALTHY]
        waiting = [w for w in serving if w.state is WorkerState.QUARANTINED and w.held and w.answers]
        assert list(self.pool.candidates) == (healthy or waiting)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
