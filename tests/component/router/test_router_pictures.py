"""Requests for token ids and pictures go through the router as completions do, however long their bodies are."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from skyrl.router.proxy import COLLECTED_BYTES
from tests.component import router_world
from tests.component.router_world import FakeWorker, RunningRouter

PATH = "/inference/v1/generate"
SMALL, LONG = 100, 2 * COLLECTED_BYTES
"""Bytes of a request's pictures. The router passes a long body on as it comes."""
Start = Callable[..., AbstractAsyncContextManager[RunningRouter]]


@pytest.fixture(params=["short way", "long way"])
def running_router(request: pytest.FixtureRequest) -> Start:
    return functools.partial(router_world.running_router, short_way=request.param == "short way")


async def generate(router: RunningRouter, model: str, size: int, key: str) -> None:
    body = json.dumps({"model": model, "token_ids": [1], "content_parts": ["x" * size]}).encode()
    headers = {"X-Session-ID": key}
    async with router.session.post(f"{router.url}{PATH}", data=io.BytesIO(body), headers=headers) as answer:
        assert (answer.status, await answer.read()) == (200, body)


@pytest.mark.parametrize("size", [SMALL, LONG])
async def test_an_adapters_requests_go_to_its_home_whatever_their_keys(running_router: Start, size: int) -> None:
    workers = [FakeWorker() for _ in range(4)]
    async with running_router(*workers, policy="adapter_affinity", base_models=("base",)) as router:
        for number in range(12):
            await generate(router, 'an "odd" näme', size, f"key {number}")
        assert sorted(len(worker.received) for worker in workers) == [0, 0, 0, 12]
        for number in range(12):
            await generate(router, "base", size, f"key {number}")
    assert sum(bool(worker.received) for worker in workers) > 1


@pytest.mark.parametrize("size", [SMALL, LONG])
async def test_a_session_keeps_its_worker(running_router: Start, size: int) -> None:
    workers = [FakeWorker() for _ in range(4)]
    async with running_router(*workers) as router:
        for _ in range(8):
            await generate(router, "m", size, "one key")
    assert sorted(len(worker.received) for worker in workers) == [0, 0, 0, 8]


@pytest.mark.parametrize("size", [SMALL, LONG])
async def test_the_second_address_of_a_worker_takes_them(running_router: Start, size: int) -> None:
    sidecar, vllm = FakeWorker(), FakeWorker()
    await vllm.start()
    try:
        async with running_router(sidecar) as router:
            fields = {"url": sidecar.url, "completions_url": vllm.url}
            async with router.session.post(f"{router.url}/workers", json=fields) as answer:
                assert answer.status in (200, 202)
            await generate(router, "m", size, "key")
        assert (len(sidecar.received), len(vllm.received)) == (0, 1)
    finally:
        await vllm.stop()
