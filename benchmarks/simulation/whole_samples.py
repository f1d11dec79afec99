"""What a sample and a wake-up cost each process, from one server with one API process, for `calibrate`.

The server runs idle, with few samples in flight and with many. With few, nearly every step of a sample wakes a thread;
with many, a thread finds more work whenever it has done some. The model of the same server counts its wake-ups. So two
measurements give the two costs of each process: of a sample, and of a wake-up.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, fields

from benchmarks.processes import tree_seconds
from benchmarks.simulation.outcome import Outcome
from benchmarks.simulation.real import cluster
from benchmarks.simulation.scenarios import check_of, simulate
from benchmarks.simulation.services import Cost, Services

SAMPLE_S = 0.2
REPLICAS = 2
FEW, MANY = (16, 1), (64, 4)
"""Clients, and samples in flight of each."""
SHARES = {"submit": 0.30, "forward": 0.15, "complete": 0.25, "retrieve": 0.20, "poll": 0.10}
"""How the event loop's work for a sample is dealt among its steps. The sum alone decides how many samples a process
can do; the shares only decide when in a sample's life it works."""
PARTS: tuple[str, ...] = ("api", "router", "replicas", "clients")
ROUNDS = 6


@dataclass
class Measured:
    """CPU seconds: `idle` for each second without clients, `few` and `many` for each sample. `others` are the cores
    that other programs took with few and with many."""

    idle: dict[str, float]
    few: dict[str, float]
    many: dict[str, float]
    others: tuple[float, float]


def whole_samples(found: dict[str, Cost]) -> dict[str, Cost]:
    """`found` has the costs of all other steps."""
    with cluster(1, REPLICAS, delay_ms=SAMPLE_S * 1e3) as real:
        groups = real.groups()
        before = _cpu(groups)
        time.sleep(10)
        idle = {name: (spent - before[name]) / 10 for name, spent in _cpu(groups).items()}
        few, many = (real.load(*load, 15, tenants=8).result() for load in (FEW, MANY))
    others = few["other_cores"], many["other_cores"]
    return solve(found, Measured(idle, _seconds(few["cpu_ms"]), _seconds(many["cpu_ms"]), others))


def _cpu(groups: dict[str, list[int]]) -> dict[str, float]:
    return {name: sum(map(tree_seconds, pids)) for name, pids in groups.items()}


def _seconds(cpu_ms: dict[str, float]) -> dict[str, float]:
    return {name: ms / 1e3 for name, ms in cpu_ms.items()}


def solve(found: dict[str, Cost], measured: Measured) -> dict[str, Cost]:
    """The costs with which the model takes as much CPU as was measured, with FEW and with MANY samples in flight."""
    sample, wake = dict.fromkeys(PARTS, 1e-4), dict.fromkeys((*PARTS, "database"), 3e-5)
    rest = found | {"idle": Cost(measured.idle["api"]), "idle_db": Cost(measured.idle["database"])}
    costs = _costs(sample, wake)
    for _ in range(ROUNDS):
        services = Services(**{field.name: (rest | costs)[field.name] for field in fields(Services)})
        few, many = (_simulated(*load, services) for load in zip((FEW, MANY), measured.others, strict=True))
        for part in PARTS:
            own = 0.0 if part == "api" else measured.idle.get(part, 0.0)  # the model has the API's
            few_s = measured.few[part] - own / few.samples_per_s - few.cpu_ms[part] / 1e3
            many_s = measured.many[part] - own / many.samples_per_s - many.cpu_ms[part] / 1e3
            more = (few_s - many_s) / (few.wakes[part] - many.wakes[part])
            wake[part] = max(0.0, wake[part] + more)
            sample[part] = max(0.0, sample[part] + many_s - more * many.wakes[part])
        few_s = measured.few["database"] - few.cpu_ms["database"] / 1e3
        wake["database"] = max(0.0, wake["database"] + few_s / few.wakes["database"])
        costs = _costs(sample, wake)
    return {"idle": rest["idle"], "idle_db": rest["idle_db"]} | costs


def _costs(sample: dict[str, float], wake: dict[str, float]) -> dict[str, Cost]:
    names = {"api": "api", "database": "database", "router": "router", "replicas": "replica", "clients": "client"}
    wakes = {f"{names[part]}_wake": Cost(seconds) for part, seconds in wake.items()}
    steps = {step: Cost(share * sample["api"]) for step, share in SHARES.items()}
    return wakes | steps | {names[part]: Cost(sample[part]) for part in PARTS if part != "api"}


def _simulated(load: tuple[int, int], others: float, services: Services) -> Outcome:
    cores = len(os.sched_getaffinity(0))
    return simulate(check_of(*load, SAMPLE_S, apis=1, replicas=REPLICAS, cores=cores, others=others), services)
