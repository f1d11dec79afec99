"""The parts of `make chaos` that decide: the plan of faults, and the rules for lost and differing results."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from typing import Any

from multidict import CIMultiDict

from tests.chaos.journal import Sample, Step, append, read
from tests.chaos.ledger import is_failure, promises
from tests.chaos.plan import DECK, PATHS, plan
from tests.chaos.reference import Comparison
from tests.chaos.report import Results, text
from tests.chaos.times import Times
from tests.e2e.fault_proxy import Answer, Call

ROUND = sum(times for *_, times in DECK)


def faults(seed: int, count: int = 5 * ROUND) -> list[Any]:
    return list(islice(plan(seed), count))


def test_the_same_seed_makes_the_same_plan() -> None:
    assert faults(1) == faults(1) != faults(2)


def test_every_round_has_every_kind_of_fault() -> None:
    kinds = {(kind, victim) for kind, victim, *_ in DECK}
    planned = faults(3)
    for first in range(0, len(planned), ROUND):
        assert {(fault.kind, fault.victim) for fault in planned[first : first + ROUND]} == kinds
    assert {fault.path for fault in planned} == set(PATHS)


def call(path: str, body: Any, answer: Any, status_at_client: int | None = 200) -> Call:
    headers = CIMultiDict({"X-API-Key": "tml-me", "Accept": "application/json", "User-Agent": "me"})
    recorded_call = Call("POST", f"/api/v1/{path}", json.dumps(body).encode(), headers, lambda _: asyncio.sleep(0))  # type: ignore[arg-type]
    recorded_call.answers.append(Answer(200, json.dumps(answer).encode()))
    recorded_call.told = status_at_client
    return recorded_call


def test_only_answers_that_reached_a_client_count_as_promises() -> None:
    found = promises(
        [
            call("asample", {}, {"request_id": "r1"}),
            call("asample", {}, {"request_id": "r2"}, status_at_client=None),
            call("optim_step", {}, {"request_id": "r3"}),
            call("session_heartbeat", {}, {"type": "session_heartbeat"}),
            call("retrieve_future", {"request_id": "r1"}, {"tokens": [1]}),
            call("retrieve_future", {"request_id": "r1"}, {"tokens": [2]}),
            call("retrieve_future", {"request_id": "r3"}, {"metrics": {}}, status_at_client=None),
        ]
    )
    assert {request_id: promise.path for request_id, promise in found.items()} == {"r1": "asample", "r3": "optim_step"}
    assert found["r1"].results == {b'{"tokens": [1]}', b'{"tokens": [2]}'}
    assert not found["r3"].results
    assert found["r1"].headers == {"X-API-Key": "tml-me", "Accept": "application/json"}


def test_an_answer_with_an_error_is_a_failure() -> None:
    assert is_failure(b'{"error": "gave up", "category": "server"}')
    assert not is_failure(b'{"metrics": {}}')
    assert not is_failure(b"\x0a\x03\x01\x02\x03")


def test_a_journal_keeps_every_bit_of_a_step(tmp_path: Any) -> None:
    steps = [Step([Sample(0, [1], [2], [0.1 + 0.2])], [([1], [2], [-1e-7], 1 / 3)], [[{"loss": 2 / 3}, [[0.1]]]], "a")]
    steps.append(Step(loaded="a"))
    for step in steps:
        append(tmp_path / "j", step)
    read_steps = read(tmp_path / "j")
    assert [step.samples for step in read_steps] == [step.samples for step in steps]
    assert read_steps[0].answers == steps[0].answers
    assert [tuple(each) for each in read_steps[0].data] == steps[0].data
    assert [(step.saved, step.loaded) for step in read_steps] == [("a", None), (None, "a")]


def test_the_report_names_every_finding() -> None:
    good = Comparison(steps=3, samples=40, largest=2e-5, apart=[0.1, 0.3])
    assert not any(row.found for row in Results(comparisons={"count": good}).rows())
    bad = Results(comparisons={"count": good, "sort": Comparison(steps=2, samples=9, wrong=1, differing=[1])})
    bad.findings.lost.append("asample r1: no result")
    bad.tenants_with_other_weights.append("sort")
    assert sum(bool(row.found) for row in bad.rows()) == 4
    assert "    1  lost, of 0 accepted requests\n         asample r1: no result\n" in text(bad.rows())


def test_a_run_that_was_ended_names_what_was_not_done() -> None:
    (row,) = [row for row in Results(unchecked=["faults"]).rows() if row.found]
    assert row.found == ["faults"]


def test_the_bound_of_a_step_is_its_share_and_the_longest_pass_of_another_tenant() -> None:
    alone = {"count": 1.0, "sort": 2.0, "long": 8.0, "agents": 3.0}
    times = Times({kind: [Step(seconds=9.0), Step(seconds=s, train_s=s / 2)] for kind, s in alone.items()})
    assert [times.bound_s(kind) for kind in alone] == [4 + 4, 8 + 4, 32 + 1.5, 12 + 4]
    calm = {kind: [Step(seconds=s)] for kind, s in (("count", 8.0), ("sort", 12.1), ("long", 20.0))} | {"agents": []}
    told, slow = times.compared(calm, times.calm_s)
    assert [line.partition(":")[0] for line in told] == [*alone]
    assert [line.partition(":")[0] for line in slow] == ["sort", "agents"]
    assert "no whole step in 68 s" in slow[1]
    assert times.compared({"agents": []}, 30.0)[1] == [], "ended before its bound"
