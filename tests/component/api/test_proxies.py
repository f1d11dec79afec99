"""Inference servers behind a load balancer: no sample fails while one server restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from adapter_hosts import HostWithAllAdapters
from fake_upstream import COMPLETIONS, FakeUpstream, closed_port, fake_upstream, hang_up, reply
from test_forwarding_failures import JOB, WHOLE, decoded

from skyrl.http.client import HttpClient
from skyrl.sampling import retries
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.servers import FixedEndpoint

BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>"
AWAY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 0.05\r\nContent-Length: 0\r\n\r\n"


class Balancer:
    """A small HTTP proxy that sends each request, /health included, to the next replica, whether or not the replica is
    running.

    If the replica cannot be reached or breaks the connection, the client gets 502; without any replica it gets 503.
    """

    def __init__(self) -> None:
        self.replicas: list[str] = []
        self.answered: dict[int, int] = {502: 0, 503: 0}
        self._changed = asyncio.Condition()
        self.url = ""
        self._turn = 0

    async def until(self, status: int, times: int) -> None:
        """Wait until the balancer has answered this status so many times."""
        async with asyncio.timeout(120), self._changed:
            await self._changed.wait_for(lambda: self.answered[status] >= times)

    async def _answer(self, status: int, answer: bytes) -> bytes:
        async with self._changed:
            self.answered[status] += 1
            self._changed.notify_all()
        return answer

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                writer.write(await self._pass_on(head + await reader.readexactly(length)))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _pass_on(self, request: bytes) -> bytes:
        if not self.replicas:
            return await self._answer(503, AWAY)
        self._turn += 1
        host, port = self.replicas[self._turn % len(self.replicas)].removeprefix("http://").split(":")
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                return head + await reader.readexactly(length)
            finally:
                writer.close()
        except (OSError, asyncio.IncompleteReadError):
            return await self._answer(502, BAD_GATEWAY)


@asynccontextmanager
async def balancing() -> AsyncIterator[Balancer]:
    balancer = Balancer()
    listening = await asyncio.start_server(balancer.serve_connection, "127.0.0.1", 0)
    balancer.url = "http://{}:{}".format(*listening.sockets[0].getsockname())
    async with listening:
        yield balancer


@pytest.fixture
async def client() -> AsyncIterator[tuple[Balancer, ForwardingClient]]:
    async with balancing() as balancer:
        client = ForwardingClient(
            HttpClient(), FixedEndpoint(balancer.url), HostWithAllAdapters(), api_key=None, deadline_s=300
        )
        yield balancer, client
        await client.close()


class Load:
    """Samples on `ways` parallel chains, one after the other on each, until `stop`."""

    def __init__(self, client: ForwardingClient, ways: int) -> None:
        self._client = client
        self._stopped = False
        self.done = 0
        self._tasks = [asyncio.create_task(self._run()) for _ in range(ways)]

    async def _run(self) -> None:
        while not self._stopped:
            assert decoded(await self._client.sample(JOB)) == WHOLE
            self.done += 1

    async def wait_for_more(self, samples: int) -> None:
        """Wait until so many more samples have ended. Raises the error of a failed sample."""
        until = self.done + samples
        async with asyncio.timeout(120):
            while self.done < until:
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)


@pytest.mark.parametrize("health", [200, 404])
async def test_no_sample_fails_during_a_rolling_restart(client: tuple[Balancer, ForwardingClient], health: int) -> None:
    """The replicas are down one after the other, and the balancer keeps sending to them. Each answers /health with 200,
    or has no such page."""
    balancer, forwarding = client
    servers = [FakeUpstream(on_get=reply(health, "")) for _ in range(2)]
    for server in servers:
        await server.start()
    balancer.replicas = [server.url for server in servers]
    load = Load(forwarding, 20)
    await load.wait_for_more(50)
    for index in range(2):
        await servers[index].stop()
        await load.wait_for_more(30)
        servers[index] = FakeUpstream(on_get=reply(health, ""))
        await servers[index].start()
        balancer.replicas[index] = servers[index].url
        await load.wait_for_more(30)
    await load.stop()
    assert balancer.answered[502] > 0
    assert forwarding.counts["upstream_away"] == balancer.answered[502], "the client has waited after each 502"
    for server in servers:
        await server.stop()


async def test_no_sample_fails_while_the_only_server_behind_a_proxy_restarts(
    client: tuple[Balancer, ForwardingClient],
) -> None:
    balancer, forwarding = client
    async with fake_upstream() as server:
        balancer.replicas = [server.url]
        load = Load(forwarding, 20)
        await load.wait_for_more(50)
        balancer.replicas = []  # the balancer answers 503 with Retry-After
        await balancer.until(503, 40)
        balancer.replicas = [closed_port()]  # the balancer answers 502
        await balancer.until(502, 40)
        balancer.replicas = [server.url]
        await load.wait_for_more(40)
        await load.stop()
    assert forwarding.counts["upstream_away"] >= 80
    assert forwarding.counts["interrupted"] == 0


async def test_a_sample_that_kills_a_server_behind_a_proxy_is_repeated_rarely(
    client: tuple[Balancer, ForwardingClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the client such a death looks like a restart, so it repeats the sample until the deadline. Its pauses become
    longer than after a 503."""
    balancer, forwarding = client
    slept: list[float] = []

    async def note(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 12:
            server.default = reply(400, "enough", "text/plain")

    async with fake_upstream(default=hang_up) as server:
        balancer.replicas = [server.url]
        monkeypatch.setattr(retries.asyncio, "sleep", note)
        with pytest.raises(Exception, match="enough"):
            await forwarding.sample(msgspec.structs.replace(JOB))
    assert max(slept) > 3
    assert max(slept) <= 1.25 * retries.MAX_GATEWAY_BACKOFF_S
    assert len([request for request in server.requests if request.path == COMPLETIONS]) == 13
