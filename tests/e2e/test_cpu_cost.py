"""What a forwarded sample costs the API process is bounded: CPU seconds by the speed of the machine, not time.

Coarse: the speed of a machine varies within a test. tests/component/test_call_count.py sees a tenth, but only what is
done by calls; this one sees all, the web server and the kernel included.
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
"""CPU of the API process for 1,000 samples, in calibration loops: twice the 10.3 to 12.4 that were measured (0.26 to
0.31 s, loops of 25 ms), on a quiet machine as with four busy processes on its two cores."""


async def forward(samples: TinkerSamples, numbers: range) -> set[str]:
    """A sample for each number, IN_FLIGHT at a time; what was wrong with them."""
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
async def test_forwarding_costs_no_more_cpu_than_it_did() -> None:
    with NullUpstream() as upstream, gateway(upstream) as server:
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
