"""An inference server that dies repeatedly: the only sample that fails is the one that kills the server."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import pytest
from adapter_hosts import HostWithAllAdapters
from fake_upstream import FakeUpstream, Received, complete, fake_upstream, hang_up, never, reply
from loop_clock import LoopClock
from test_forwarding_failures import JOB, WHOLE, decoded

from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.http.client import HttpClient
from skyrl.sampling import retries
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.completion import SampleAnswer
from skyrl.sampling.servers import FixedEndpoint

POISON = 499
"""The first token of the prompt that kills the server."""
DEADLINE_S = 300.0
OVERLAP = 20
"""Rounds of the event loop that a sample takes, so that others arrive meanwhile."""


class MortalUpstream:
    """An upstream that dies with all its requests in flight, fails some health probes, and is healthy again.

    Each arrival calls `fatal()`, which decides whether the upstream dies now. If `hold` is set, nothing is answered
    before the second death.
    """

    def __init__(self, upstream: FakeUpstream) -> None:
        self.deaths: list[set[int]] = []
        """For each death, the samples in flight, by the first tokens of their prompts."""
        self.in_flight: set[int] = set()
        self.hold = False
        self.fatal: Callable[[], bool] = lambda: False
        self._changed = asyncio.Condition()
        self._probes_left = 0
        upstream.default, upstream.on_get = self.complete, self.health

    async def health(self, request: Received, writer: asyncio.StreamWriter) -> None:
        self._probes_left = max(0, self._probes_left - 1)
        await reply(503 if self._probes_left else 200, "")(request, writer)

    async def complete(self, request: Received, writer: asyncio.StreamWriter) -> None:
        sample, deaths_before = request.json["prompt"][0], len(self.deaths)
        self.in_flight.add(sample)
        for _ in range(OVERLAP):
            await asyncio.sleep(0)
        async with self._changed:
            if len(self.deaths) == deaths_before and (self._probes_left or self.fatal()):
                self._probes_left = 3
                self.deaths.append(self.in_flight)
                self.in_flight = set()
                self._changed.notify_all()
            await self._changed.wait_for(
                lambda: len(self.deaths) > deaths_before or (sample != POISON and not (self.hold and deaths_before < 2))
            )
            self.in_flight.discard(sample)
        await (complete() if len(self.deaths) == deaths_before else hang_up)(request, writer)


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with fake_upstream() as server:
        yield server


@pytest.fixture
async def mortal(upstream: FakeUpstream) -> MortalUpstream:
    return MortalUpstream(upstream)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "MAX_BACKOFF_S", retries.FIRST_BACKOFF_S)


@pytest.fixture
async def client(upstream: FakeUpstream) -> AsyncIterator[ForwardingClient]:
    client = ForwardingClient(
        HttpClient(), FixedEndpoint(upstream.url), HostWithAllAdapters(), api_key=None, deadline_s=DEADLINE_S
    )
    yield client
    await client.close()


async def sample_all(client: ForwardingClient, samples: Sequence[int]) -> dict[int, FailedRequest]:
    """Send all samples at once, each with a prompt that begins with its number. Returns the failed samples; all other
    results must be right."""
    jobs = [msgspec.structs.replace(JOB, request_id=f"r{sample}", prompt=[sample, 6, 7]) for sample in samples]
    answers = await asyncio.gather(*(client.sample(job) for job in jobs), return_exceptions=True)
    failed: dict[int, FailedRequest] = {}
    for sample, answer in zip(samples, answers, strict=True):
        if isinstance(answer, FailedRequest):
            failed[sample] = answer
        else:
            assert isinstance(answer, SampleAnswer), answer
            assert decoded(answer) == WHOLE
    return failed


@pytest.mark.parametrize(
    ("innocents", "groups"),
    [(0, [1, 1, 1, 1]), (5, [6, 6, 1, 1]), (20, [21, 21, 8, 1]), (100, [101, 101, 64, 8, 1])],
)
async def test_only_the_sample_that_kills_the_server_fails(
    client: ForwardingClient, mortal: MortalUpstream, innocents: int, groups: list[int]
) -> None:
    """The sample first kills the server together with all others, then with the few that the client sends beside it, at
    last alone."""
    mortal.hold = True
    mortal.fatal = lambda: (
        POISON in mortal.in_flight and (len(mortal.deaths) >= 2 or len(mortal.in_flight) == innocents + 1)
    )
    failed = await sample_all(client, [*range(innocents), POISON])
    assert list(failed) == [POISON]
    assert failed[POISON].category is ErrorCategory.SERVER
    deaths_with_poison = [died for died in mortal.deaths if POISON in died]
    assert f"broke {len(deaths_with_poison)} times during this sample" in failed[POISON].message
    assert 4 <= len(deaths_with_poison) <= len(groups)
    assert all(len(died) <= group for died, group in zip(deaths_with_poison, groups, strict=False))
    assert deaths_with_poison[-1] == {POISON}
    assert client.counts["interrupted"] == sum(len(died) for died in mortal.deaths)


@pytest.mark.parametrize("seed", range(5))
async def test_no_sample_fails_if_the_server_dies_at_random(
    client: ForwardingClient, mortal: MortalUpstream, seed: int
) -> None:
    chance, arrivals = random.Random(seed), itertools.count()
    fatal = set(chance.sample(range(60), 3))
    mortal.fatal = lambda: next(arrivals) in fatal
    assert not await sample_all(client, range(60))
    assert len(mortal.deaths) >= len(fatal)


async def test_a_suspect_sample_without_a_turn_fails_at_its_deadline(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    clock = LoopClock()
    upstream.script += [hang_up] * 4
    upstream.default = never
    failing = asyncio.create_task(sample_all(client, [1, 2]))
    await upstream.until(lambda server: len(server.completions) == 5)
    clock.advance(DEADLINE_S)
    failed = await failing
    assert all(error.message.startswith(f"gave up after {DEADLINE_S:g} s: no answer") for error in failed.values())
    assert len(failed) == 2
    assert len(upstream.completions) == 5


async def test_a_cancelled_suspect_sample_delays_no_other_sample(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    upstream.script += [hang_up] * 6
    upstream.default = never
    samples = {sample: asyncio.create_task(sample_all(client, [sample])) for sample in (1, 2, 3)}
    await upstream.until(lambda server: len(server.completions) == 7)
    upstream.default = complete()
    sent = upstream.completions[-1].json["prompt"][0]
    waiting, last = sorted(samples.keys() - {sent})
    samples[waiting].cancel()
    samples[sent].cancel()
    assert await samples[last] == {}
    assert len(upstream.completions) == 8


DEAD_ENGINE = reply(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")


async def test_a_request_beside_others_is_not_blamed_for_two_deaths_of_the_engine(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    """A dying vLLM answers 500 to all requests in flight, and 503 when it is asked for its health."""
    both, probes = asyncio.Barrier(2), itertools.count()

    async def health(request: Received, writer: asyncio.StreamWriter) -> None:
        await reply(503 if next(probes) % 4 < 2 else 200, "")(request, writer)

    async def die(request: Received, writer: asyncio.StreamWriter) -> None:
        await both.wait()
        await DEAD_ENGINE(request, writer)

    upstream.on_get = health
    upstream.script += [die] * 4
    upstream.default = complete()
    assert await sample_all(client, [1, 2]) == {}
    assert len(upstream.completions) == 6
    assert client.counts["interrupted"] == 4
