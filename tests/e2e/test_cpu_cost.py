"""The API process's cost of forwarding a sample is bounded, in CPU seconds relative to the speed of the machine.

The bound is coarse, because a machine's speed varies during a test. tests/component/server/test_call_count.py notices a
change of a tenth, but counts calls only; this test measures everything, with the web server and the kernel.
"""

from __future__ import annotations

import asyncio
from statistics import mean

from benchmarks.calibration import calibrate
from benchmarks.processes import cpu_seconds
from benchmarks.samples import LoadSpec, TinkerSamples
from benchmarks.stage import NullUpstream, gateway
from tests.postgres_server import ON_SQLITE

from .conftest import find_process

IN_FLIGHT = 64
WARM_UP, SAMPLES = 500, 2_000
MOST = 25.0
"""CPU seconds of the API process for 1,000 samples, in calibration loops. The bound is twice the measured 10.3 to 12.4
(0.26 to 0.31 s, loops of 25 ms), measured on a quiet machine and with four busy processes on two cores."""


async def forward(samples: TinkerSamples, numbers: range) -> set[str]:
    """Send a sample for each number, IN_FLIGHT at a time; returns the errors."""
    todo, problems = iter(numbers), set[str]()

    async def worker() -> None:
        connection = samples.connect()
        for number in todo:
            problem = await samples.sample(connection, number)
            if problem is not None:
                problems.add(problem)
        connection.close()

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return problems


@ON_SQLITE
async def test_forwarding_costs_no_more_cpu_than_its_bound() -> None:
    with NullUpstream() as upstream, gateway(upstream.url) as server:
        api = find_process(server, "skyrl.api.server").pid
        samples = TinkerSamples(LoadSpec(server.url, "tinker", IN_FLIGHT, seconds=0))
        await samples.open()
        assert not await forward(samples, range(WARM_UP))
        loops, before = [calibrate()], cpu_seconds(api)
        assert not await forward(samples, range(WARM_UP, WARM_UP + SAMPLES))
        spent = cpu_seconds(api) - before
        loops.append(calibrate())
    cost = spent / SAMPLES * 1000 / mean(loops)
    assert cost < MOST, f"{cost:.1f} loops: {spent:.2f} s for {SAMPLES} samples, loops of {loops} s"
