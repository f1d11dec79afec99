"""Adapters on real routers in front of fake replicas with few slots, for `check-adapters`: the traffic of `adapters`.

Requests come by the clock, whether or not earlier ones have ended. Each policy has a router and replicas of its own,
and both get their requests in the same seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.connection import Connection
from benchmarks.simulation.adapters import Placed, Traffic
from benchmarks.stage import NullUpstream, router

TICK_S = 0.1
Counts = dict[str, int]


class Replicas:
    """A router of one policy in front of fake replicas, and the connections of the sessions to it."""

    def __init__(self, stack: ExitStack, policy: str, traffic: Traffic) -> None:
        self.replicas = [
            stack.enter_context(NullUpstream("benchmarks.simulation.fake_replica")) for _ in range(traffic.replicas)
        ]
        for replica in self.replicas:
            replica.control(f"delay_ms={traffic.sample_s * 1e3}&slots={traffic.slots}&spread=0.2")
        url = stack.enter_context(router(*(each.url for each in self.replicas), flags=("--policy", policy)))
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)
        self._idle: defaultdict[str, list[Connection]] = defaultdict(list)
        self.errors: Counter[str] = Counter()

    def counts(self) -> Counts:
        found: Counter[str] = Counter()
        for replica in self.replicas:
            found.update(replica.control(""))
        return dict(found)

    async def request(self, session: str, adapter: str) -> None:
        idle = self._idle[session]
        headers = f"X-SMG-Routing-Key: {session}\r\nContent-Type: application/json\r\n".encode()
        connection = idle.pop() if idle else Connection(self._host, self._port, headers)
        body = b'{"model": "%s", "prompt": [3, 4, 5], "max_tokens": 1}' % adapter.encode()
        try:
            status, _ = await connection.post(b"/v1/completions", body)
        except OSError as error:
            self.errors[type(error).__name__] += 1
            return
        if status != 200:
            self.errors[str(status)] += 1
        idle.append(connection)


async def _arrive(all_replicas: list[Replicas], traffic: Traffic) -> None:
    """Requests until it is cancelled, the same for all."""
    loop = asyncio.get_running_loop()
    weights = [(number + 1) ** -traffic.zipf for number in range(traffic.adapters)]
    versions: Counter[int] = Counter()
    began, sent = loop.time(), 0
    async with asyncio.TaskGroup() as requests:
        for tick in itertools.count(1):
            for number in range(traffic.adapters):
                if traffic.version_s and random.random() < TICK_S / traffic.version_s:
                    versions[number] += 1
            due = round(tick * TICK_S * traffic.rate)
            for number in random.choices(range(traffic.adapters), weights, k=due - sent):
                session = f"session-{number}:sampler:{versions[number]}"
                for replicas in all_replicas:
                    requests.create_task(replicas.request(session, f"model-{number}@{versions[number]}"))
            sent = due
            await asyncio.sleep(began + tick * TICK_S - loop.time())


async def _windows(each: dict[str, Replicas], traffic: Traffic) -> tuple[dict[str, Counts], dict[str, Counts]]:
    """The counts of each after the warm-up, and after the window. A thread counts: the requests go on meanwhile."""

    async def count() -> dict[str, Counts]:
        return {policy: await asyncio.to_thread(replicas.counts) for policy, replicas in each.items()}

    arriving = asyncio.create_task(_arrive(list(each.values()), traffic))
    await asyncio.sleep(traffic.warm_up_s)
    before = await count()
    await asyncio.sleep(traffic.seconds)
    after = await count()
    arriving.cancel()
    await asyncio.gather(arriving, return_exceptions=True)
    return before, after


@dataclass
class Measured:
    """`urls` of the replicas; `errors` of the requests."""

    placed: Placed
    urls: list[str]
    errors: dict[str, int]


def measure(policies: tuple[str, ...], traffic: Traffic) -> dict[str, Measured]:
    """What each policy does with this traffic."""
    with ExitStack() as stack:
        each = {policy: Replicas(stack, policy, traffic) for policy in policies}
        before, after = asyncio.run(_windows(each, traffic))
    found: dict[str, Measured] = {}
    for policy, replicas in each.items():
        more = {name: after[policy][name] - before[policy][name] for name in after[policy]}
        misses = more["loads"] / max(1, more["requests"])
        placed = Placed(more["loads"] / traffic.seconds, more["evictions"] / traffic.seconds, misses)
        found[policy] = Measured(placed, [replica.url for replica in replicas.replicas], dict(replicas.errors))
    return found
