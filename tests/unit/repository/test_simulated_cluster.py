"""The model of a cluster: its clock and locks, and that it answers what is known of small clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.series import quantile
from benchmarks.simulation import whole_samples
from benchmarks.simulation.adapters import Traffic, place
from benchmarks.simulation.cores import Cores, Thread
from benchmarks.simulation.events import Activity, Clock, Lock
from benchmarks.simulation.scenarios import Scenario, check_of, simulate
from benchmarks.simulation.services import load
from benchmarks.simulation.start import Start, start
from benchmarks.simulation.tenants import Learning

SMALL = Scenario(
    clients=40, tenants=40, apis=2, replicas=4, in_flight=1, sample_s=1.0, pause_s=1.0, warm_up_s=2.0, seconds=6.0
)
SERVICES = load()


def test_threads_take_turns_on_a_core_by_slices_and_the_later_one_waits_for_the_lock() -> None:
    clock = Clock()
    cores, lock = Cores(clock, 1, slice_s=0.1), Lock(clock)
    ended: dict[str, float] = {}

    def work(name: str, locked: bool) -> Activity:
        if locked:
            yield lock.take()
        yield from Thread(cores).work(1.0)
        if locked:
            lock.give_back()
        ended[name] = clock.now

    for name, locked in (("first", True), ("second", True), ("beside", False)):
        clock.start(work(name, locked))
    clock.run(10.0)
    assert ended == pytest.approx({"first": 1.9, "beside": 2.0, "second": 3.0})


def test_a_woken_thread_runs_before_those_that_have_used_up_their_slices() -> None:
    clock = Clock()
    cores = Cores(clock, 1, slice_s=0.1)
    ended: list[tuple[str, float]] = []

    def work(name: str, seconds: float) -> Activity:
        yield from Thread(cores).work(seconds)
        ended.append((name, clock.now))

    clock.start(work("long", 1.0))
    clock.start(work("long too", 1.0))
    clock.at(0.25, lambda: clock.start(work("short", 0.05)))
    clock.run(10.0)
    assert ended[0] == ("short", pytest.approx(0.35)), "at the end of the slice that runs from 0.2 to 0.3"


def test_a_thread_that_has_work_pays_for_no_wake_up_and_crowded_cores_take_more_cpu() -> None:
    clock = Clock()
    cores = Cores(clock, 2, crowded=1.5)
    thread, other = Thread(cores, wake_s=0.1), Thread(cores)
    for _ in range(3):
        clock.start(thread.work(0.2))
    clock.run(1.0)
    assert thread.wakes == 1
    assert thread.busy_s == pytest.approx(0.7)
    clock.start(thread.work(0.2))
    clock.start(other.work(0.2))
    clock.run(2.0)
    assert thread.wakes == 2
    assert other.busy_s == pytest.approx(0.3)


def test_cpu_of_a_sample_falls_with_the_load() -> None:
    few, many = (
        simulate(replace(check_of(clients, 4, 0.2, apis=4, replicas=8, cores=2), warm_up_s=2.0, seconds=3.0), SERVICES)
        for clients in (8, 64)
    )
    for part in ("api", "database", "router", "clients"):
        assert many.cpu_ms[part] < 0.7 * few.cpu_ms[part], part


def test_samples_come_at_the_rate_of_their_clients_and_take_a_replicas_time() -> None:
    found = simulate(SMALL, SERVICES)
    assert found.samples_per_s == pytest.approx(20, rel=0.15)
    assert 1_000 < found.p50_ms < 1_100


def test_no_sample_is_lost_with_a_process_and_a_replica() -> None:
    rack = replace(SMALL, dead_apis=1, dead_replicas=1, dead_after_s=1.0, seconds=20.0)
    found = simulate(rack, SERVICES)
    assert found.repeated > 0
    assert 9_000 < found.longest_ms < 14_000, "samples of a dead process wait for five rounds"
    assert min(found.per_second[16:]) > 10, "all clients are back"


def test_a_light_tenant_waits_less_by_fair_shares_than_in_the_order_of_arrival() -> None:
    heavy = 8
    crowded = replace(SMALL, crowd=(20,) * heavy, slots=10, pause_s=5.0, warm_up_s=8.0, seconds=12.0)
    light: dict[bool, float] = {}
    for fair in (True, False):
        found = simulate(replace(crowded, fair=fair), SERVICES)
        light[fair] = quantile([wait for _, wait, tenant in found.waits if tenant >= heavy], 0.5)
    assert light[True] < 2.0 < light[False]


def test_a_commit_in_one_message_holds_the_lock_for_less_time() -> None:
    held = {
        pipelined: simulate(replace(SMALL, trip_s=0.002, pipelined=pipelined), SERVICES).utilisation["write lock"]
        for pipelined in (True, False)
    }
    assert held[True] < held[False] / 4


def test_steps_of_tenants_follow_one_another_on_the_device() -> None:
    learning = Learning(samples=1, passes=4, pass_s=0.5, step_s=0.0, save_s=0.0, away_s=0.01)
    many = replace(SMALL, clients=0, tenants=1, learners=4, learning=learning, publish_s=0.0, seconds=60.0)
    found = simulate(many, SERVICES)
    assert found.utilisation["devices"] == pytest.approx(1.0, abs=0.02)
    assert len(found.trained) / 60 == pytest.approx(0.5, rel=0.05)
    assert quantile([wait for _, wait, _ in found.trained], 0.5) == pytest.approx(7.0, rel=0.05), (
        "four steps of 2 s, less the second in which a tenant samples"
    )


def test_first_heartbeats_of_many_sessions_are_answered_in_groups() -> None:
    found = start(Start(sessions=2_000, apis=2, within_s=0.5), SERVICES)
    assert found.commits < 1_000
    assert found.last_s < 10


def test_a_dead_replicas_adapters_are_loaded_elsewhere_and_no_others() -> None:
    quiet = Traffic(adapters=40, replicas=4, slots=40, rate=20.0, sample_s=0.1, warm_up_s=60.0, seconds=60.0)
    assert place("adapter_affinity", quiet).loads == 0
    dead = place("adapter_affinity", replace(quiet, dead=1, dead_at_s=80.0))
    assert dead.loads * 60 == 10
    assert dead.evictions == 0


def test_behind_a_router_that_names_no_replicas_a_light_tenant_waits_longer() -> None:
    crowded = replace(SMALL, crowd=(20,) * 8, slots=10, pause_s=5.0, warm_up_s=8.0, seconds=12.0)
    light: dict[bool, float] = {}
    for named in (True, False):
        found = simulate(replace(crowded, names_workers=named), SERVICES)
        light[named] = quantile([wait for _, wait, tenant in found.waits if tenant >= 8], 0.9)
    assert light[True] * 1.1 < light[False]


def test_samples_with_keys_of_their_own_fill_replicas_more_evenly_than_those_of_a_few_sessions() -> None:
    full = replace(SMALL, clients=8, tenants=8, in_flight=10, slots=15, pause_s=0.0)
    rate = {shared: simulate(replace(full, shares_keys=shared), SERVICES).samples_per_s for shared in (True, False)}
    assert rate[False] > 1.05 * rate[True]


def test_the_costs_of_a_sample_and_of_a_wake_up_are_found_again_from_the_cpu_that_they_caused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(whole_samples, "MANY", (16, 4))
    monkeypatch.setattr(whole_samples, "ROUNDS", 3)
    few, many = (whole_samples._simulated(load, 0.0, SERVICES) for load in ((16, 1), (16, 4)))
    idle = {"api": SERVICES.idle.base, "database": SERVICES.idle_db.base}
    few_s, many_s = ({name: ms / 1e3 for name, ms in each.cpu_ms.items()} for each in (few, many))
    found = whole_samples.solve(vars(SERVICES), whole_samples.Measured(idle, few_s, many_s, (0.0, 0.0)))
    for name in ("api_wake", "database_wake", "router_wake", "submit", "router"):
        assert found[name].base == pytest.approx(getattr(SERVICES, name).base, rel=0.2), name
