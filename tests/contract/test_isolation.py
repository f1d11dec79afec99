"""A stranger sends another tenant's ids to every route of the OpenAPI document. Each route answers 404, or it shows and
changes nothing of the owner.

A route that is in none of the lists of `strangers.py` fails the test: add there what a stranger gets.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from one_turn import turn
from sqlalchemy import insert, select

from skyrl.api.app import create_app
from skyrl.api.routes import futures as polls
from skyrl.api.routes.agent_sessions import ROUTE as AGENT_SESSIONS
from skyrl.api.server import open_services
from skyrl.api.services import Services
from skyrl.api.table import HttpTable
from skyrl.base.adapter_files import TRAIN_FLAGS, Target, encode_targets
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import AdapterVersion
from skyrl.chat.openai.service import Asked, OpenAIService
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db.agents import sessions as agent_sessions
from skyrl.storage.db.audit import audit_events
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import publish_training
from skyrl.storage.db.futures import futures
from skyrl.storage.db.models import models
from skyrl.storage.db.samplers import samplers
from skyrl.storage.db.sessions import sessions
from skyrl.storage.db.uploads import uploads
from tests.contract.strangers import (
    BASE,
    CHECKPOINT,
    HARMLESS,
    KINDS,
    LISTS,
    MESSAGE,
    OWNER,
    SIGNED,
    STRANGER,
    TENANT,
    TRIED,
    Try,
)
from tests.databases import make_tables, url_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

TABLES = (sessions, models, samplers, futures, checkpoints, audit_events, agent_sessions, uploads)


@dataclass
class World:
    """An API without an engine, the ids of an owner's objects, and a stranger."""

    app: HttpTable
    services: Services
    http: httpx.AsyncClient
    database: Database
    ids: dict[str, str] = field(default_factory=dict)
    rounds: int = 0

    async def ask(self, key: str, method: str, path: str, request: Try) -> httpx.Response:
        names = self.ids | {"kind": request.kind, "name": "n", "save": "5a7e", "file": "adapter_config.json"}
        names["path"] = names["model"] = f"tinker://{self.ids['model_id']}/{request.kind}/n"
        names["upload_id"] = self.ids["upload"]
        if path.startswith(AGENT_SESSIONS):
            names["session_id"] = self.ids["agent_session"]
        body = json.dumps(request.body)
        for name, value in names.items():
            body = body.replace("{" + name + "}", value)
        url = path.format(**names) + (f"?{request.query.format(**names)}" if request.query else "")
        headers = {"X-API-Key": key, "Content-Type": "application/json"} | request.headers
        content = None if method == "GET" else body
        return await self.http.request(method, url, content=content, headers=headers, follow_redirects=False)

    async def create(self, key: str, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.http.post(f"/api/v1/{path}", json=body, headers={"X-API-Key": key})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def populate(self) -> None:
        """Create new objects of the owner, and a new session of the stranger."""
        self.rounds += 1
        project = f"secret-project-{self.rounds}"
        session = (await self.create(OWNER, "create_session", project_id=project))["session_id"]
        own = {"session_id": session, "base_model": BASE}
        sampler = await self.create(OWNER, "create_sampling_session", sampling_session_seq_id=0, **own)
        model = await self.create(OWNER, "create_model", model_seq_id=0, **own)
        agent_session = (await self.create(OWNER, "agent_sessions", model=BASE, name=project))["session_id"]
        turn_of_agent = turn(3, id=f"turn-{agent_session}", session_id=agent_session)
        await self.services.agent_turns.add(turn_of_agent)
        sampler_id = sampler["sampling_session_id"]
        sample = await self.create(OWNER, "asample", sampling_session_id=sampler_id, seq_id=1, **MESSAGE)
        upload = self.ids.get("upload") or await self._upload()  # the owner may have a few unfinished ones
        self.ids = {
            "session_id": session,
            "sampler_id": sampler_id,
            "model_id": model["model_id"],
            "run_id": model["model_id"],
            "agent_session": agent_session,
            "agent_turn": turn_of_agent.id,
            "future": model["request_id"],
            "sample": sample["request_id"],
            "project": project,
            "upload": upload,
            "my_session": (await self.create(STRANGER, "create_session"))["session_id"],
        }
        for kind in KINDS:
            self._save(model["model_id"], kind)

    async def _upload(self) -> str:
        started = await self.create(OWNER, "external_weights_upload_start", base_model=BASE, lora_config={})
        return started["upload_id"]

    def _save(self, model_id: str, kind: str) -> None:
        key = f"r{self.rounds}/{kind}-5a7e"
        with self.services.checkpoint_store.writing(key) as directory:
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                (directory / file).write_text("the owner's weights")
        weights = AdapterVersion.of(model_id, self.rounds) if kind == KINDS[1] else None
        row = {
            "tenant": TENANT,
            "model_id": model_id,
            "kind": kind,
            "name": "n",
            "store_key": key,
            "weights": weights,
            "base_model": BASE,
            "lora_rank": 8,
            "lora_alpha": 32.0,
            "seed": 1,
            "train_attn": True,
            "train_mlp": True,
            "train_unembed": True,
            "size_bytes": 1,
            "public": False,
            "created_at": 1.0,
        }
        self.database.write(lambda c: c.execute(insert(checkpoints), row))

    async def owned(self) -> dict[str, list[Any]]:
        """All rows of the owner, with the uses that a process otherwise writes once a minute: those of an earlier test
        are there before a request, and those of a request after it."""
        await self.services.samplers.write_uses()
        await self.services.agent_sessions.write_uses()
        return await self.database.read_async(
            lambda c: {t.name: [tuple(row) for row in c.execute(select(t).where(t.c.tenant == TENANT))] for t in TABLES}
        )

    def check_shows_nothing(self, answer: httpx.Response) -> None:
        """Fail if the answer holds an id or the weights of the owner."""
        secret = [value for name, value in self.ids.items() if name != "my_session"]
        assert not [value for value in [*secret, TENANT, "the owner's weights"] if value in answer.text], answer.text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    directory: Path = tmp_path_factory.mktemp("isolation")
    database = Database(url_of(directory))
    make_tables(database)
    layers = encode_targets({flag: [Target(flag, 2, 2)] for flag in TRAIN_FLAGS})
    database.write(lambda c: publish_training(c, ready=True, reason="", vocab_size=100, max_context=20, layers=layers))
    options: dict[str, Any] = {"base_model": BASE, "state_dir": directory}
    async with open_services(Runtime(ServerConfig(**options), directory, None, None)) as services:
        app = create_app(services)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
            yield World(app, services, http, database)
        for session, _ in (await services.sessions.look(-1.0)).silent:
            await services.session_life.close(session, "finished", None, None)
    database.close()


@pytest_asyncio.fixture(loop_scope="module")
async def world(running: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Polls end at once, and so do completions: there is no inference server."""

    async def answer(_: OpenAIService, asked: Asked) -> bytes:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        chat = {"id": "x", "created": 1, "model": asked.target.name, "choices": [choice], "usage": usage}
        return msgspec.json.encode(chat)

    async def count(_: OpenAIService, asked: Asked) -> int:
        return 1

    monkeypatch.setattr(polls, "HOLD_S", 0.0)
    monkeypatch.setattr(OpenAIService, "answer", answer)
    monkeypatch.setattr(OpenAIService, "count", count)
    await running.populate()
    return running


async def test_every_route_is_in_a_list_of_strangers(world: World) -> None:
    document = (await world.http.get("/openapi.json")).json()
    routes = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert {*TRIED, *LISTS, *HARMLESS, *SIGNED} == routes


async def test_only_routes_in_the_lists_of_strangers_are_open_or_signed(world: World) -> None:
    """The declared scopes agree with the lists of `strangers.py`: no route that names a tenant's objects is open."""
    declared = {(route.method, route.path): route.scope for route in world.app.routes}
    assert {route for route, scope in declared.items() if scope == "signed"} == SIGNED
    assert {route for route, scope in declared.items() if scope == "open"} < HARMLESS


def rows_of_the_page() -> set[tuple[str, str]]:
    """Method and path of each route that `docs/reference/endpoints.md` lists as served; parameters are `{}`."""
    page = (Path(__file__).parents[2] / "docs/reference/endpoints.md").read_text()
    found: set[tuple[str, str]] = set()
    for line in page.partition("## Not served")[0].splitlines():
        methods: list[str] = []
        for named in re.findall(r"`([^`]+)`", line.split("`: ")[0] + "`") if line.startswith("- `") else []:
            method, _, path = named.partition(" ")
            methods.append(method)
            if path:  # a method without a path shares the path of the next method
                path = path.replace("...", "training_runs/{id}/checkpoints", 1) if path.startswith("...") else path
                whole = path if path.startswith("/") else f"/api/v1/{path}"
                found |= {(verb, re.sub(r"{\w+}", "{}", whole)) for verb in methods}
                methods = []
    return found


async def test_every_route_is_in_the_table_of_endpoints() -> None:
    routes = {(method, re.sub(r"{\w+}", "{}", path)) for method, path in (*TRIED, *LISTS, *HARMLESS)}
    of_links = {("GET", "/api/v1/downloads/..."), ("PUT", "/api/v1/uploads/...")}
    unlisted = {("GET", "/openapi.json"), *of_links}
    assert rows_of_the_page() == routes | unlisted


@pytest.mark.parametrize("route", TRIED, ids=" ".join)
async def test_a_stranger_does_not_find_what_the_owner_finds(world: World, route: tuple[str, str]) -> None:
    before = await world.owned()
    for request in TRIED[route]:
        answer = await world.ask(STRANGER, *route, request)
        assert answer.status_code == request.status, answer.text
        assert TENANT not in answer.text
        assert await world.owned() == before, "the request changed the owner's rows"
    world.ids["my_session"] = world.ids["session_id"]
    for request in TRIED[route]:
        answer = await world.ask(OWNER, *route, request)
        assert answer.status_code == request.owner, answer.text


@pytest.mark.parametrize("route", LISTS, ids=" ".join)
async def test_lists_hold_only_the_callers_own_objects(world: World, route: tuple[str, str]) -> None:
    before = await world.owned()
    for request in LISTS[route]:
        answer = await world.ask(STRANGER, *route, request)
        assert answer.status_code == 200, answer.text
        world.check_shows_nothing(answer)
    assert await world.owned() == before


@pytest.mark.parametrize("route", sorted(HARMLESS), ids=" ".join)
async def test_routes_that_name_no_objects_ignore_the_owners_ids(world: World, route: tuple[str, str]) -> None:
    before = await world.owned()
    ids = {name: value for name, value in world.ids.items() if name != "my_session"}
    answer = await world.ask(STRANGER, *route, Try(ids | {"tenant": TENANT, "org_id": TENANT, "seq_id": 1}))
    assert answer.status_code < 500 or route == ("GET", "/readyz")
    world.check_shows_nothing(answer)
    assert await world.owned() == before


@pytest.mark.parametrize("route", sorted(SIGNED), ids=" ".join)
async def test_a_signed_link_opens_only_the_object_it_was_made_for(world: World, route: tuple[str, str]) -> None:
    archive_request = ("GET", f"{CHECKPOINT}/archive", Try(kind="sampler_weights"))
    link = (await world.ask(OWNER, *archive_request)).headers["location"]
    opened = await world.http.get(link)
    assert "the owner's weights" in opened.text
    for query in ("", "expires=9999999999&signature=00", link.partition("?")[2]):
        answer = await world.ask(STRANGER, *route, Try(query=query))
        assert answer.status_code == 403, answer.text
        world.check_shows_nothing(answer)


async def test_the_same_idempotency_key_of_two_tenants_is_two_keys(world: World) -> None:
    route = ("POST", "/api/v1/copy_weights")
    request = Try({"source_path": "{path}", "destination_project_id": "p"}, headers={"X-Idempotency-Key": "same"})
    assert (await world.ask(OWNER, *route, request)).status_code == 200
    assert (await world.ask(STRANGER, *route, request)).status_code == 404
