"""Compares the model with the largest real cluster here, and asks it about a large one.

Usage: python -m benchmarks.simulation check [--apis N] [--replicas N]    (PostgreSQL and 15 processes; two minutes)
       python -m benchmarks.simulation check-training [--apis N] [--replicas N]    (the same with an engine; a minute)
       python -m benchmarks.simulation large [QUESTION ...]               (the model alone; five minutes)
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import replace

from benchmarks.calibration import calibrate
from benchmarks.series import quantile
from benchmarks.simulation.learners import learn
from benchmarks.simulation.questions import QUESTIONS
from benchmarks.simulation.real import RealCluster, cluster, training_server
from benchmarks.simulation.scenarios import Scenario, check_of, simulate
from benchmarks.simulation.services import load
from benchmarks.simulation.tenants import Learning

LOADS = ((8, 4), (64, 4), (256, 4))
"""Clients, and samples in flight of each."""
SAMPLE_S = 0.2
SECONDS = 10.0
LEARNERS = 4


def check(apis: int, replicas: int) -> None:
    """Print predictions beside what is measured. Other programs may use the machine, too: the model gets the cores that
    the real cluster got in the window, and the speed that the machine had before and after it."""
    print(f"{apis} API processes, {replicas} replicas of {SAMPLE_S * 1e3:.0f} ms; predicted / measured / error")
    with cluster(apis, replicas, SAMPLE_S * 1e3) as real:
        for clients, in_flight in LOADS:
            before = calibrate()
            measured = real.load(clients, in_flight, SECONDS, tenants=max(1, clients // 8)).result()
            services = load(machine=(before + calibrate()) / 2)
            used = sum(measured["cores"].values())
            predicted = simulate(check_of(clients, in_flight, SAMPLE_S, apis, replicas, used / 0.95), services)
            print(f"\n{clients} clients × {in_flight} samples in flight; the cluster used {used:.2f} cores")
            for name in ("samples_per_s", "p50_ms", "p99_ms"):
                _line(name, getattr(predicted, name), measured[name])
            for part in ("api", "database", "router", "clients"):
                _line(f"CPU of a sample, {part}, ms", predicted.cpu_ms[part], measured["cpu_ms"][part])
            lost = {name: measured[name] for name in ("lost", "refused", "errors", "moves")}
            print(f"  {lost}")
        _deaths(real)


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
    print(f"  {name:28} {predicted:9.3f} {measured:9.3f} {predicted / measured - 1:+8.0%}")


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
    parser.add_argument("what", choices=("check", "check-training", "large"))
    parser.add_argument("questions", nargs="*", help=f"of a large cluster: {', '.join(QUESTIONS)}; all by default")
    parser.add_argument("--apis", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=8)
    options = parser.parse_args()
    if options.what == "check":
        check(options.apis, options.replicas)
        return
    if options.what == "check-training":
        check_training(options.apis, options.replicas)
        return
    logging.getLogger("skyrl.router").setLevel(logging.ERROR)  # it warns of each replica that dies
    unknown = set(options.questions) - QUESTIONS.keys()
    if unknown:
        parser.error(f"unknown questions: {', '.join(sorted(unknown))}")
    for name in options.questions or QUESTIONS:
        QUESTIONS[name](load())


if __name__ == "__main__":
    main()
