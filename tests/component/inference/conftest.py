"""The real vLLM that two modules share. tests/grouping.py runs both in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from vllm_world import RunningServer, running_vllm


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    async with running_vllm(tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("state")) as running:
        yield running
