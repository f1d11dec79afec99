"""A server whose model's template has tools and thinking. `skyrl serve` chooses vLLM's parsers without options. Silent
sessions expire soon, and few samples fill the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skyrl.base.tiny import tools
from skyrl.cli.demo.server import DemoServer
from tests.servers import ready

KEY = "tml-tools"
CONTEXT = 16384
SESSION_TIMEOUT_S = 20


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    directory = tmp_path_factory.mktemp("tools")
    tools.make(directory / "model", context=2 * CONTEXT)
    config = directory / "skyrl.toml"
    config.write_text(f"max_pending_samples = 24\nsession_timeout_s = {SESSION_TIMEOUT_S}\n")
    names = ("--served-model-name", "tools", "--served-model-name", "tiny")
    flags = ("--base-model", str(directory / "model"), *names, "--config", str(config))
    with ready(
        DemoServer(directory / "server", *flags, backend_config={"generator.inference_engine.max_model_len": CONTEXT})
    ) as running:
        yield running


@pytest.fixture(scope="package")
def url(server: DemoServer) -> str:
    return server.url
