"""The Tinker SDK behind a real nginx, configured as docs/operating/proxy.md says, while the API is away."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker
from api_harness import BASE, Serve
from fake_upstream import FakeUpstream, complete, never
from router_world import PromptServer, until

from skyrl.api.app import create_app
from skyrl.api.direct_http import protocol_with
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
    """At the root of a name and under a path. Without TLS, which changes nothing about polls."""
    at_root, under_path = (block.text for block in blocks_of(PROXY_PAGE) if block.language == "nginx")
    port, api = free_port(), free_port()
    servers = f"{at_root.rstrip().removesuffix('}')}\n{under_path}\n}}".replace("443 ssl", f"127.0.0.1:{port}")
    directory = tmp_path / "nginx"
    directory.mkdir()
    with running_nginx(directory, servers.replace("127.0.0.1:8000", f"127.0.0.1:{api}")):
        url = f"http://127.0.0.1:{port}"
        yield Proxied((url, f"{url}/skyrl"), api, directory / "access.log")


@asynccontextmanager
async def listening(serve: Serve, port: int) -> AsyncIterator[list[str]]:
    """The API on this port; yields the ids of the requests that were polled for."""
    async with serve() as api:
        polled: list[str] = []
        wait = api.services.futures.wait

        async def counted(request_id: str, tenant: str, timeout_s: float) -> Any:
            polled.append(request_id)
            return await wait(request_id, tenant, timeout_s)

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
        await until(lambda: len(set(polled)) == 4)
    before = proxied.polls()
    await asyncio.sleep(AWAY_S)
    while_away = proxied.polls() - before
    assert while_away.total() <= MOST_POLLS, while_away
    await until(lambda: (proxied.polls() - before).total() >= 4)  # each goes on to ask
    upstream.default = complete()
    async with listening(serve, proxied.port):
        assert [(await client.communicate())[0] for client in clients] == [b"3\n", b"3\n"]
