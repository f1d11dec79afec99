"""The questions to the model of a large cluster. Each function prints its answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from benchmarks.series import quantile
from benchmarks.simulation.adapters import Traffic, place
from benchmarks.simulation.outcome import Outcome, Waits
from benchmarks.simulation.scenarios import LARGE, Scenario, simulate, with_rate
from benchmarks.simulation.services import Services
from benchmarks.simulation.start import Start, start
from benchmarks.simulation.tenants import Learning

RATES = (1_000, 4_000)


def rates(services: Services) -> None:
    """Where is the first bottleneck? Also with groups of rows whose messages go out one by one."""
    for rate in RATES:
        for pipelined in (True, False):
            how = "one message for a group of rows" if pipelined else "BEGIN, lock, rows and COMMIT one by one"
            found = _run(f"{rate} samples/s, {how}", replace(with_rate(LARGE, rate), pipelined=pipelined), services)
            cpu = ", ".join(f"{part} {ms:.2f}" for part, ms in found.cpu_ms.items() if ms)
            print(f"  CPU of a sample in ms: {cpu}", flush=True)


def rack(services: Services) -> None:
    """What happens when a rack dies?"""
    scenario = with_rate(replace(LARGE, dead_apis=3, dead_replicas=13, dead_after_s=2.0, seconds=16.0), 500)
    found = _run("a rack of 8 nodes dies at second 2: 3 API processes, 13 replicas", scenario, services)
    late, longest_s = sum(wait > 6 for _, wait, _ in found.waits), found.longest_ms / 1e3
    print(f"  {found.repeated} samples are sent again; {late} take more than 6 s, the longest {longest_s:.1f} s")
    print(f"  ended in each second: {found.per_second}", flush=True)


CROWDS = {
    "none": (),
    "10 tenants with 128 in flight": (128,) * 10,
    "200 by Zipf's law, 1,280 in flight in all": tuple(max(1, round(1_280 / 5.88 / (n + 1))) for n in range(200)),
}


def unlike(services: Services) -> None:
    """What does a sample of a light tenant wait beside heavy ones? A fifth of the cluster, with all replicas full."""
    fifth = replace(LARGE, apis=4, replicas=20, clients=400, tenants=400, slots=50, pause_s=18.0)
    fifth = replace(fifth, warm_up_s=8.0, seconds=16.0)
    for name, crowd in CROWDS.items():
        for fair in (True, False) if crowd else (True,):
            scenario = replace(fifth, crowd=crowd, fair=fair)
            order = "by fair shares" if fair else "in the order of arrival"
            found = _run(f"heavy tenants: {name}; replicas of 50 slots sample {order}", scenario, services)
            heavy = {number for number, size in enumerate(crowd) if size > 10}
            print(f"  light tenants {_waits([each for each in found.waits if each[2] not in heavy])}", end="")
            print(
                f"; heavy ones {_waits([each for each in found.waits if each[2] in heavy])}" * bool(heavy), flush=True
            )


def training(services: Services) -> None:
    """A thousand tenants do reinforcement learning: what does a step wait, what a sample, on how many engines? One
    pass of 8 requests is 3.2 s of an engine; with its samples and its client a step takes 24 s alone. How long
    does the step of a light tenant take, a fortieth of another's?"""
    for engines in (50, 100, 200):
        _training(engines, Learning(samples=4, passes=1, pass_s=3.2), True, services)
    for merges in (True, False):
        learning = Learning(samples=4, passes=8, pass_s=0.4)
        _training(100, learning, merges, services)
        for light in (20, 1_000):
            _training(100, learning, merges, services, light)
        _training(100, replace(learning, waits=True), merges, services)


def _training(engines: int, learning: Learning, merges: bool, services: Services, light: int = 0) -> None:
    """A tenth of the cluster with a tenth of the tenants: engines share nothing but PostgreSQL."""
    scenario = replace(
        LARGE,
        clients=0,
        learners=100 + light,
        light_learners=light,
        light=Learning(samples=4, passes=1, pass_bytes=32_000),
        engines=engines // 10,
        apis=2,
        replicas=max(10, engines // 10),
        learning=replace(learning, pass_bytes=1_280_000 // learning.passes),
        merges=merges,
        sample_s=20.0,
        warm_up_s=120.0,
        seconds=120.0,
    )
    how = "merged with those of others" if merges else "by a model's shares"
    how += ", the optimizer step when they have ended" * learning.waits
    found = _run(
        f"{engines} engines, {learning.passes} requests of forward_backward a step, passes {how}", scenario, services
    )
    first_light = scenario.learners - light
    steps = [step for step in found.trained if step[2] < first_light]
    print(f"  {len(steps) / scenario.seconds * 10:.1f} steps/s; a step {_waits(steps)}; a save {_waits(found.saved)}")
    if light:
        small = [step for step in found.trained if step[2] >= first_light]
        print(f"  {light * 10} light tenants beside them: a step {_waits(small)}, the longest {_longest(small):.2f} s")
    print(end="", flush=True)


def starts(services: Services) -> None:
    """All API processes start at once: what do 100,000 sessions wait with their first heartbeat, and what do samples
    of 0.2 s wait while the periodic work of all processes is in step?"""
    quick = with_rate(replace(LARGE, clients=2_000, sample_s=0.2), 1_000)
    for in_step in (True, False):
        _run(
            f"1000 samples/s; periodic work {'in step' if in_step else 'spread'}",
            replace(quick, in_step=in_step),
            services,
        )
    for within_s in (10.0, 0.5):
        found = start(Start(within_s=within_s), services)
        print(
            f"\nfirst heartbeats of 100,000 sessions within {within_s} s, 20 API processes: p50 {found.p50_s:.2f}, "
            f"p99 {found.p99_s:.2f} s, the last after {found.last_s:.1f} s; busy: API processes {found.api:.0%}, "
            f"PostgreSQL {found.database:.0%}; {found.commits} commits",
            flush=True,
        )


TRAFFIC = {
    "alike": Traffic(),
    "by Zipf's law": Traffic(zipf=1.0),
    "by Zipf's law, a new version a minute": Traffic(zipf=1.0, version_s=60.0),
    "by Zipf's law, 13 replicas die": Traffic(zipf=1.0, dead=13),
}


def adapters(_: Services) -> None:
    """Where do 1,000 adapters go on 100 replicas with 16 slots?"""
    for name, traffic in TRAFFIC.items():
        for policy in ("adapter_affinity", "consistent_hashing"):
            placed = place(policy, traffic)
            print(
                f"\nadapters {name}, {policy}: {placed.loads:.1f} loads/s and {placed.evictions:.1f} evictions/s at "
                f"{traffic.rate:.0f} requests/s; the fullest replica over the mean {placed.fullest:.2f}; the first "
                f"adapter is on {placed.spread}"
            )
            if traffic.dead:
                print(f"  loads in each second after the deaths: {placed.loads_after}")
            print(end="", flush=True)


QUESTIONS: dict[str, Callable[[Services], None]] = {
    "rates": rates,
    "rack": rack,
    "unlike": unlike,
    "training": training,
    "starts": starts,
    "adapters": adapters,
}


def _run(name: str, scenario: Scenario, services: Services) -> Outcome:
    began = time.perf_counter()
    found = simulate(scenario, services)
    busy = ", ".join(f"{part} {share:.0%}" for part, share in found.utilisation.items() if share)
    print(f"\n{name}: {found.samples_per_s:.0f} samples/s, p50 {found.p50_ms:.0f}, p99 {found.p99_ms:.0f} ms")
    print(f"  busy: {busy}; {found.events:,} events in {time.perf_counter() - began:.0f} s", flush=True)
    return found


def _waits(waits: Waits) -> str:
    seconds = [wait for _, wait, _ in waits]
    return f"p50 {quantile(seconds, 0.5):.2f}, p99 {quantile(seconds, 0.99):.2f} s"


def _longest(waits: Waits) -> float:
    return max(wait for _, wait, _ in waits)
