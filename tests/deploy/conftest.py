"""Fixtures of the tests of deploy/."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from skyrl.api.app import create_app
from skyrl.api.server import open_services
from skyrl.base.config.server import ServerConfig
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db.database import Database
from tests.databases import make_tables, url_of
from tests.deploy.files import read_serve as read_serve

GetStatus = Callable[[str], Awaitable[int]]


@pytest_asyncio.fixture
async def status_of(tmp_path: Path) -> AsyncIterator[GetStatus]:
    """A function: the status with which the server's own routes answer a GET of a path."""
    database = Database(url_of(tmp_path))
    make_tables(database)
    options: dict[str, Any] = {"base_model": "acme/base", "state_dir": tmp_path}
    async with open_services(Runtime(ServerConfig(**options), tmp_path, None, None)) as services:
        transport = httpx.ASGITransport(create_app(services))
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:

            async def get(path: str) -> int:
                return (await http.get(path)).status_code

            yield get
    database.close()
