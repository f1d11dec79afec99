"""The real engine and the real API on one state directory, with clients, for tests of checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from engine_harness import WAIT_S, Harness, Trainer, harness_in
from sqlalchemy import select

from skyrl.api.access import tenant_of_key
from skyrl.api.app import create_app
from skyrl.api.server import open_services
from skyrl.api.services import Services
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db.audit import audit_events
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.usage import usage

KEY, OTHER = "tml-one", "tml-two"
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}


@dataclass
class World:
    """An engine and an API on one state directory, and clients with two keys."""

    harness: Harness
    services: Services
    http: httpx.AsyncClient

    async def trainer(self, key: str = KEY, **options: Any) -> Trainer:
        return await Trainer.create(self.harness, tenant=tenant_of_key(key), **options)

    async def ask(self, method: str, path: str, body: Any = None, key: str = KEY, **headers: str) -> httpx.Response:
        answer = await self.http.request(
            method, f"/api/v1/{path}", json=body, headers={"X-API-Key": key} | headers, follow_redirects=False
        )
        self.harness.engine.ring()
        return answer

    async def get(self, path: str, key: str = KEY, **headers: str) -> Any:
        answer = await self.ask("GET", path, None, key, **headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, body: Any, key: str = KEY, **headers: str) -> Any:
        answer = await self.ask("POST", path, body, key, **headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def outcome(self, request_id: str, key: str = KEY) -> Outcome:
        """The outcome of a command that the API recorded. The engine may have settled the command and rung before this
        wait began, so each round reads the database."""
        deadline = time.monotonic() + WAIT_S
        while (outcome := await self.harness.store.wait(request_id, tenant_of_key(key), 0.1)) is None:
            assert time.monotonic() < deadline, "the command has not ended"
            await self.harness.store.read_outcomes([request_id])
        return outcome

    async def session(self, key: str = KEY) -> str:
        return (await self.post("create_session", {}, key))["session_id"]

    async def follow_link(self, url: str) -> httpx.Response:
        """Follow a link without an API key."""
        if url.startswith("http://api/"):
            return await self.http.get(url)
        with await asyncio.to_thread(urllib.request.urlopen, url) as answer:
            return httpx.Response(answer.status, headers=dict(answer.headers), content=answer.read())

    def events(self, key: str = KEY) -> list[str]:
        query = select(audit_events.c.event).where(audit_events.c.tenant == tenant_of_key(key))
        return self.harness.database.read(lambda c: list(c.execute(query.order_by(audit_events.c.id)).scalars()))

    def checkpoints_counted(self, key: str = KEY) -> float:
        query = select(usage.c.amount).where(usage.c.tenant == tenant_of_key(key), usage.c.kind == "checkpoint")
        return self.harness.database.read(lambda c: sum(c.execute(query).scalars()))


def rest_path(path: str) -> str:
    """The REST path of a checkpoint."""
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{model_id}/checkpoints/{kind}/{name}"


@contextlib.asynccontextmanager
async def world_in(state_dir: Path, **flags: Any) -> AsyncIterator[World]:
    async with harness_in(state_dir, served_model_names=("tiny",), **flags) as harness:
        await harness.start()
        with tempfile.TemporaryDirectory(prefix="skyrl-test-") as sockets:
            async with open_services(Runtime(harness.config, Path(sockets), None, None)) as services:
                transport = httpx.ASGITransport(create_app(services), raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
                    yield World(harness, services, http)
