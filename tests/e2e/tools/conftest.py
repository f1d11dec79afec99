"""A server whose model's template has tools and thinking. `skyrl serve` chooses vLLM's parsers without options."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skyrl.base.tiny import tools
from skyrl.cli.demo.server import DemoServer
from tests.servers import ready

KEY = "tml-tools"
CONTEXT = 16384


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("tools")
    tools.make(directory / "model", context=2 * CONTEXT)
    server = DemoServer(
        directory / "server",
        *("--base-model", str(directory / "model"), "--served-model-name", "tools"),
        backend_config={"generator.inference_engine.max_model_len": CONTEXT},
    )
    with ready(server) as running:
        yield running.url
