"""The Tinker SDK behind a real nginx, configured as docs/operating/proxy.md says, while the API is away."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tinker
from api_harness import BASE, Serve
from fake_upstream import FakeUpstream, after, complete, never
from router_world import PromptServer, until

from skyrl.api.app import create_app
from skyrl.api.direct_http import protocol_with
from skyrl.api.routes import futures
from skyrl.runtime.processes.ports import free_port
from tests.environments import ROOT, environment
from tests.nginx import NEEDS_NGINX, PROXY_PAGE, running_nginx
from tests.pages import blocks_of

pytestmark = [NEEDS_NGINX, pytest.mark.usefixtures("drain_at_once")]

REQUIREMENTS = ROOT / "requirements" / "sdk"
POLL = "/api/v1/retrieve_future"
AWAY_S = 2.5
MOST_POLLS = 16
"""Of four requests while the API is away. The SDK waits 1 s, then 2 s; without a wait it polls 150 times a second."""


@dataclass
class Proxied:
    """The addresses of the API behind nginx, and the port where the API must listen."""

    urls: tuple[str, ...]
    port: int
    log: Path

    def polls(self) -> Counter[int]:
        """How many polls nginx has answered, by their status."""
        answers = (line.split() for line in self.log.read_text().splitlines())
        return Counter(int(status) for status, path in answers if path.endswith(POLL))


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Proxied]:
    with proxy(tmp_path, free_port(), free_port()) as running:
        yield running


@contextmanager
def proxy(tmp_path: Path, port: int, api: int) -> Iterator[Proxied]:
    """nginx at `port`, at the root of a name and under a path. Without TLS, which changes nothing about polls."""
    at_root, under_path = (block.text for block in blocks_of(PROXY_PAGE) if block.language == "nginx")
    servers = f"{at_root.rstrip().removesuffix('}')}\n{under_path}\n}}".replace("443 ssl", f"127.0.0.1:{port}")
    directory = tmp_path / "nginx"
    directory.mkdir(exist_ok=True)
    with running_nginx(directory, servers.replace("127.0.0.1:8000", f"127.0.0.1:{api}")):
        url = f"http://127.0.0.1:{port}"
        yield Proxied((url, f"{url}/skyrl"), api, directory / "access.log")


@dataclass
class Polled:
    """The ids of the requests that were polled for, in order, and how many of the polls wait."""

    ids: list[str] = field(default_factory=list)
    waiting: int = 0


@asynccontextmanager
async def listening(serve: Serve, port: int) -> AsyncIterator[Polled]:
    """The API on this port."""
    async with serve() as api:
        polled = Polled()
        wait = api.services.futures.wait

        async def counted(request_id: str, tenant: str, timeout_s: float) -> Any:
            polled.ids.append(request_id)
            polled.waiting += 1
            try:
                return await wait(request_id, tenant, timeout_s)
            finally:
                polled.waiting -= 1

        api.services.futures.wait = counted
        app = create_app(api.services)
        app.prepare()
        server = PromptServer(app, drain_s=1, http=protocol_with(app))
        with socket.create_server(("127.0.0.1", port)) as listener:
            serving = asyncio.create_task(server.serve([listener]))
            try:
                yield polled
            finally:
                api.services.futures.release_waiters()
                server.should_exit = True
                await serving


PROGRAM = """
import sys, threading, tinker

service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-one")
threading.Thread(target=service.create_lora_training_client, args=(sys.argv[2], 8), daemon=True).start()
sampler = service.create_sampling_client(base_model=sys.argv[2])
sampler = sampler.result() if isinstance(sampler, tinker.APIFuture) else sampler
sample = sampler.sample(tinker.ModelInput.from_ints([5, 6]), 1, tinker.SamplingParams(max_tokens=3))
print(len(sample.result().sequences[0].tokens))
"""
"""Asks for a model, which is never made here, and for a sample, whose length it prints."""


@pytest.mark.parametrize("version", ["0.38.0", pytest.param("0.16.1", marks=pytest.mark.slow)])
async def test_polls_do_not_storm_while_the_api_restarts(
    serve: Serve, upstream: FakeUpstream, proxied: Proxied, version: str
) -> None:
    """Nothing is lost: the samples have their results afterwards. SDK 0.16 would give up at 429."""
    own = version == tinker.__version__
    python = sys.executable if own else await asyncio.to_thread(environment, REQUIREMENTS / f"tinker-{version}.txt")
    upstream.default = never
    async with listening(serve, proxied.port) as polled:
        clients = [
            await asyncio.create_subprocess_exec(python, "-c", PROGRAM, url, BASE, stdout=asyncio.subprocess.PIPE)
            for url in proxied.urls
        ]
        await until(lambda: len(set(polled.ids)) == 4)
    before = proxied.polls()
    await asyncio.sleep(AWAY_S)
    while_away = proxied.polls() - before
    assert while_away.total() <= MOST_POLLS, while_away
    await until(lambda: (proxied.polls() - before).total() >= 4)  # each goes on to ask
    upstream.default = complete()
    async with listening(serve, proxied.port):
        assert [(await client.communicate())[0] for client in clients] == [b"3\n", b"3\n"]


MANY = 200
MANY_SAMPLES = """
import sys, tinker

service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-one")
sampler = service.create_sampling_client(base_model=sys.argv[2])
params = tinker.SamplingParams(max_tokens=3)
samples = [sampler.sample(tinker.ModelInput.from_ints([5, 6]), 1, params) for _ in range(int(sys.argv[3]))]
print(sum(len(sample.result().sequences[0].tokens) for sample in samples))
"""


async def test_hundreds_of_polls_outlive_a_proxy_that_restarts(
    serve: Serve, upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API forgets the polls whose connections broke. Each request is then polled for once more: the SDK waits for
    the proxy, and no poll is answered in between. Nothing is lost."""
    monkeypatch.setattr(futures, "HOLD_S", 100.0)  # so that none is renewed on a slow machine
    go, port, api = asyncio.Event(), free_port(), free_port()
    upstream.default = after(go, complete())
    async with listening(serve, api) as polled:
        with proxy(tmp_path, port, api) as proxied:
            command = (sys.executable, "-c", MANY_SAMPLES, proxied.urls[0], BASE, str(MANY))
            client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            await until(lambda: polled.waiting == MANY)
        await until(lambda: polled.waiting == 0)
        with proxy(tmp_path, port, api):
            await until(lambda: polled.waiting == MANY)
            go.set()
            assert (await client.communicate())[0] == b"%d\n" % (3 * MANY)
    assert Counter(polled.ids) == dict.fromkeys(polled.ids, 2)
    assert set(proxied.polls()) <= {200, 499}  # 499: nginx ended before its answer
