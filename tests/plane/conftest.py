"""One `skyrl rollout` with two real vLLMs for all tests of this folder. They run in the order of their files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio

from skyrl.base.tiny import model_path
from tests.plane.running import RunningPlane
from tests.plane.trainer import Reference, save_variant
from tests.plane.workers import Worker


@pytest.fixture(scope="package")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlane]:
    running = RunningPlane(tmp_path_factory.mktemp("plane"), "--num-engines", "2", "--middleware", "radix")
    running.start()
    try:
        running.wait_routable(2)
        yield running
        processes = psutil.Process(running.pid).children(recursive=True)
    finally:
        code = running.stop()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert (code, alive) == (0, []), "SIGTERM leaves no process"
    assert len(processes) >= 5


@pytest.fixture(scope="session")
def variants(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints with other weights than the plane's model."""
    directory = tmp_path_factory.mktemp("variants")
    for seed in (1, 2):
        save_variant(model_path(), directory / str(seed), seed)
    return [directory / "1", directory / "2"]


@pytest.fixture(scope="session")
def references(variants: list[Path]) -> list[Reference]:
    """Of the plane's model, and of each variant."""
    return [Reference(path) for path in (model_path(), *variants)]


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as opened:
        yield opened


@pytest_asyncio.fixture
async def workers(plane: RunningPlane, session: aiohttp.ClientSession) -> AsyncIterator[list[Worker]]:
    """Both sidecars. Afterwards they have their memory and the plane's own weights, whole and not paused."""
    found = [Worker(url, session) for url in plane.sidecars()]
    yield found
    for worker in found:
        assert await worker.post("/resume_memory_occupation") == (200, None)
        await worker.load_from(model_path(), "default", abort_all_requests=True)
        await worker.done("/continue_generation")
