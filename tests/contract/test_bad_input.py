"""Every refusal of the API: it has this status, names this field, records nothing, and the next good request works."""

from __future__ import annotations

import functools
import io
import json
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import zstandard
from fastapi.routing import APIRoute
from sqlalchemy import func, insert, select

from skyrl.api.app import create_app
from skyrl.api.error_answers import is_anthropic, is_openai
from skyrl.api.server import open_services
from skyrl.api.services import Services
from skyrl.api.table import HttpTable
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.columns import lora_values
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import publish_training
from skyrl.storage.db.futures import futures
from skyrl.storage.db.models import models
from skyrl.storage.db.samplers import samplers
from skyrl.storage.db.sessions import sessions
from tests.databases import make_tables, url_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

BASE = "acme/base"
VOCAB, CONTEXT, MAX_BODY = 100, 20, 2**20
KEY, OTHER = {"X-API-Key": "tml-one"}, {"X-API-Key": "tml-two"}
PROTO = {"Content-Type": "application/x-protobuf"}
TABLES = (sessions, models, samplers, futures, checkpoints)


@dataclass
class World:
    """An API without an engine, and ids of objects in it. `{names}` in cases stand for fields of this class."""

    app: HttpTable
    services: Services
    http: httpx.AsyncClient
    session: str = ""
    ended: str = ""
    their_session: str = ""
    """A session of another tenant."""
    sampler: str = ""
    their_sampler: str = ""
    model: str = ""
    their_model: str = ""
    samples: int = 0

    def fill(self, value: Any) -> Any:
        """`value` with `{names}` replaced."""
        if isinstance(value, dict):
            return {key: self.fill(item) for key, item in value.items()}
        if isinstance(value, str) and "{" in value:
            names = ("session", "ended", "their_session", "sampler", "their_sampler", "model", "their_model")
            for name in names:
                value = value.replace("{" + name + "}", getattr(self, name))
        return value

    async def post(self, path: str, body: Any, headers: dict[str, str] = KEY) -> httpx.Response:
        return await self.http.post(f"/api/v1/{path}", json=self.fill(body), headers=headers)


def rows(database: Database) -> dict[str, int]:
    return database.read(
        lambda c: {table.name: c.execute(select(func.count()).select_from(table)).scalar_one() for table in TABLES}
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("bad")
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def database(directory: Path) -> Iterator[Database]:
    database = Database(url_of(directory))
    make_tables(database)
    database.write(lambda c: publish_training(c, ready=True, reason="", vocab_size=VOCAB, max_context=CONTEXT))
    yield database
    database.close()


def checkpoint(tenant: str, model_id: str, kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "model_id": model_id,
        "kind": kind,
        "name": name,
        "store_key": f"nowhere/{name}",
        "weights": AdapterVersion.of(model_id, 1) if kind == "sampler_weights" else None,
        "base_model": BASE,
        **lora_values(LoraSpec(8, 32.0, 1)),
        "size_bytes": 1,
        "public": False,
        "created_at": time.time(),
    } | more


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(directory: Path, database: Database) -> AsyncIterator[World]:
    options: dict[str, Any] = {"base_model": BASE, "state_dir": directory, "max_body_bytes": MAX_BODY}
    config = ServerConfig(**options)
    async with open_services(Runtime(config, directory, None, None)) as services:
        await services.refresh()
        app = create_app(services)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
            world = World(app, services, http)
            await _populate(world, database)
            yield world
            for session, key in ((world.session, KEY), (world.their_session, OTHER)):
                await world.post(f"sessions/{session}/finish", {}, key)


async def _populate(world: World, database: Database) -> None:
    async def session(headers: dict[str, str]) -> str:
        return (await world.post("create_session", {}, headers)).json()["session_id"]

    async def sampler(session_id: str, headers: dict[str, str]) -> str:
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
        return (await world.post("create_sampling_session", body, headers)).json()["sampling_session_id"]

    async def model(session_id: str, headers: dict[str, str]) -> str:
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE}
        return (await world.post("create_model", body, headers)).json()["model_id"]

    world.session, world.ended, world.their_session = await session(KEY), await session(KEY), await session(OTHER)
    world.sampler, world.their_sampler = await sampler(world.session, KEY), await sampler(world.their_session, OTHER)
    world.model, world.their_model = await model(world.session, KEY), await model(world.their_session, OTHER)
    for model_id in (world.model, world.their_model):
        version_directory(world.services.config.state_dir, AdapterVersion.of(model_id, 1)).mkdir(parents=True)
    assert (await world.post("sessions/{ended}/finish".replace("{ended}", world.ended), {})).status_code == 200
    tenants = dict(database.read(lambda c: list(c.execute(select(models.c.id, models.c.tenant)))))
    own_model, other_model = (world.model, tenants[world.model]), (world.their_model, tenants[world.their_model])
    saved = [
        checkpoint(tenant, model_id, kind, "saved")
        for model_id, tenant in (own_model, other_model)
        for kind in ("weights", "sampler_weights")
    ]
    expired = checkpoint(own_model[1], own_model[0], "weights", "expired", expires_at=time.time() - 1)
    for values in [*saved, expired]:
        database.write(lambda c, values=values: c.execute(insert(checkpoints), values))


async def check_refused(
    world: World, database: Database, answer: httpx.Response, before: dict[str, int], status: int, field: str | None
) -> str:
    """Check one refusal; returns its message."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    if is_anthropic(answer.request.url.path):
        assert body.pop("type") == "error"
        assert body.pop("request_id") == answer.headers["x-request-id"]
        error = body.pop("error")
        assert set(error) == {"type", "message"}
        named = field is not None and error["message"].startswith(f"{field}: ")  # only the message names the field
        body |= {"detail": error["message"], "field": field if named else None, "request_id": ""}
    elif is_openai(answer.request.url.path):
        error = body.pop("error")
        assert not body
        assert set(error) == {"message", "type", "param", "code"}
        body = {"detail": error["message"], "field": error["param"], "request_id": ""}
    assert set(body) == {"detail", "field", "request_id"}
    assert body["field"] == field, body
    assert body["detail"]
    assert field is None or body["detail"].startswith(f"{field}: "), body
    assert rows(database) == before
    return body["detail"]


async def check_still_serves(world: World) -> None:
    """Check that good requests still work: a sample and a heartbeat."""
    world.samples += 1
    sample = SAMPLE | {"seq_id": world.samples}
    assert (await world.post("asample", sample)).status_code == 200
    assert (await world.post("session_heartbeat", {"session_id": world.session})).status_code == 200


SAMPLE: dict[str, Any] = {
    "sampling_session_id": "{sampler}",
    "prompt": {"chunks": [{"tokens": [1, 2]}]},
    "sampling_params": {"max_tokens": 4},
}
MODEL: dict[str, Any] = {"session_id": "{session}", "model_seq_id": 9, "base_model": BASE}
SAMPLER: dict[str, Any] = {"session_id": "{session}", "sampling_session_seq_id": 9, "base_model": BASE}
LOAD: dict[str, Any] = {"session_id": "{session}", "model_seq_id": 9, "path": "tinker://{model}/weights/saved"}


COPY: dict[str, Any] = {"source_path": "tinker://{model}/weights/saved", "destination_project_id": "p"}
INTO: dict[str, Any] = {"source_path": "tinker://{model}/weights/saved", "session_id": "{session}", "model_seq_id": 9}


UPLOAD: dict[str, Any] = {"base_model": BASE, "lora_config": {}}
NAMES = {"session_id": "s", "sampler_id": "x", "model_id": "m", "kind": "weights", "name": "n"}
NAMES |= {"save": "0123", "file": "app.css", "model": "m", "run_id": "m", "agent_session": "s", "agent_turn": "t"}
NAMES |= {"upload_id": "u"}
"""Parameters in paths."""


LOSS_NODES: list[dict[str, Any]] = [
    {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
    {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "logprobs"}]},
    {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "sum_1"}, {"dict": {}}]}]},
]
LOSS: dict[str, Any] = {
    "session_id": "{session}",
    "custom_loss_seq_id": 0,
    "name": "mine",
    "inputs": [{"name": "logprobs", "rank": 1}],
    "graph": {"format": 1, "nodes": LOSS_NODES},
}


def graph(**changed: Any) -> dict[str, Any]:
    return LOSS | {"graph": LOSS["graph"] | changed}


def node(**changed: Any) -> dict[str, Any]:
    first, called, last = LOSS_NODES
    return graph(nodes=[first, called | changed, last])


def attribute(name: str) -> dict[str, Any]:
    return node(op="call_function", target="getattr", args=[{"ref": "logprobs"}, name])


def returning(value: Any) -> dict[str, Any]:
    return graph(nodes=[*LOSS_NODES[:2], LOSS_NODES[2] | {"args": [value]}])


def without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


def params(**values: Any) -> dict[str, Any]:
    return SAMPLE | {"sampling_params": values}


def prompt(*tokens: int) -> dict[str, Any]:
    return SAMPLE | {"prompt": {"chunks": [{"tokens": list(tokens)}]}}


def lora(**values: Any) -> dict[str, Any]:
    return MODEL | {"lora_config": values}


LONG = {"note": [[]] * 6_000}
"""18 kB in JSON, but twenty times as much in memory."""
DEEP = {"note": functools.reduce(lambda inner, _: [inner], range(500), [])}
RANKS = "skyrl.rank_pattern"
NO_TRAINING = {"train_attn": False, "train_mlp": False, "train_unembed": False}

CASES: list[tuple[str, Any, int, str | None]] = [
    # Sessions
    ("create_session", {"user_metadata": "me"}, 400, "user_metadata"),
    ("create_session", {"tags": [1]}, 400, "tags[0]"),
    ("create_session", [], 400, None),
    ("session_heartbeat", {}, 400, "session_id"),
    ("session_heartbeat", {"session_id": "s-nobody"}, 404, "session_id"),
    ("session_heartbeat", {"session_id": "{their_session}"}, 404, "session_id"),
    ("session_heartbeat", {"session_id": "{ended}"}, 410, "session_id"),
    ("sessions/s-nobody/finish", {}, 404, "session_id"),
    ("sessions/{their_session}/finish", {}, 404, "session_id"),
    ("sessions/{session}/finish", {"reason": "done"}, 400, "reason"),
    ("sessions/{session}/finish", {"reason": {"type": "bored"}}, 400, "reason.type"),
    ("create_session", {"project_id": 7}, 400, "project_id"),
    ("create_session", {"project_id": "p" * 1001}, 400, "project_id"),
    ("create_session", {"display_name": "n" * 1001}, 400, "display_name"),
    ("create_session", {"user_metadata": LONG}, 400, "user_metadata"),
    ("create_session", {"user_metadata": DEEP}, 400, "user_metadata"),
    ("create_session", {"tags": ["t"] * 10_000}, 400, "tags"),
    ("create_session", {"sdk_version": "1" * 20_000}, 400, "sdk_version"),
    ("sessions/{session}/finish", {"detail": "d" * 20_000}, 400, "detail"),
    # Searches for sessions
    ("sessions/search", {"limit": 0}, 400, "limit"),
    ("sessions/search", {"limit": 201}, 400, "limit"),
    ("sessions/search", {"display_name": ""}, 400, "display_name"),
    ("sessions/search", {"display_name": "a " * 501}, 400, "display_name"),
    ("sessions/search", {"project_ids": "p"}, 400, "project_ids"),
    ("sessions/search", {"user_metadata": {"lr": 1}}, 400, "user_metadata[...]"),
    ("sessions/search", {"owner": {"type": "all"}}, 400, "owner.type"),
    ("sessions/search", {"owner": {"type": "user"}}, 400, "owner.owner_urns"),
    ("sessions/search", {"owner": {"type": "user", "owner_urns": ["u"] * 11}}, 400, "owner.owner_urns"),
    ("sessions/search", {"statuses": []}, 400, "statuses"),
    ("sessions/search", {"statuses": [{"type": "active"}] * 101}, 400, "statuses"),
    ("sessions/search", {"project_ids": ["p"] * 101}, 400, "project_ids"),
    ("sessions/search", {"statuses": [{"type": "active"}, {"type": "asleep"}]}, 400, "statuses[1].type"),
    ("sessions/search", {"statuses": [{"type": "client_finished", "reasons": []}]}, 400, "statuses[0].reasons"),
    ("sessions/search", {"statuses": [{"type": "client_finished", "reasons": ["x"]}]}, 400, "statuses[0].reasons"),
    ("sessions/search", {"cursor": {"last_session_id": "s"}}, 400, "cursor.last_created_at"),
    (
        "sessions/search",
        {"cursor": {"last_session_id": "s", "last_created_at": "2026-01-01T00:00:00"}},
        400,
        "cursor.last_created_at",
    ),
    # Searches for checkpoints
    ("checkpoints/search", {"limit": 0}, 400, "limit"),
    ("checkpoints/search", {"limit": 201}, 400, "limit"),
    ("checkpoints/search", {"project_ids": "p"}, 400, "project_ids"),
    ("checkpoints/search", {"project_ids": ["p"] * 101}, 400, "project_ids"),
    ("checkpoints/search", {"base_models": ["m"] * 101}, 400, "base_models"),
    ("checkpoints/search", {"user_metadata": {"lr": 1}}, 400, "user_metadata[...]"),
    ("checkpoints/search", {"checkpoint_type": "weights"}, 400, "checkpoint_type"),
    ("checkpoints/search", {"owner": {"type": "all"}}, 400, "owner.type"),
    ("checkpoints/search", {"owner": {"type": "user"}}, 400, "owner.owner_urns"),
    ("checkpoints/search", {"cursor": {"last_checkpoint_uuid": "1"}}, 400, "cursor.last_created_at"),
    (
        "checkpoints/search",
        {"cursor": {"last_checkpoint_uuid": "-1", "last_created_at": "2026-01-01T00:00:00Z"}},
        400,
        "cursor.last_checkpoint_uuid",
    ),
    # Uploads
    ("external_weights_upload_start", {"lora_config": {}}, 400, "base_model"),
    ("external_weights_upload_start", {"base_model": BASE}, 400, "lora_config"),
    ("external_weights_upload_start", UPLOAD | {"base_model": "acme/other"}, 400, "base_model"),
    ("external_weights_upload_start", UPLOAD | {"lora_config": {"rank": 0}}, 400, "lora_config.rank"),
    ("external_weights_upload_start", UPLOAD | {"lora_config": {"rank": 10_000}}, 400, "lora_config.rank"),
    (
        "external_weights_upload_start",
        UPLOAD | {"lora_config": {"rank": 8, "rank_pattern": {"q_proj": 4}}},
        400,
        "lora_config.rank_pattern",
    ),
    ("external_weights_upload_start", UPLOAD | {"destination_project_id": "p" * 1001}, 400, "destination_project_id"),
    ("external_weights_upload_start", UPLOAD | {"lora_config": {"train_mlp": False}}, 503, None),
    ("external_weights_upload_finish", {}, 400, "upload_id"),
    ("external_weights_upload_finish", {"upload_id": "nobody"}, 404, "upload_id"),
    # Models
    ("create_model", without(MODEL, "session_id"), 400, "session_id"),
    ("create_model", without(MODEL, "model_seq_id"), 400, "model_seq_id"),
    ("create_model", without(MODEL, "base_model"), 400, "base_model"),
    ("create_model", MODEL | {"session_id": "s-nobody"}, 404, "session_id"),
    ("create_model", MODEL | {"session_id": "{their_session}"}, 404, "session_id"),
    ("create_model", MODEL | {"session_id": "{ended}"}, 410, "session_id"),
    ("create_model", MODEL | {"base_model": "acme/other"}, 400, "base_model"),
    ("create_model", MODEL | {"model_seq_id": "1"}, 400, "model_seq_id"),
    ("create_model", MODEL | {"model_seq_id": -1}, 400, "model_seq_id"),
    ("create_model", MODEL | {"model_seq_id": 2**31}, 400, "model_seq_id"),
    ("create_model", MODEL | {"model_seq_id": 2**70}, 400, "model_seq_id"),
    ("create_model", MODEL | {"optimizer_config": {"type": "dimuon"}}, 400, "optimizer_config.type"),
    ("create_model", MODEL | {"user_metadata": 3}, 400, "user_metadata"),
    ("create_model", MODEL | {"user_metadata": LONG}, 400, "user_metadata"),
    *(
        (route, body | {"user_metadata": {"value_head": value}}, 400, "user_metadata.value_head")
        for route, body in (("create_model", MODEL), ("load_weights", LOAD))
        for value in ("yes", 1, None)
    ),
    ("create_model", lora(rank=0), 400, "lora_config.rank"),
    ("create_model", lora(rank=-1), 400, "lora_config.rank"),
    ("create_model", lora(rank=33), 400, "lora_config.rank"),
    ("create_model", lora(rank="8"), 400, "lora_config.rank"),
    ("create_model", lora(rank=8, seed=2**63), 400, "lora_config.seed"),
    ("create_model", lora(rank=8, **NO_TRAINING), 400, "lora_config"),
    *(
        ("create_model", lora(rank=8, rank_pattern=pattern), 400, "lora_config.rank_pattern")
        for pattern in (
            ["q_proj"],
            {"q_proj": 33},
            {"q_proj": 0},
            {"": 4},
            {"q" * 129: 4},
            {f"layers.{number}.q_proj": 4 for number in range(129)},
            {"(q_proj": 4},
            {"q_proj)": 4},
            {"*": 4},
            {r"(\w+)+_proj": 4},
            {"(.+|.+)*": 4},
            {"(?=q)q_proj": 4},
            {"q{9999}": 4},
            {r"(.)\1": 4},
            {".*.*.*q_proj": 4},
            {"(.|.)" * 14: 4},
        )
    ),
    ("create_model", lora(rank=8, rank_pattern={"q_proj": "4"}), 400, "lora_config.rank_pattern[...]"),
    ("create_model", lora(rank=8, rank_pattern={"q_proj": 2**70}), 400, "lora_config.rank_pattern"),
    ("create_model", lora(rank=8, alpha_pattern={"q_proj": 16}), 400, "lora_config.alpha_pattern"),
    *(
        ("create_model", MODEL | {"user_metadata": {RANKS: given}}, 400, f"user_metadata.{RANKS}")
        for given in ("q_proj=4", "[4]", '{"q_proj": "4"}', '{"q_proj": 33}', {"q_proj": 4.5}, 4, ["q_proj"])
    ),
    (
        "create_model",
        lora(rank_pattern={"q_proj": 4}) | {"user_metadata": {RANKS: {"q_proj": 4}}},
        400,
        f"user_metadata.{RANKS}",
    ),
    ("get_info", {}, 400, "model_id"),
    ("get_info", {"model_id": "s:train:0"}, 404, "model_id"),
    ("get_info", {"model_id": "{their_model}"}, 404, "model_id"),
    ("unload_model", {}, 400, "model_id"),
    ("unload_model", {"model_id": "s:train:0"}, 404, "model_id"),
    ("unload_model", {"model_id": "{their_model}"}, 404, "model_id"),
    ("create_custom_loss", without(LOSS, "graph"), 400, "graph"),
    ("create_custom_loss", LOSS | {"session_id": "{their_session}"}, 404, "session_id"),
    ("create_custom_loss", LOSS | {"session_id": "{ended}"}, 410, "session_id"),
    ("create_custom_loss", LOSS | {"custom_loss_seq_id": -1}, 400, "custom_loss_seq_id"),
    ("create_custom_loss", LOSS | {"name": ""}, 400, "name"),
    ("create_custom_loss", LOSS | {"name": "n" * 201}, 400, "name"),
    ("create_custom_loss", LOSS | {"inputs": [{"name": "weights", "rank": 1}]}, 400, "inputs"),
    ("create_custom_loss", LOSS | {"inputs": [{"name": "logprobs", "rank": 0}]}, 400, "inputs[0].rank"),
    ("create_custom_loss", graph(format=2), 400, "graph.format"),
    ("create_custom_loss", graph(nodes=[]), 400, "graph.nodes"),
    ("create_custom_loss", graph(nodes=LOSS_NODES[:1] * 600), 400, "graph.nodes"),
    ("create_custom_loss", graph(nodes=LOSS_NODES[:2]), 400, "graph.nodes[1].op"),
    ("create_custom_loss", node(op="get_attr"), 400, "graph.nodes[1].op"),
    ("create_custom_loss", node(name="logprobs"), 400, "graph.nodes[1].name"),
    ("create_custom_loss", node(target="__reduce__"), 400, "graph.nodes[1].target"),
    ("create_custom_loss", node(op="call_function", target="os.system"), 400, "graph.nodes[1].target"),
    ("create_custom_loss", node(op="call_function", target="torch.load"), 400, "graph.nodes[1].target"),
    ("create_custom_loss", attribute("__class__"), 400, "graph.nodes[1].args"),
    ("create_custom_loss", node(args=[{"ref": "later"}]), 400, "graph.nodes[1].args"),
    ("create_custom_loss", node(args=[{"ref": "logprobs"}, 2**70]), 400, "graph.nodes[1].args"),
    ("create_custom_loss", node(args=[{"ref": "logprobs"}, "cuda"]), 400, "graph.nodes[1].args"),
    ("create_custom_loss", node(kwargs={"out": {"ref": "logprobs"}}), 400, "graph.nodes[1].kwargs"),
    ("create_custom_loss", node(kwargs={"dtype": {"dtype": "complex64"}}), 400, "graph.nodes[1].kwargs.dtype"),
    ("create_custom_loss", node(args=[[[[[[[[[[[1]]]]]]]]]]]), 400, "graph.nodes[1].args"),
    ("create_custom_loss", node(kwargs={"dim": [0] * 80_000}), 400, "graph"),
    ("create_custom_loss", returning({"ref": "sum_1"}), 400, "graph.nodes[2].args"),
    (
        "create_custom_loss",
        returning({"tuple": [{"ref": "sum_1"}, {"dict": {"loss:sum": {"ref": "sum_1"}}}]}),
        400,
        "graph.nodes[2].args",
    ),
    # Training commands
    *(
        (route, body, status, field)
        for route in (
            "forward_backward",
            "forward",
            "optim_step",
            "save_weights",
            "save_weights_for_sampler",
            "save_weights_external",
        )
        for body, status, field in (
            ({}, 400, "model_id"),
            ({"model_id": 1}, 400, "model_id"),
            ({"model_id": "s:train:0", "seq_id": 1}, 404, "model_id"),
            ({"model_id": "{their_model}", "seq_id": 1}, 404, "model_id"),
            ({"model_id": "{model}", "seq_id": "1"}, 400, "seq_id"),
            ({"model_id": "{model}", "seq_id": -1}, 400, "seq_id"),
            ({"model_id": "{model}", "seq_id": 2**62}, 400, "seq_id"),
        )
    ),
    # Weights
    ("load_weights", without(LOAD, "path"), 400, "path"),
    ("load_weights", without(LOAD, "session_id"), 400, None),
    ("load_weights", without(LOAD, "model_seq_id"), 400, None),
    ("load_weights", LOAD | {"session_id": "s-nobody"}, 404, "session_id"),
    ("load_weights", LOAD | {"session_id": "{ended}"}, 410, "session_id"),
    ("load_weights", LOAD | {"model_seq_id": -1}, 400, "model_seq_id"),
    ("load_weights", LOAD | {"model_seq_id": 2**70}, 400, "model_seq_id"),
    ("load_weights", LOAD | {"path": "saved"}, 400, "path"),
    ("load_weights", LOAD | {"user_metadata": LONG}, 400, "user_metadata"),
    ("load_weights", LOAD | {"user_metadata": {RANKS: '{"q_proj": 4}'}}, 400, f"user_metadata.{RANKS}"),
    ("load_weights", LOAD | {"path": "tinker://{model}/weights/lost"}, 404, "path"),
    ("load_weights", LOAD | {"path": "tinker://{model}/weights/expired"}, 404, "path"),
    ("load_weights", LOAD | {"path": "tinker://{model}/sampler_weights/saved"}, 404, "path"),
    ("load_weights", LOAD | {"path": "tinker://{their_model}/weights/saved"}, 404, "path"),
    ("load_weights", LOAD | {"base_model": "acme/other"}, 400, "base_model"),
    ("load_weights", LOAD | {"optimizer_config": {"type": "dimuon"}}, 400, "optimizer_config.type"),
    ("load_weights", {"model_id": "{their_model}", "seq_id": 1, "path": LOAD["path"]}, 404, "model_id"),
    ("weights_info", {}, 400, "tinker_path"),
    ("weights_info", {"tinker_path": "/etc/passwd"}, 400, "tinker_path"),
    ("weights_info", {"tinker_path": "tinker://{model}/weights/../../x"}, 400, "tinker_path"),
    ("weights_info", {"tinker_path": "tinker://{model}/weights/lost"}, 404, "tinker_path"),
    ("weights_info", {"tinker_path": "tinker://{their_model}/weights/saved"}, 404, "tinker_path"),
    ("load_weights", LOAD | {"path": "tinker://{model}/external_weights/saved"}, 404, "path"),
    ("load_weights", LOAD | {"weights_access_token": 5}, 400, "weights_access_token"),
    ("load_weights", LOAD | {"weights_access_token": "eyJ.eyJ.x"}, 403, "weights_access_token"),
    ("load_weights", LOAD | {"weights_access_token": "tml-nobody"}, 404, "path"),
    ("copy_weights", {}, 400, "source_path"),
    ("copy_weights", COPY | {"source_path": "saved"}, 400, "source_path"),
    ("copy_weights", COPY | {"source_path": "tinker://{model}/weights/lost"}, 404, "source_path"),
    ("copy_weights", COPY | {"source_path": "tinker://{model}/external_weights/saved"}, 404, "source_path"),
    ("copy_weights", COPY | {"source_path": "tinker://{their_model}/weights/saved"}, 404, "source_path"),
    ("copy_weights", COPY | {"weights_access_token": "eyJ.eyJ.x"}, 403, "weights_access_token"),
    ("copy_weights", COPY | {"ttl_seconds": 3599}, 400, "ttl_seconds"),
    ("copy_weights", COPY | {"ttl_seconds": 10 * 365 * 86_400 + 1}, 400, "ttl_seconds"),
    ("copy_weights", without(COPY, "destination_project_id"), 400, None),
    ("copy_weights", COPY | {"session_id": "{session}", "model_seq_id": 3}, 400, None),
    ("copy_weights", COPY | {"model_seq_id": 3}, 400, None),
    ("copy_weights", COPY | {"destination_project_id": ""}, 400, "destination_project_id"),
    ("copy_weights", COPY | {"destination_project_id": "p" * 1001}, 400, "destination_project_id"),
    ("copy_weights", INTO | {"session_id": "{their_session}"}, 404, "session_id"),
    ("copy_weights", INTO | {"session_id": "{ended}"}, 410, "session_id"),
    ("copy_weights", INTO | {"model_seq_id": -1}, 400, "model_seq_id"),
    ("copy_weights", INTO | {"model_seq_id": 0}, 400, "model_seq_id"),
    ("copy_weights", without(INTO, "model_seq_id"), 400, None),
    # Sampling sessions
    ("create_sampling_session", without(SAMPLER, "session_id"), 400, "session_id"),
    ("create_sampling_session", without(SAMPLER, "sampling_session_seq_id"), 400, "sampling_session_seq_id"),
    ("create_sampling_session", without(SAMPLER, "base_model"), 400, "model_path"),
    ("create_sampling_session", SAMPLER | {"session_id": "{their_session}"}, 404, "session_id"),
    ("create_sampling_session", SAMPLER | {"session_id": "{ended}"}, 410, "session_id"),
    ("create_sampling_session", SAMPLER | {"base_model": "acme/other"}, 400, "base_model"),
    ("create_sampling_session", SAMPLER | {"sampling_session_seq_id": -1}, 400, "sampling_session_seq_id"),
    ("create_sampling_session", SAMPLER | {"sampling_session_seq_id": 2**31}, 400, "sampling_session_seq_id"),
    ("create_sampling_session", SAMPLER | {"model_path": "saved"}, 400, "model_path"),
    ("create_sampling_session", SAMPLER | {"model_path": "tinker://{model}/sampler_weights/lost"}, 404, "model_path"),
    ("create_sampling_session", SAMPLER | {"model_path": "tinker://{model}/weights/saved"}, 404, "model_path"),
    (
        "create_sampling_session",
        SAMPLER | {"model_path": "tinker://{their_model}/sampler_weights/saved"},
        404,
        "model_path",
    ),
    (
        "create_sampling_session",
        SAMPLER | {"model_path": "tinker://{model}/sampler_weights/saved", "base_model": "acme/other"},
        400,
        "base_model",
    ),
    (
        "create_sampling_session",
        {
            "session_id": "{session}",
            "sampling_session_seq_id": 0,
            "model_path": "tinker://{model}/sampler_weights/saved",
        },
        400,
        "sampling_session_seq_id",
    ),
    # Samples
    ("asample", without(SAMPLE, "sampling_session_id"), 400, "sampling_session_id"),
    ("asample", SAMPLE | {"sampling_session_id": "s:sample:0"}, 404, "sampling_session_id"),
    ("asample", SAMPLE | {"sampling_session_id": "{their_sampler}"}, 404, "sampling_session_id"),
    ("asample", without(SAMPLE, "prompt"), 400, "prompt"),
    ("asample", SAMPLE | {"prompt": "text"}, 400, "prompt"),
    ("asample", prompt(), 400, "prompt"),
    ("asample", SAMPLE | {"prompt": {"chunks": []}}, 400, "prompt"),
    ("asample", SAMPLE | {"prompt": {"chunks": [{"data": "", "format": "png"}]}}, 400, "prompt.chunks[0]"),
    ("asample", prompt(1, VOCAB), 400, "prompt"),
    ("asample", prompt(-1), 400, "prompt"),
    ("asample", prompt(*[1] * CONTEXT), 400, "prompt"),
    ("asample", SAMPLE | {"seq_id": 2**63}, 400, "seq_id"),
    ("asample", SAMPLE | {"seq_id": "1"}, 400, "seq_id"),
    ("asample", SAMPLE | {"num_samples": 0}, 400, "num_samples"),
    ("asample", SAMPLE | {"num_samples": -1}, 400, "num_samples"),
    ("asample", SAMPLE | {"num_samples": 10**6}, 400, "num_samples"),
    ("asample", SAMPLE | {"num_samples": "2"}, 400, "num_samples"),
    ("asample", SAMPLE | {"topk_prompt_logprobs": 65}, 400, "topk_prompt_logprobs"),
    ("asample", SAMPLE | {"topk_sample_logprobs": -1}, 400, "topk_sample_logprobs"),
    ("asample", SAMPLE | {"prompt_logprobs_last_n": 0}, 400, "prompt_logprobs_last_n"),
    ("asample", SAMPLE | {"prompt_logprobs_last_n": 1}, 400, "prompt_logprobs_last_n"),
    ("asample", SAMPLE | {"prompt_alt_tokens_k": 65}, 400, "prompt_alt_tokens_k"),
    ("asample", SAMPLE | {"prompt_alt_tokens_k": "2"}, 400, "prompt_alt_tokens_k"),
    ("asample", SAMPLE | {"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, 400, "target_prompt_logprobs"),
    ("asample", SAMPLE | {"target_prompt_logprobs": {"data": ["x"]}}, 400, "target_prompt_logprobs.data[0]"),
    ("asample", params(stop=["a", 1]), 400, "sampling_params.stop"),
    ("asample", params(stop=[1.5]), 400, "sampling_params.stop[0]"),
    ("asample", params(stop=[VOCAB]), 400, "sampling_params.stop"),
    ("asample", params(stop=""), 400, "sampling_params.stop"),
    ("asample", params(temperature=-1), 400, "sampling_params.temperature"),
    ("asample", params(temperature="hot"), 400, "sampling_params.temperature"),
    ("asample", params(temperature=None), 400, "sampling_params.temperature"),
    ("asample", params(top_p=0), 400, "sampling_params.top_p"),
    ("asample", params(top_p=1.01), 400, "sampling_params.top_p"),
    ("asample", params(top_k=-2), 400, "sampling_params.top_k"),
    ("asample", params(top_k=1.5), 400, "sampling_params.top_k"),
    ("asample", params(max_tokens=0), 400, "sampling_params.max_tokens"),
    ("asample", params(max_tokens=-5), 400, "sampling_params.max_tokens"),
    ("asample", params(seed=2**64), 400, "sampling_params.seed"),
    # Results
    ("retrieve_future", {}, 400, "request_id"),
    ("retrieve_future", {"request_id": 1}, 400, "request_id"),
    ("retrieve_future", {"request_id": "unknown"}, 404, "request_id"),
    ("cancel_future", {}, 400, "request_id"),
    ("cancel_future", {"request_id": "unknown"}, 404, "request_id"),
    ("retrieve_futures", {}, 400, "target"),
    ("retrieve_futures", {"target": {"sampling_session_id": "x", "type": "model"}}, 400, "target.type"),
    ("retrieve_futures", {"target": {"sampling_session_id": "x"}}, 404, "target.sampling_session_id"),
    ("retrieve_futures", {"target": {"sampling_session_id": "{their_sampler}"}}, 404, "target.sampling_session_id"),
    *(
        ("retrieve_futures", {"target": {"sampling_session_id": "{sampler}"}} | wrong, 400, field)
        for wrong, field in (
            ({"target": {"sampling_session_id": "{sampler}", "cloned_sampler_id": -1}}, "target.cloned_sampler_id"),
            ({"target": {"sampling_session_id": "{sampler}", "cloned_sampler_id": 2**33}}, "target.cloned_sampler_id"),
            ({"prev_cursor": -1}, "prev_cursor"),
            ({"prev_cursor": 2**62}, "prev_cursor"),
            ({"timeout": -1}, "timeout"),
            ({"retrieved_request_ids": "x"}, "retrieved_request_ids"),
        )
    ),
    ("join_sampling_session", {}, 400, "sampling_session_id"),
    ("join_sampling_session", {"sampling_session_id": "x"}, 404, "sampling_session_id"),
    ("join_sampling_session", {"sampling_session_id": "{their_sampler}"}, 404, "sampling_session_id"),
]


@pytest.mark.parametrize(("path", "body", "status", "field"), CASES)
async def test_a_bad_body_is_refused_with_its_field(
    world: World, database: Database, path: str, body: Any, status: int, field: str | None
) -> None:
    before = rows(database)
    await check_refused(world, database, await world.post(world.fill(path), body), before, status, field)
    await check_still_serves(world)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "field"),
    [
        ("GET", "sessions/s-nobody", None, 404, "session_id"),
        ("GET", "sessions/{their_session}", None, 404, "session_id"),
        ("GET", "sessions?limit=0", None, 400, "limit"),
        ("GET", "sessions?limit=many", None, 400, "limit"),
        ("GET", "sessions?offset=-1", None, 400, "offset"),
        ("GET", f"sessions?offset={2**70}", None, 400, "offset"),
        ("GET", "sessions?access_scope=all", None, 400, "access_scope"),
        ("GET", "sessions/{session}?access_scope=all", None, 400, "access_scope"),
        ("GET", "sessions/s-nobody/trace_export", None, 404, "session_id"),
        ("GET", "sessions/{their_session}/trace_export", None, 404, "session_id"),
        ("PUT", "sessions/{session}/project", {}, 400, "project_id"),
        ("PUT", "sessions/{session}/project", {"project_id": ""}, 400, "project_id"),
        ("PUT", "sessions/{session}/project", {"project_id": "p" * 1001}, 400, "project_id"),
        ("PUT", "sessions/{their_session}/project", {"project_id": "p"}, 404, "session_id"),
        ("GET", "audit?event_type=secrets", None, 400, "event_type"),
        ("GET", "audit?day=yesterday", None, 400, "day"),
        ("GET", "billing/usage/events", None, 400, "starting_on"),
        ("GET", "billing/usage/events?starting_on=0001-01-01T00:00:00%2B14:00", None, 400, "starting_on"),
        ("GET", "billing/usage/events?starting_on=2026-01-01T00:00:00Z", None, 400, "ending_before"),
        *(
            ("GET", f"billing/usage/events?starting_on={start}&ending_before={end}", None, 400, field)
            for start, end, field in (
                ("soon", "2026-01-01T00:00:00Z", "starting_on"),
                ("2026-01-01T00:30:00Z", "2026-01-01T01:00:00Z", "starting_on"),
                ("2026-01-01T00:00:00Z", "2026-01-01T01:00:01Z", "ending_before"),
                ("2026-01-01T00:00:00%2B00:30", "2026-01-01T01:00:00Z", "starting_on"),
                ("2026-01-01T01:00:00Z", "2026-01-01T01:00:00Z", "ending_before"),
                ("2026-01-01T00:00:00Z", "2026-01-15T01:00:00Z", "ending_before"),
                ("2999-01-01T00:00:00Z", "2999-01-01T01:00:00Z", "starting_on"),
            )
        ),
        ("GET", "samplers/s:sample:0", None, 404, "sampler_id"),
        ("GET", "samplers/{their_sampler}", None, 404, "sampler_id"),
        ("GET", "training_runs/s:train:0", None, 404, "training_run_id"),
        ("GET", "training_runs/{their_model}", None, 404, "training_run_id"),
        ("GET", "training_runs/{their_model}/checkpoints", None, 404, "training_run_id"),
        ("GET", "training_runs?limit=1001", None, 400, "limit"),
        ("GET", f"training_runs?offset={2**70}", None, 400, "offset"),
        ("GET", f"checkpoints?offset={2**70}", None, 400, "offset"),
        ("GET", "checkpoints?access_scope=all", None, 400, "access_scope"),
        ("GET", "training_runs/{their_model}?access_scope=accessible", None, 404, "training_run_id"),
        ("GET", "training_runs/{model}/checkpoints/weights/lost/archive", None, 404, "checkpoint_id"),
        ("GET", "training_runs/{model}/checkpoints/optimizer/saved/archive", None, 400, "checkpoint_id"),
        ("GET", "training_runs/{model}/checkpoints/external_weights/x/archive", None, 400, "checkpoint_id"),
        ("GET", "training_runs/{their_model}/checkpoints/weights/saved/archive", None, 404, "checkpoint_id"),
        ("GET", "training_runs/{model}/checkpoints/weights/saved/external_weights_urls", None, 400, "checkpoint_id"),
        (
            "GET",
            "training_runs/{model}/checkpoints/external_weights/x/external_weights_urls",
            None,
            404,
            "checkpoint_id",
        ),
        ("GET", "downloads/archives/{model}/weights/saved/0/saved.tar?expires=99999999999", None, 403, "signature"),
        ("GET", "downloads/files/{model}/weights/saved/0/x?expires=1&signature=aa", None, 403, "signature"),
        ("DELETE", "training_runs/{model}/checkpoints/weights/lost", None, 404, "checkpoint_id"),
        ("DELETE", "training_runs/{model}/checkpoints/optimizer/saved", None, 400, "checkpoint_id"),
        ("DELETE", "training_runs/{their_model}/checkpoints/weights/saved", None, 404, "checkpoint_id"),
        ("POST", "training_runs/{their_model}/checkpoints/weights/saved/publish", None, 404, "checkpoint_id"),
        ("DELETE", "training_runs/{their_model}/checkpoints/weights/saved/publish", None, 404, "checkpoint_id"),
        ("PUT", "training_runs/{model}/checkpoints/weights/saved/ttl", {"ttl_seconds": 1}, 400, "ttl_seconds"),
        ("PUT", "training_runs/{model}/checkpoints/weights/saved/ttl", {"ttl_seconds": 10**30}, 400, "ttl_seconds"),
        ("PUT", "training_runs/{model}/checkpoints/weights/saved/ttl", {"ttl_seconds": "1 d"}, 400, "ttl_seconds"),
        (
            "PUT",
            "training_runs/{their_model}/checkpoints/weights/saved/ttl",
            {"ttl_seconds": 3600},
            404,
            "checkpoint_id",
        ),
        ("GET", "no_such_route", None, 404, None),
        ("POST", "no_such_route", {}, 404, None),
        ("GET", "asample", None, 405, None),
    ],
)
async def test_a_bad_path_or_query_is_refused_with_its_field(
    world: World, database: Database, method: str, path: str, body: Any, status: int, field: str | None
) -> None:
    before = rows(database)
    answer = await world.http.request(method, f"/api/v1/{world.fill(path)}", json=body, headers=KEY)
    await check_refused(world, database, answer, before, status, field)
    await check_still_serves(world)


# Bodies that cannot be decoded


@pytest.mark.parametrize("content", [b"", b"no json", b'{"session_id": "\xff', b'{"x": ' + b"[" * 50_000])
async def test_a_body_that_is_not_json_is_refused_by_every_route(
    world: World, database: Database, content: bytes
) -> None:
    before = rows(database)
    for route in world.app.routes:
        if route.body is None or (route.body.optional and not content):
            continue
        answer = await world.http.request(route.method, route.path.format(**NAMES), content=content, headers=KEY)
        message = await check_refused(world, database, answer, before, 400, None)
        assert "not JSON" in message or "nested too deeply" in message, route
    await check_still_serves(world)


async def test_an_invalid_protobuf_body_is_refused(world: World, database: Database) -> None:
    before = rows(database)
    for content, field in ((b"\xff\xff", None), (b"", "model_id"), (b'{"model_id": "m"}', None)):
        answer = await world.http.post("/api/v1/forward_backward", content=content, headers=KEY | PROTO)
        await check_refused(world, database, answer, before, 400, field)
    for model_id, status, seq_id, field in (
        (world.their_model, 404, 1, "model_id"),
        (world.model, 400, -1, "seq_id"),
    ):
        content = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id).SerializeToString()
        answer = await world.http.post("/api/v1/forward_backward", content=content, headers=KEY | PROTO)
        await check_refused(world, database, answer, before, status, field)


async def test_a_body_above_the_limit_is_refused(world: World, database: Database) -> None:
    before = rows(database)
    large = b" " * (MAX_BODY + 1)

    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield large[: MAX_BODY // 2]

    for content in (large, in_pieces()):
        answer = await world.http.post("/api/v1/asample", content=content, headers=KEY)
        assert str(MAX_BODY) in await check_refused(world, database, answer, before, 413, None)
    await check_still_serves(world)


def _streamed(data: bytes) -> bytes:
    """A zstd frame that does not tell its decompressed size."""
    target = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(target, closefd=False) as writer:
        writer.write(data)
    return target.getvalue()


@pytest.mark.parametrize("compress", [zstandard.compress, _streamed])
async def test_a_zstd_bomb_is_refused(world: World, database: Database, compress: Any) -> None:
    before = rows(database)
    bomb = compress(b" " * (64 * MAX_BODY))
    assert len(bomb) < 10_000
    answer = await world.http.post("/api/v1/asample", content=bomb, headers=KEY | {"Content-Encoding": "zstd"})
    assert "decompresses to more than" in await check_refused(world, database, answer, before, 413, None)
    await check_still_serves(world)


async def test_a_damaged_or_unknown_encoding_is_refused(world: World, database: Database) -> None:
    before = rows(database)
    whole = zstandard.compress(json.dumps(world.fill(SAMPLE)).encode())
    for content, encoding, status, message in (
        (b"not zstd", "zstd", 400, "not zstd"),
        (b"", "zstd", 400, "not zstd"),
        (whole[:-5], "zstd", 400, "incomplete"),
        (whole + whole, "zstd", 400, "more than one zstd frame"),
        (_streamed(b"{}") + _streamed(b"{}"), "zstd", 400, "more than one zstd frame"),
        (whole + b"garbage", "zstd", 400, "not zstd"),
        (whole, "gzip", 415, "gzip"),
    ):
        headers = KEY | {"Content-Encoding": encoding}
        answer = await world.http.post("/api/v1/asample", content=content, headers=headers)
        assert message in await check_refused(world, database, answer, before, status, None)
    for good in (whole, _streamed(json.dumps(world.fill(SAMPLE)).encode())):
        answer = await world.http.post("/api/v1/asample", content=good, headers=KEY | {"Content-Encoding": "zstd"})
        assert answer.status_code == 200, answer.text


# Keys


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": ""}, {"Authorization": "Basic dG1sLW9uZQ=="}])
async def test_every_route_that_is_not_open_needs_a_key_or_a_signature(
    world: World, database: Database, headers: dict[str, str]
) -> None:
    before = rows(database)
    for route in world.app.routes:
        path = route.path
        answer = await world.http.request(route.method, path.format(**NAMES), json={}, headers=headers)
        if route.scope == "open":
            assert answer.status_code in (200, 503), path
        elif route.scope == "signed":
            await check_refused(world, database, answer, before, 403, "signature")
        else:
            assert "X-API-Key" in await check_refused(world, database, answer, before, 401, None), path


# Odd requests that are accepted


async def test_a_command_with_a_model_and_a_number_is_accepted_whatever_its_other_fields(
    world: World, database: Database
) -> None:
    """A refusal would leave a gap in the model's order, because clients never send a number again."""
    before = rows(database)["futures"]
    wrong = {"forward_backward_input": 7, "adam_params": "fast", "path": "../../x", "ttl_seconds": -1}
    wrong |= {"weights_access_token": 5, "age_encryption_recipients": "me", "optimizer_params": {"type": "dimuon"}}
    saves = ("save_weights", "save_weights_for_sampler", "save_weights_external")
    commands = ("forward_backward", "forward", "optim_step", *saves, "load_weights")
    for seq_id, route in enumerate(commands, start=1):
        answer = await world.post(route, {"model_id": "{model}", "seq_id": seq_id} | wrong)
        assert answer.status_code == 200, route
    assert rows(database)["futures"] == before + len(commands)


async def test_an_internal_error_has_the_same_form_and_hides_its_message(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise OSError("secret detail")

    monkeypatch.setattr(world.services.sessions, "create", fail)
    answer = await world.post("create_session", {})
    assert answer.status_code == 500
    request_id = answer.headers["x-request-id"]
    assert answer.json() == {"detail": "internal error: OSError", "field": None, "request_id": request_id}
    assert "secret detail" in caplog.text


# The routes and their scopes are listed here, so that adding or removing one is a deliberate decision


async def test_the_server_has_exactly_these_routes(world: World) -> None:
    served = {
        (method, r.path_format) for r in world.app.framework.routes if isinstance(r, APIRoute) for method in r.methods
    }
    assert served == {(route.method, route.path) for route in world.app.routes}
    assert {(route.method, route.path, route.scope) for route in world.app.routes} == {
        ("GET", "/ui", "open"),
        ("GET", "/ui/{file}", "open"),
        ("GET", "/ui/api/agents/{agent_session}", "sample"),
        ("GET", "/ui/api/agents/{agent_session}/turns/{agent_turn}", "sample"),
        ("GET", "/ui/api/box", "admin"),
        ("GET", "/ui/api/runs/{run_id}", "any"),
        ("GET", "/ui/api/state", "any"),
        ("GET", "/ui/api/usage", "any"),
        ("GET", "/api/v1/audit", "admin"),
        ("GET", "/api/v1/billing/usage/checkpoints/current", "admin"),
        ("GET", "/api/v1/billing/usage/events", "admin"),
        ("DELETE", "/api/v1/auth/apikey/me", "any"),
        ("GET", "/api/v1/auth/apikey/me", "any"),
        ("GET", "/api/v1/checkpoints", "any"),
        ("GET", "/api/v1/get_server_capabilities", "any"),
        ("GET", "/api/v1/samplers/{sampler_id}", "any"),
        ("GET", "/api/v1/sessions", "any"),
        ("GET", "/api/v1/sessions/{session_id}", "any"),
        ("GET", "/api/v1/sessions/{session_id}/trace_export", "any"),
        ("GET", "/api/v1/training_runs", "any"),
        ("GET", "/api/v1/training_runs/{model_id}", "any"),
        ("GET", "/api/v1/training_runs/{model_id}/checkpoints", "any"),
        ("POST", "/api/v1/auth/token", "any"),
        ("POST", "/api/v1/cancel_future", "any"),
        ("POST", "/api/v1/checkpoints/search", "any"),
        ("POST", "/api/v1/create_session", "any"),
        ("POST", "/api/v1/get_info", "any"),
        ("POST", "/api/v1/retrieve_future", "any"),
        ("POST", "/api/v1/session_heartbeat", "any"),
        ("POST", "/api/v1/sessions/search", "any"),
        ("POST", "/api/v1/sessions/{session_id}/finish", "any"),
        ("POST", "/api/v1/weights_info", "any"),
        ("PUT", "/api/v1/sessions/{session_id}/project", "any"),
        ("GET", "/", "open"),
        ("GET", "/api/v1/healthz", "open"),
        ("GET", "/metrics", "open"),
        ("GET", "/readyz", "open"),
        ("GET", "/statusz", "open"),
        ("POST", "/api/v1/client/config", "open"),
        ("POST", "/api/v1/client/dynamic_config", "open"),
        ("POST", "/api/v1/telemetry", "open"),
        ("POST", "/api/v1/asample", "sample"),
        ("POST", "/api/v1/create_sampling_session", "sample"),
        ("POST", "/api/v1/join_sampling_session", "sample"),
        ("POST", "/api/v1/retrieve_futures", "sample"),
        *(
            (method, f"{prefix}/{path}", scope)
            for prefix in ("/oai/api/v1", "/v1")
            for method, path, scope in (
                ("GET", "models", "agent"),
                ("GET", "models/{model}", "agent"),
                ("POST", "chat/completions", "agent"),
                ("POST", "completions", "sample"),
            )
        ),
        ("POST", "/inference/v1/generate", "sample"),
        ("POST", "/oai/api/inference/v1/generate", "sample"),
        ("POST", "/v1/messages", "agent"),
        ("POST", "/v1/messages/count_tokens", "agent"),
        ("POST", "/v1/responses", "agent"),
        ("GET", "/api/v1/agent_sessions", "sample"),
        ("POST", "/api/v1/agent_sessions", "sample"),
        ("GET", "/api/v1/agent_sessions/{session_id}", "sample"),
        ("DELETE", "/api/v1/agent_sessions/{session_id}", "sample"),
        ("GET", "/api/v1/agent_sessions/{session_id}/trajectory", "sample"),
        ("GET", "/api/v1/agent_sessions/{session_id}/turns", "sample"),
        ("POST", "/api/v1/agent_sessions/{session_id}/end", "sample"),
        ("POST", "/api/v1/agent_sessions/{session_id}/reward", "sample"),
        ("GET", "/api/v1/downloads/archives/{model_id}/{kind}/{name}/{save}/{file}", "signed"),
        ("GET", "/api/v1/downloads/files/{model_id}/{kind}/{name}/{save}/{file}", "signed"),
        ("GET", "/api/v1/downloads/traces/{session_id}", "signed"),
        ("PUT", "/api/v1/uploads/{upload_id}/{file}", "signed"),
        ("DELETE", "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}", "train"),
        ("DELETE", "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}/publish", "train"),
        ("GET", "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}/archive", "train"),
        ("GET", "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}/external_weights_urls", "train"),
        ("POST", "/api/v1/copy_weights", "train"),
        ("POST", "/api/v1/external_weights_upload_finish", "train"),
        ("POST", "/api/v1/external_weights_upload_start", "train"),
        ("POST", "/api/v1/create_custom_loss", "train"),
        ("POST", "/api/v1/create_model", "train"),
        ("POST", "/api/v1/forward", "train"),
        ("POST", "/api/v1/forward_backward", "train"),
        ("POST", "/api/v1/load_weights", "train"),
        ("POST", "/api/v1/optim_step", "train"),
        ("POST", "/api/v1/save_weights", "train"),
        ("POST", "/api/v1/save_weights_external", "train"),
        ("POST", "/api/v1/save_weights_for_sampler", "train"),
        ("POST", "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}/publish", "train"),
        ("POST", "/api/v1/unload_model", "train"),
        ("PUT", "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}/ttl", "train"),
    }
    assert len(world.app.routes) == len(served)


async def test_odd_but_valid_requests_are_answered(world: World) -> None:
    assert (await world.http.get("/api/v1/audit?day=9999-12-31", headers=KEY)).json() == {"entries": []}
    odd = KEY | {"X-Stainless-Package-Version": "9" * 5000 + ".1"}
    assert (await world.http.get("/api/v1/checkpoints", headers=odd)).status_code == 200
