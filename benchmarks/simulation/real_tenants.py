"""Heavy tenants beside light ones on a real cluster with full replicas, for `check-tenants`.

The fake replicas have few places and run the sample with the lowest priority next, as vLLM; the API processes give the
priorities (`skyrl.sampling.order`). Heavy and light clients are a process each.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.series import quantile
from benchmarks.simulation.real import RealCluster, cluster
from benchmarks.simulation.scenarios import Scenario, simulate
from benchmarks.simulation.services import Services

APIS, REPLICAS, PLACES, SAMPLE_S, SPREAD = 2, 4, 10, 0.5, 0.2
HEAVY, IN_FLIGHT = 16, 8
"""Heavy clients, each a tenant, and the samples in flight of each: three times as many as there are places."""
LIGHT, PAUSE_S = 32, 2.0
"""Light clients, each a tenant with one sample in flight or a pause of so many seconds on average."""
SECONDS = 20.0
DRAWS = 5
"""Simulated clusters, each with other random times."""


@dataclass
class Waits:
    """Of samples, in seconds: the median and the 99th percentile of the light tenants, and the median of the heavy."""

    light_p50: float
    light_p99: float
    heavy_p50: float


def predict(services: Services, *, fair: bool) -> Waits:
    """The real router is `skyrl router`: its answers do not name their replicas, and each sample has its own key."""
    clients = HEAVY + LIGHT
    scenario = Scenario(
        *(clients, clients, APIS, REPLICAS, 1, SAMPLE_S),
        spread=SPREAD,
        pause_s=PAUSE_S,
        crowd=(IN_FLIGHT,) * HEAVY,
        fair=fair,
        names_workers=False,
        slots=PLACES,
        shares_keys=False,
        shared=float(len(os.sched_getaffinity(0))),
        connected=True,
        warm_up_s=8.0,
        seconds=SECONDS,
    )
    found = [wait for draw in range(DRAWS) for wait in simulate(scenario, services, draw).waits]
    light = [wait for _, wait, tenant in found if tenant >= HEAVY]
    heavy = [wait for _, wait, tenant in found if tenant < HEAVY]
    return Waits(quantile(light, 0.5), quantile(light, 0.99), quantile(heavy, 0.5))


def measure() -> dict[bool, Waits]:
    """By fair shares (True), and in the order of arrival."""
    program = "benchmarks.simulation.fake_replica"
    with ExitStack() as stack:
        config = Path(stack.enter_context(TemporaryDirectory())) / "config.toml"
        config.write_text("external_inference_priority = true\n")
        real = stack.enter_context(cluster(APIS, REPLICAS, SAMPLE_S * 1e3, program, "--config", str(config)))
        for replica in real.replicas:
            replica.control(f"places={PLACES}&spread={SPREAD}")
        return {fair: _measured(real, fair=fair) for fair in (True, False)}


def _measured(real: RealCluster, *, fair: bool) -> Waits:
    for replica in real.replicas:
        replica.control(f"fair={int(fair)}")
    heavy = real.load(HEAVY, IN_FLIGHT, SECONDS + 4, tenants=HEAVY, names="heavy", warm_up_s=6)
    light = real.load(LIGHT, 1, SECONDS, tenants=LIGHT, names="light", warm_up_s=8, pause_s=PAUSE_S)
    few, many = _checked(light.result()), _checked(heavy.result())
    return Waits(few["p50_ms"] / 1e3, few["p99_ms"] / 1e3, many["p50_ms"] / 1e3)


def _checked(result: dict[str, Any]) -> dict[str, Any]:
    assert not any(result[fault] for fault in ("errors", "lost", "refused")), result
    return result
