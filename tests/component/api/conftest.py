"""Fixtures of the tests of an API process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_world import Server, agent_server
from api_harness import Serve
from engine_harness import NEVER_S
from fake_upstream import FakeUpstream

import skyrl.api.server
from skyrl.runtime.metrics import files
from skyrl.storage.db.database import Database


@pytest.fixture(autouse=True)
def metrics_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then by `scrape`: the process's own thread could replace what that has written by what it had read before."""
    monkeypatch.setattr(files, "PERIOD_S", 1000.0)


@pytest.fixture(autouse=True)
def only_tests_end_agent_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """And note that their turns run, and forget them. The process does so every ten seconds, so in the middle of a slow
    test."""
    monkeypatch.setattr(skyrl.api.server, "AGENT_SESSIONS_S", NEVER_S)


@pytest.fixture
async def server(serve: Serve, database: Database, upstream: FakeUpstream, tmp_path: Path) -> AsyncIterator[Server]:
    """A server with agent sessions."""
    async with agent_server(serve, database, upstream, tmp_path / "model") as server:
        yield server
