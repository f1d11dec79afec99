"""Samples that keep all replicas of a server at work while a test disturbs one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tinker
from tinker import types

PROMPT = [5, 6, 7, 8]


@contextmanager
def client_that_outlives(url: str, api_key: str) -> Iterator[tinker.ServiceClient]:
    """A client whose server ends first. It does not finish its session: it would try that for minutes."""
    client = tinker.ServiceClient(base_url=url, api_key=api_key)
    try:
        yield client
    finally:
        client.holder.close()


def sample(sampler: tinker.SamplingClient, length: int) -> tuple[int, ...]:
    """The tokens of a greedy sample."""
    params = types.SamplingParams(max_tokens=length, temperature=0.0, stop=[])
    return tuple(sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences[0].tokens)


@dataclass
class Load:
    """Samples of `length` tokens, which end well whatever happens meanwhile."""

    length: int
    running: list[Future[tuple[int, ...]]] = field(default_factory=list)

    def assert_well(self) -> None:
        assert {len(each.result()) for each in self.running} == {self.length}
        assert len({each.result() for each in self.running}) == 1


def start_load(
    pool: ThreadPoolExecutor,
    samplers: Sequence[tinker.SamplingClient],
    workers: Callable[[], Sequence[dict[str, Any]]],
    length: int,
) -> Load:
    """Return when at least two of the router's workers, and all of them, have samples in flight.

    The first samples may have ended before the last ones begin. So each sampler whose sample has ended sends another.
    """
    load, latest = Load(length), dict[int, Future[tuple[int, ...]]]()
    while True:
        for number, sampler in enumerate(samplers):
            if number not in latest or latest[number].done():
                latest[number] = pool.submit(sample, sampler, length)
                load.running.append(latest[number])
        found = workers()
        if len(found) >= 2 and all(worker["in_flight"] for worker in found):
            return load
        time.sleep(0.01)
