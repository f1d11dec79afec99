"""Compares the model with the largest real cluster here, and asks it about a large one.

Usage: python -m benchmarks.simulation check [--apis N] [--replicas N]    (PostgreSQL and 15 processes; two minutes)
       python -m benchmarks.simulation check-training [--apis N] [--replicas N]    (the same with an engine; a minute)
       python -m benchmarks.simulation check-adapters     (two routers, 16 fake replicas; three minutes)
       python -m benchmarks.simulation check-tenants      (2 API processes, 4 full fake replicas; two minutes)
       python -m benchmarks.simulation large [QUESTION ...]               (the model alone; five minutes)
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from dataclasses import asdict, replace
from statistics import fmean

from benchmarks.calibration import calibrate
from benchmarks.series import quantile
from benchmarks.simulation.adapters import place
from benchmarks.simulation.learners import learn
from benchmarks.simulation.questions import QUESTIONS, TRAFFIC
from benchmarks.simulation.real import RealCluster, cluster, training_server
from benchmarks.simulation.real_adapters import measure as measure_adapters
from benchmarks.simulation.real_tenants import measure as measure_tenants
from benchmarks.simulation.real_tenants import predict as predict_tenants
from benchmarks.simulation.scenarios import Scenario, check_of, simulate
from benchmarks.simulation.services import load
from benchmarks.simulation.tenants import Learning

LOADS = ((8, 4), (64, 4), (256, 4))
"""Clients, and samples in flight of each."""
SAMPLE_S = 0.2
SECONDS = 10.0
LEARNERS = 4
SEEDS = 10
"""Predictions of random requests."""


def check(apis: int, replicas: int) -> None:
    """Print predictions beside what is measured. The model gets the number of cores here and the speed of the machine
    before and after; and, as other programs may use the machine, too, the cores that these took in the window."""
    cores = len(os.sched_getaffinity(0))
    print(f"{apis} API processes, {replicas} replicas of {SAMPLE_S * 1e3:.0f} ms, {cores} cores")
    with cluster(apis, replicas, SAMPLE_S * 1e3) as real:
        for clients, in_flight in LOADS:
            before = calibrate()
            measured = real.load(clients, in_flight, SECONDS, tenants=max(1, clients // 8)).result()
            services, others = load(machine=(before + calibrate()) / 2), measured["other_cores"]
            scenario = check_of(clients, in_flight, SAMPLE_S, apis, replicas, cores=cores, others=others)
            predicted = simulate(scenario, services)
            print(f"\n{clients} clients × {in_flight} samples in flight; other programs took {others:.2f} cores")
            print("  predicted / measured / error")
            for name in ("samples_per_s", "p50_ms", "p99_ms"):
                _line(name, getattr(predicted, name), measured[name])
            for part in ("api", "database", "router", "replicas", "clients"):
                _line(f"CPU of a sample, {part}, ms", predicted.cpu_ms[part], measured["cpu_ms"][part])
            lost = {name: measured[name] for name in ("lost", "refused", "errors", "moves")}
            print(f"  {lost}")
        _deaths(real)


def check_adapters() -> None:
    """Measure and predict what each policy does with 80 adapters on 8 replicas of 16 slots: a twelfth of the question
    `adapters`, with as many adapters and requests in flight for each replica."""
    policies = ("adapter_affinity", "consistent_hashing")
    for name in ("alike", "by Zipf's law, a new version a minute"):
        traffic = replace(TRAFFIC[name], adapters=80, replicas=8, rate=80.0, warm_up_s=25.0, seconds=45.0)
        measured = measure_adapters(policies, traffic)
        print(f"\n80 adapters {name}; predicted / measured / error")
        for policy in policies:
            found, urls = measured[policy].placed, measured[policy].urls
            predicted = [place(policy, traffic, seed, urls) for seed in range(SEEDS)]
            _line(f"loads/s, {policy}", fmean(each.loads for each in predicted), found.loads)
            _line("  evictions/s", fmean(each.evictions for each in predicted), found.evictions)
            loads = [each.loads for each in predicted]
            print(f"  predicted from {min(loads):.2f} to {max(loads):.2f} loads/s; errors: {measured[policy].errors}")


def check_tenants() -> None:
    """Measure and predict what a sample of a light tenant waits beside heavy ones."""
    services = load(machine=calibrate())
    for fair, measured in measure_tenants().items():
        predicted = predict_tenants(services, fair=fair)
        print(f"\n{'by fair shares' if fair else 'in the order of arrival'}; predicted / measured / error")
        for name, seconds in asdict(measured).items():
            _line(f"{name}, s", getattr(predicted, name), seconds)


def check_training(apis: int, replicas: int) -> None:
    """Measure one tenant that does reinforcement learning, predict LEARNERS of them beside each other, and measure
    these."""
    with training_server(apis, replicas, SAMPLE_S * 1e3) as url:
        asked = Learning(samples=4, passes=4)
        alone = learn(url, 1, asked, SECONDS).medians()
        beside = learn(url, LEARNERS, asked, 2 * SECONDS)
    learning = replace(asked, pass_s=alone["trained"] / asked.passes, step_s=0.0, save_s=alone["saved"], away_s=0.0)
    scenario = Scenario(0, 1, apis, replicas, 1, alone["samples"], learners=LEARNERS, learning=learning, merges=False)
    predicted = simulate(replace(scenario, publish_s=0.0, warm_up_s=20.0, seconds=60.0), load())
    measured = beside.medians()
    print("one tenant's step, s: " + ", ".join(f"{part} {seconds:.3f}" for part, seconds in alone.items()))
    print(f"{LEARNERS} tenants beside each other; predicted / measured / error")
    for name, waits, real in (
        ("samples, s", predicted.waits, measured["samples"]),
        ("training of a step, s", predicted.trained, measured["trained"]),
        ("a save, s", predicted.saved, measured["saved"]),
    ):
        _line(name, quantile([wait for _, wait, _ in waits], 0.5), real)
    _line("steps/s", len(predicted.trained) / 60.0, len(beside.trained) / (2 * SECONDS))


def _line(name: str, predicted: float, measured: float) -> None:
    error = f"{predicted / measured - 1:+8.0%}" if measured else ""
    print(f"  {name:28} {predicted:9.3f} {measured:9.3f} {error}")


def _deaths(real: RealCluster) -> None:
    """End a replica, then a server, while samples run; print the longest time without the end of a sample."""
    running = real.load(16, 4, 12, tenants=2, groups={})
    time.sleep(4)
    real.replicas[0].kill()
    measured = running.result()
    _death("a dead replica", measured)
    running = real.load(16, 4, 30, tenants=2, groups={})
    time.sleep(6)
    real.kill_server(0)
    _death("a dead server", running.result())


def _death(name: str, measured: dict[str, object]) -> None:
    told = {key: measured[key] for key in ("longest_ms", "lost", "refused", "errors", "moves")}
    print(f"\n{name}: {told}\n  ended in each second: {_seconds(measured['ends'])}")


def _seconds(ends: object) -> list[int]:
    assert isinstance(ends, list)
    return [sum(ends[start : start + 10]) for start in range(0, len(ends), 10)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checks = {
        "check": lambda: check(options.apis, options.replicas),
        "check-training": lambda: check_training(options.apis, options.replicas),
        "check-adapters": check_adapters,
        "check-tenants": check_tenants,
    }
    parser.add_argument("what", choices=(*checks, "large"))
    parser.add_argument("questions", nargs="*", help=f"of a large cluster: {', '.join(QUESTIONS)}; all by default")
    parser.add_argument("--apis", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=8)
    options = parser.parse_args()
    if options.what in checks:
        checks[options.what]()
        return
    logging.getLogger("skyrl.router").setLevel(logging.ERROR)  # it warns of each replica that dies
    unknown = set(options.questions) - QUESTIONS.keys()
    if unknown:
        parser.error(f"unknown questions: {', '.join(sorted(unknown))}")
    for name in options.questions or QUESTIONS:
        QUESTIONS[name](load())


if __name__ == "__main__":
    main()
