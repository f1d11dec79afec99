"""The server whose API process and vLLM are killed by the tests of agents and of two tenants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.mortal_server import MortalServer
from tests.servers import ready

HANG_S = 20.0
"""Longer than the slowest step of the tiny model (one of the first) on a slow machine."""


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalServer]:
    """With short bounds for hangs. The last test of test_vllm_replaced.py stops it."""
    bounds = {"probe_interval_s": 0.5, "health_timeout_s": HANG_S, "step_timeout_s": HANG_S}
    with ready(
        MortalServer(tmp_path_factory.mktemp("mortal"), backend_config={"generator": {"inference_engine": bounds}})
    ) as running:
        yield running
