"""The pool: registration, draining, quarantine, waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyrl.router.policies import LeastInFlight, RequestFacts
from skyrl.router.pool import Change, WorkerPool
from skyrl.router.worker import Worker, WorkerState

ANY = RequestFacts()
HELD: dict[str, object] = {"revive": "registration"}
FOREVER_S = 60
THRESHOLD = 2


@pytest.fixture
def pool() -> WorkerPool:
    return WorkerPool(LeastInFlight())


def test_a_worker_is_registered_once_whatever_the_form_of_its_url(pool: WorkerPool) -> None:
    worker = pool.add("http://Host:80/")
    assert pool.add("http://host") is worker
    assert pool.workers == [worker]
    assert worker.url == "http://host"
    assert pool.find(worker.id) is pool.find("HTTP://HOST/") is worker
    assert pool.find("no url") is None


def test_a_request_that_outlives_its_worker_does_not_touch_the_next_one(pool: WorkerPool) -> None:
    """The worker was removed when idle, and another one is registered under its URL."""
    old = pool.add("http://a")
    pool.remove("http://a")
    new = pool.add("http://a")
    pool.begin(old)
    pool.end(old)
    assert pool.find("http://a") is new


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


def test_a_removed_worker_is_not_told_of_the_end_of_a_change(pool: WorkerPool) -> None:
    worker, told = pool.add("http://a"), []
    with pool.weights_change([worker]):
        pool.remove("http://a")
        pool.subscribe(lambda one, change: told.append((one, change)))
    pool.set_missed(worker, "an update")
    pool.set_service(worker, disabled="why", is_dead=True)
    assert told == []


def test_a_worker_that_falls_silent_or_answers_again_is_told_of_until_it_is_forgotten(pool: WorkerPool) -> None:
    worker, told = pool.add("http://a"), list[Change]()
    pool.subscribe(lambda _, change: told.append(change))
    pool.probe_failed(worker, "why", THRESHOLD)
    pool.probe_answered(worker)
    assert told == [Change.PROBED]
    pool.begin(worker)
    pool.remove("http://a")
    pool.probe_failed(worker, "why", THRESHOLD)
    pool.probe_answered(worker)
    pool.end(worker)
    pool.probe_failed(worker, "why", THRESHOLD)
    assert told[1:] == [Change.DRAINING, Change.PROBED, Change.PROBED, Change.FORGOTTEN]


def test_the_next_change_of_the_candidates_wakes_who_waits(pool: WorkerPool) -> None:
    worker = pool.add("http://a")
    with pool.weights_change([worker]):
        event = pool.next_change
        assert not event.is_set()
    assert event.is_set()
    assert not pool.next_change.is_set()


@dataclass
class Known:
    """What the model knows of a worker."""

    state: WorkerState = WorkerState.HEALTHY
    completions_url: str | None = None
    labels: dict[str, object] = field(default_factory=dict)
    failures: int = 0
    answers: bool = True
    service: dict[str, Any] = field(default_factory=lambda: {"disabled": None, "is_dead": False, "missed": None})


class Model(RuleBasedStateMachine):
    """Any order of registrations, removals, requests, probes and changes, against a plain model of what is known."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = WorkerPool(LeastInFlight())
        self.known: dict[str, Known] = {}
        self.requests: list[Worker] = []
        self.changes: list[tuple[Any, Worker]] = []

    urls = st.sampled_from(["http://a", "http://b", "http://c"])

    def draw(self, data: st.DataObject) -> tuple[Worker, Known]:
        worker = data.draw(st.sampled_from(self.pool.workers))
        return worker, self.known[worker.url]

    def forget_drained(self, url: str) -> None:
        if self.known[url].state is WorkerState.DRAINING and url not in [one.url for one in self.requests]:
            del self.known[url]

    @rule(url=urls, labels=st.sampled_from([None, HELD, {"zone": 1}]), second=st.sampled_from([None, "http://d"]))
    def add(self, url: str, labels: dict[str, object] | None, second: str | None) -> None:
        known = self.known.setdefault(url, Known())
        if known.state is WorkerState.DRAINING:
            known.completions_url, known.labels = None, {}
        known.state, known.failures, known.answers = WorkerState.HEALTHY, 0, True
        known.completions_url = second or known.completions_url
        known.labels = known.labels | (labels or {})
        self.pool.add(url, second, labels=labels)

    @rule(url=urls)
    def remove(self, url: str) -> None:
        assert self.pool.remove(url) == (url in self.known)
        if url in self.known:
            self.known[url].state = WorkerState.DRAINING
            self.forget_drained(url)

    @rule(excluded=st.lists(urls))
    def request(self, excluded: list[str]) -> None:
        exclude = [worker for worker in self.pool.workers if worker.url in excluded]
        worker = self.pool.choose(ANY, exclude)
        if worker is None:
            assert all(candidate in exclude for candidate in self.pool.candidates)
            return
        assert worker in self.pool.candidates
        assert worker not in exclude
        self.pool.begin(worker)
        self.requests.append(worker)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.requests))
        self.requests.remove(worker)
        self.pool.end(worker)
        self.forget_drained(worker.url)

    @precondition(lambda self: self.pool.workers)
    @rule(data=st.data(), report=st.sampled_from(["refused", "failed", "answered"]))
    def probe(self, data: st.DataObject, report: str) -> None:
        worker, known = self.draw(data)
        known.answers = report == "answered"
        known.failures = known.failures + 1 if report == "failed" else 0 if report == "answered" else known.failures
        if report == "refused":
            self.pool.refused(worker)
        elif report == "failed":
            self.pool.probe_failed(worker, "why", THRESHOLD)
        else:
            self.pool.probe_answered(worker)
        if known.state is WorkerState.HEALTHY and (
            report == "refused" or (report == "failed" and known.failures >= THRESHOLD)
        ):
            known.state = WorkerState.QUARANTINED
        elif known.state is WorkerState.QUARANTINED and report == "answered" and "revive" not in known.labels:
            known.state = WorkerState.HEALTHY

    @precondition(lambda self: self.pool.workers)
    @rule(data=st.data(), disabled=st.sampled_from([None, "why"]), is_dead=st.booleans())
    def set_service(self, data: st.DataObject, disabled: str | None, is_dead: bool) -> None:
        worker, known = self.draw(data)
        known.service |= {"disabled": disabled, "is_dead": is_dead}
        self.pool.set_service(worker, disabled=disabled, is_dead=is_dead)

    @precondition(lambda self: self.pool.workers)
    @rule(data=st.data(), missed=st.sampled_from([None, "what"]))
    def miss(self, data: st.DataObject, missed: str | None) -> None:
        worker, known = self.draw(data)
        known.service["missed"] = missed
        self.pool.set_missed(worker, missed)

    @precondition(lambda self: self.pool.workers)
    @rule(data=st.data())
    def begin_change(self, data: st.DataObject) -> None:
        worker, _ = self.draw(data)
        change = self.pool.weights_change([worker])
        change.__enter__()
        self.changes.append((change, worker))

    @precondition(lambda self: self.changes)
    @rule()
    def end_change(self) -> None:
        change, _ = self.changes.pop()
        change.__exit__(None, None, None)

    @invariant()
    def each_worker_is_as_the_model_says(self) -> None:
        assert {worker.url for worker in self.pool.workers} == {*self.known}
        for worker in self.pool.workers:
            known = self.known[worker.url]
            assert (worker.state, worker.answers, worker.failed_probes) == (known.state, known.answers, known.failures)
            assert (worker.completions_url, worker.labels) == (known.completions_url, known.labels)
            assert known.service == {name: getattr(worker, name) for name in known.service}
            assert worker.holds == [one for _, one in self.changes].count(worker)
            assert worker.in_flight == self.requests.count(worker)

    @invariant()
    def candidates_are_the_healthy_workers_else_the_last_resort(self) -> None:
        serving = [one for one in self.pool.workers if not any(self.known[one.url].service.values()) and not one.holds]
        healthy = [worker for worker in serving if worker.state is WorkerState.HEALTHY]
        waiting = [w for w in serving if w.state is WorkerState.QUARANTINED and w.held and w.answers]
        assert list(self.pool.candidates) == (healthy or waiting)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
