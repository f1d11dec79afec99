"""An API process of a server with several base models: a student that is trained, a teacher that is only sampled from,
and a judge that somebody else runs. `conftest` has its upstreams, its database and the process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from api_harness import Api

from skyrl.api.app import create_app
from skyrl.api.server import open_services
from skyrl.base.config.server import ServerConfig
from skyrl.base.config.several import base_models_of
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db.database import Database

STUDENT, TEACHER, JUDGE = "acme/student", "acme/teacher", "acme/judge"
VOCABULARY = {STUDENT: 1000, TEACHER: 50}
ENTRIES = [
    {"base_model": STUDENT, "served_model_names": [STUDENT, "student"]},
    {"base_model": TEACHER, "uses": ["sample"]},
]


@asynccontextmanager
async def serving(database: Database, directory: Path, entries: list[dict[str, Any]]) -> AsyncIterator[Api]:
    """An API process with these entries of `base_models`."""
    config = ServerConfig(**{"base_models": entries, "state_dir": directory, "database_url": database.url})
    each = tuple(Runtime(part, directory, None, "key") for part in base_models_of(config))
    async with open_services(Runtime(config, directory, None, None, base_models=each)) as services:
        transport = httpx.ASGITransport(create_app(services), raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://api", headers={"X-API-Key": "tml-one"}
        ) as http:
            yield Api(services, http)
