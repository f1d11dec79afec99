"""What the API has answered survives a SIGKILL of the API process at any moment: an acknowledged request ends, a
delivered result is delivered again. test_two_apis.py has commands, which run once.

The API process dies at seeded random moments, and at the worst moment, which the tests create by holding all commits
back.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from psutil import Process

from tests.servers import ready

from .mortal_server import WAIT_S, Client, MortalServer, Upstream, insist

SAMPLES = 160
CLIENTS = 4
WAITING = 40
COMMANDS = 8
STATUSES = "SELECT status, count(*) FROM futures GROUP BY status"
OTHERS = 100
"""The number of later requests that read the database. An answer that waits for no commit takes as many steps as one of
them."""


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as running:
        yield running


@pytest.fixture
def server(upstream: Upstream, tmp_path: Path) -> Iterator[MortalServer]:
    gateway = ("--backend", "none", "--base-model", "tiny", "--external-inference-url", upstream.url)
    with ready(MortalServer(tmp_path / "state", *gateway)) as running:
        yield running


@pytest.fixture
def client(server: MortalServer) -> Iterator[Client]:
    with closing(Client(server.url)) as connected:
        yield connected


def read_all(client: Client, ids: list[str]) -> dict[str, bytes]:
    with ThreadPoolExecutor(16) as pool:
        return dict(zip(ids, pool.map(lambda each: insist(lambda: client.result(each)), ids), strict=True))


def test_acknowledged_samples_end_although_the_api_is_killed_repeatedly(
    server: MortalServer, client: Client, upstream: Upstream
) -> None:
    """Four clients send samples as fast as they can. A client without an acknowledgement repeats the sample under the
    same number."""
    sampler = client.sampler()
    upstream.hold()
    promises: dict[int, dict[str, Any]] = {}
    deaths = random.Random(4).sample(range(1, SAMPLES), 3)
    lock = threading.Lock()

    def ask(number: int) -> None:
        promise = insist(lambda: client.sample(sampler, number))
        with lock:
            promises[number] = promise
            is_fatal = len(promises) in deaths
        if is_fatal:
            server.api().kill()

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, range(SAMPLES)))
    repeated = {number: insist(lambda n=number: client.sample(sampler, n)) for number in promises}
    assert repeated == promises
    assert server.ask(STATUSES) == [("pending", SAMPLES)]
    upstream.release()
    results = read_all(client, [promise["request_id"] for promise in promises.values()])
    assert len(set(results.values())) == SAMPLES
    assert server.ask(STATUSES) == [("done", SAMPLES)]


def test_delivered_results_stay_the_same_if_the_api_is_killed_during_delivery(
    server: MortalServer, client: Client, upstream: Upstream
) -> None:
    """Forty clients wait. The API dies at the first bytes of one of their results. Results delivered before the death,
    and in earlier rounds, must be the same afterwards."""
    sampler = client.sampler()
    chance = random.Random(5)
    delivered: dict[str, bytes] = {}
    for first in range(0, 3 * WAITING, WAITING):
        upstream.hold()
        ids = [client.sample(sampler, number)["request_id"] for number in range(first, first + WAITING)]
        victim, left = server.api(), itertools.count(chance.randrange(1, WAITING // 2), -1)

        def hear(request_id: str, victim: Process = victim, left: Iterator[int] = left) -> None:
            with suppress(httpx.TransportError):
                delivered[request_id] = client.result(request_id, lambda: next(left) == 0 and victim.kill())

        with ThreadPoolExecutor(WAITING) as pool:
            heard = [pool.submit(hear, request_id) for request_id in ids]
            upstream.release()
            for each in heard:
                each.result()
        victim.wait(WAIT_S)
        again = read_all(client, list(delivered))
        assert again == delivered
        read_all(client, ids)
    assert len(delivered) > 3, "the server has delivered some results before it died"


def is_early(client: Client, answers: list[Future[Any]]) -> bool:
    """Whether one of the answers came although other requests were answered in between. The check measures no time, so
    it also holds on a slow machine."""
    for _ in range(OTHERS):
        assert client.http.get("sessions").status_code == 200
    return any(answer.done() for answer in answers)


def test_no_sample_is_acknowledged_before_its_commit(server: MortalServer, client: Client) -> None:
    sampler = client.sampler()
    with ThreadPoolExecutor(CLIENTS) as pool:
        with server.commits_held():
            asking = [pool.submit(client.sample, sampler, number) for number in range(CLIENTS)]
            assert not is_early(client, asking)
            server.kill_api()
        assert all(isinstance(asked.exception(), httpx.TransportError) for asked in asking)
    assert server.ask(STATUSES) == []
    promises = [insist(lambda n=number: client.sample(sampler, n)) for number in range(CLIENTS)]
    assert [client.sample(sampler, number) for number in range(CLIENTS)] == promises
    read_all(client, [promise["request_id"] for promise in promises])
    assert server.ask(STATUSES) == [("done", CLIENTS)]


def test_no_result_is_delivered_before_its_commit(server: MortalServer, client: Client, upstream: Upstream) -> None:
    """The upstream has answered, the row is not written, and the API dies. No client may have got the answer, because a
    new sample replaces it."""
    sampler = client.sampler()
    upstream.hold()
    ids = [client.sample(sampler, number)["request_id"] for number in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        hearing = [pool.submit(client.result, request_id) for request_id in ids]
        with server.commits_held():
            upstream.release()
            upstream.await_answers(CLIENTS)
            assert not is_early(client, hearing)
            server.kill_api()
        assert all(isinstance(heard.exception(), httpx.TransportError) for heard in hearing)
    results = read_all(client, ids)
    assert upstream.answered == 2 * CLIENTS
    server.kill_api()
    assert read_all(client, ids) == results
    assert upstream.answered == 2 * CLIENTS
