"""Servers that share a PostgreSQL database: three gateways, and clients that may use any of them. While samples run,
one gateway is stopped and one is killed; the third one ends their samples."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy import text

from skyrl.cli.demo.server import ServerFailed
from skyrl.storage.db.database import Database
from tests.postgres_server import PostgresServer
from tests.servers import SLOW_START_S

from .mortal_server import STEP, WAIT_S, Client, MortalServer, Upstream, insist, running, training_pass

SAMPLES = 8
COMMANDS = 8


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def servers(
    upstream: Upstream, database: Database, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[MortalServer]]:
    gateway = ("--backend", "none", "--base-model", "tiny", "--external-inference-url", upstream.url)
    made = [
        MortalServer(tmp_path_factory.mktemp(name), *gateway, "--database-url", database.url)
        for name in ("first", "second", "third")
    ]
    with running(*made):
        yield made


@pytest.fixture
def clients(servers: list[MortalServer]) -> Iterator[list[Client]]:
    """One client per server, all in the session that the first client created."""
    first = Client(servers[0].url)
    session: list[Client] = [first, *(Client(server.url, session=first.session) for server in servers[1:])]
    yield session
    for client in session:
        client.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def in_flight(server: MortalServer) -> int:
    return server.status()["samples"]["in_flight"]


def settled(database: Database, sampler: str) -> dict[str, tuple[str, Any]]:
    """Status and owner of a sampling session's samples, by id."""
    query = text("SELECT id, status, owner FROM futures WHERE sampling_session_id = :sampler")
    rows = database.read(lambda c: c.execute(query, {"sampler": sampler}).all())
    return {row.id: (row.status, row.owner) for row in rows}


def test_long_polls_to_any_server_report_each_end_once(clients: list[Client], upstream: Upstream) -> None:
    sampler = clients[0].sampler()
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    upstream.hold()
    wanted = [clients[number % 3].sample(sampler, number)["request_id"] for number in range(SAMPLES)]
    with ThreadPoolExecutor(1) as pool:
        body = {"target": target, "prev_cursor": 0, "retrieved_request_ids": []}
        held = pool.submit(clients[1].ok, "retrieve_futures", body)
        upstream.release()
        answer = held.result(WAIT_S)
    reported, turn = [], 0
    while answer["completions"] or len(reported) < SAMPLES:
        reported += [end["request_id"] for end in answer["completions"]]
        turn += 1
        body = {"target": target, "prev_cursor": answer["cursor"], "retrieved_request_ids": []}
        answer = clients[turn % 3].ok("retrieve_futures", body | ({"timeout": 0} if len(reported) == SAMPLES else {}))
    assert sorted(reported) == sorted(wanted)


def test_the_remaining_server_ends_the_samples_of_a_hanging_and_of_a_dead_one(
    servers: list[MortalServer], clients: list[Client], upstream: Upstream, database: Database
) -> None:
    hanging, dead, survivor = servers
    sampler = clients[0].sampler()
    upstream.hold()
    ids = [clients[number % 3].sample(sampler, number)["request_id"] for number in range(3 * SAMPLES)]
    until(lambda: all(in_flight(each) == SAMPLES for each in servers), "some samples are not forwarded")
    stopped = hanging.api()
    stopped.suspend()
    os.kill(dead.pid, signal.SIGKILL)
    until(lambda: in_flight(survivor) == 3 * SAMPLES, "the others' samples are not taken over")
    assert len({owner for _, owner in settled(database, sampler).values()}) == 1
    assert clients[2].sample(sampler, 0)["request_id"] == ids[0]

    upstream.release()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(clients[2].result, ids))
    assert len(set(results)) == len(ids)
    stopped.resume()
    until(lambda: in_flight(hanging) == 0, "it still forwards what others have ended")
    assert [clients[0].result(each) for each in ids] == results
    assert [clients[2].result(each) for each in ids] == results
    assert {status for status, _ in settled(database, sampler).values()} == {"done"}
    assert clients[0].sample(sampler, 1)["request_id"] == ids[1]
    again = clients[0].sample(sampler, 1000)["request_id"]
    assert clients[2].result(again) == clients[0].result(again)


class AlternatingClient(Client):
    """A client that sends its requests to its connections in turn."""

    def __init__(self, connections: list[httpx.Client], session: str) -> None:
        self.session = session
        self._turns = itertools.cycle(connections)

    @property
    def http(self) -> httpx.Client:
        return next(self._turns)


def connected_beside(other: psutil.Process, server: MortalServer, session: str | None) -> Client:
    """A client of the process that is not `other`. If `other` was stopped amid a write, it goes on first."""
    deadline = time.monotonic() + WAIT_S
    while True:
        other.suspend()
        try:
            client = Client(server.url, session=session)
            client.ok("session_heartbeat", {"session_id": client.session})
        except AssertionError:
            assert time.monotonic() < deadline
        else:
            return client
        finally:
            other.resume()
        time.sleep(0.5)


@contextmanager
def connected_to_each(server: MortalServer) -> Iterator[list[Client]]:
    """A client for each of the server's two API processes. While one client connects, the other process accepts no
    connections."""
    first, second = server.apis(2)
    with ExitStack() as held:
        clients: list[Client] = []
        for other in (first, second):
            session = clients[0].session if clients else None
            clients.append(held.enter_context(closing(connected_beside(other, server, session))))
        answered = {client.http.get(f"{server.url}/statusz").json()["api_process"] for client in clients}
        assert len(answered) == 2
        yield clients


def learn(client: Client, number: int, *, between: Callable[[int], object] = lambda _: None) -> list[dict[str, Any]]:
    """Run passes and steps of a new model, sent as a stream; returns their metrics. `between(n)` is called after the
    n-th acknowledgement."""
    model = client.model(number)
    promised = []
    for seq_id in range(1, COMMANDS + 1):
        path, body = ("optim_step", STEP) if seq_id % 2 == 0 else ("forward_backward", training_pass(seq_id))
        command = {"model_id": model, "seq_id": seq_id} | body
        promised.append(insist(lambda p=path, c=command: client.ok(p, c))["request_id"])
        between(seq_id)
    return [insist(lambda r=request_id: client.outcome(r))["metrics"] for request_id in promised]


def test_one_server_trains_with_two_api_processes_and_a_second_server_may_not_train(
    upstream: Upstream, postgres: PostgresServer, tmp_path: Path
) -> None:
    name = postgres.new_database()
    shared = ("--database-url", postgres.url(name), "--external-inference-url", upstream.url)
    server = MortalServer(tmp_path / "state", "--served-model-name", "tiny", *shared, "--api-processes", "2")
    with running(server):
        with connected_to_each(server) as clients:
            sampler = clients[0].sampler()
            upstream.hold()
            ids = [clients[number % 2].sample(sampler, number)["request_id"] for number in range(SAMPLES)]
            for api in server.apis(2):
                api.kill()
            upstream.release()
            assert len({insist(lambda each=each: clients[0].result(each)) for each in ids}) == SAMPLES
        with connected_to_each(server) as clients:
            undisturbed = learn(clients[0], 0)
            both = AlternatingClient([client.http for client in clients], clients[0].session)
            assert learn(both, 1) == undisturbed
            victim = server.apis(2)[0]
            assert learn(both, 2, between=lambda count: count == 3 and victim.kill()) == undisturbed
        assert [step["optimizer_step"] for step in undisturbed[1::2]] == list(range(1, len(undisturbed) // 2 + 1))

        second = MortalServer(tmp_path / "second", "--served-model-name", "tiny", *shared)
        second.start()
        with pytest.raises(ServerFailed, match=r"(?s)ended with 2: .*database-url: server .* trains on this database"):
            second.wait_api(SLOW_START_S)
        server.wait_ready(SLOW_START_S)
    postgres.drop_database(name)
