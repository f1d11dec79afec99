"""One base model under several names: which names are served, what clients are told of them, what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from skyrl.api.app import create_app
from skyrl.api.server import open_services
from skyrl.config.server import load_config
from skyrl.db.checkpoints import Checkpoint, checkpoints, put
from skyrl.db.database import Database
from skyrl.db.engine_state import publish_training
from skyrl.db.migrate import migrate
from skyrl.db.models import find_model
from skyrl.processes.runtime import Runtime
from skyrl.storage.adapters import adapter_directory
from skyrl.tiny import model_path
from skyrl.types.weights import AdapterVersion
from skyrl.wire.paths import TinkerPath
from tests.databases import url_of

NAMES = ("acme/base", "acme/base-alias", "plain")
KEY = {"X-API-Key": "tml-one"}
Api = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(url_of(tmp_path))
    migrate(database)
    database.write(lambda c: publish_training(c, ready=True, reason="", vocab_size=512, max_context=4096))
    yield database
    database.close()


@pytest.fixture
def serve(tmp_path: Path, database: Database) -> Api:
    @asynccontextmanager
    async def start(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
        base = {"base_model": str(model_path()), "served_model_names": NAMES, "state_dir": tmp_path}
        config = load_config(base | options)
        async with open_services(Runtime(config, tmp_path, None, None)) as services:
            transport = httpx.ASGITransport(create_app(services))
            async with httpx.AsyncClient(transport=transport, base_url="http://api/api/v1", headers=KEY) as http:
                yield http

    return start


async def created(http: httpx.AsyncClient, base_model: str) -> tuple[str, str]:
    """A session with a model of that name."""
    session = (await http.post("create_session", json={})).json()["session_id"]
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": base_model}
    answer = await http.post("create_model", json=wanted)
    assert answer.status_code == 200, answer.text
    return session, answer.json()["model_id"]


async def test_every_name_is_a_model_with_its_context_and_capabilities(serve: Api) -> None:
    async with serve() as http:
        served = (await http.get("get_server_capabilities")).json()["supported_models"]
    facts = {"max_context_length": 4096, "trainable": True, "sampleable": True}
    assert served == [{"model_name": name} | facts for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
async def test_a_model_is_called_what_its_client_called_it(serve: Api, name: str) -> None:
    async with serve() as http:
        _, model = await created(http, name)
        info = (await http.post("get_info", json={"model_id": model})).json()
        run = (await http.get(f"training_runs/{model}")).json()
    # A name without an organisation would send the client to the model hub for its tokenizer.
    tokenizer = name if "/" in name else str(model_path())
    assert info["model_data"] == {"model_name": name, "tokenizer_id": tokenizer}
    assert info["model_name"] == run["base_model"] == name


async def test_a_configured_tokenizer_is_what_clients_are_told(serve: Api) -> None:
    async with serve(tokenizer_id="acme/tokenizer") as http:
        session, model = await created(http, "plain")
        info = (await http.post("get_info", json={"model_id": model})).json()
        wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "plain"}
        sampler = (await http.post("create_sampling_session", json=wanted)).json()["sampling_session_id"]
        told = (await http.get(f"samplers/{sampler}")).json()
    assert info["model_data"]["tokenizer_id"] == "acme/tokenizer"
    assert info["model_data"]["model_name"] == "plain"
    assert told["base_model"] == "acme/tokenizer"


@pytest.mark.parametrize("path", ["create_model", "create_sampling_session"])
async def test_another_base_model_is_refused_with_what_there_is(serve: Api, path: str) -> None:
    async with serve() as http:
        session = (await http.post("create_session", json={})).json()["session_id"]
        wanted = {"session_id": session, "model_seq_id": 0, "sampling_session_seq_id": 0, "base_model": "acme/other"}
        answer = await http.post(path, json=wanted)
    assert answer.status_code == 400
    assert answer.json()["field"] == "base_model"
    for name in NAMES:
        assert name in answer.json()["detail"]


async def _saved(http: httpx.AsyncClient, state_dir: Path, database: Database, base_model: str) -> str:
    """A named sampler save, of a model that was trained under this name."""
    _, model = await created(http, "acme/base")
    record = database.read(lambda c: find_model(c, model))
    assert record is not None
    adapter = AdapterVersion.of(model, 1)
    adapter_directory(state_dir, adapter).mkdir(parents=True)
    saved = Checkpoint(
        path=TinkerPath(model, "sampler_weights", "saved"),
        tenant=record.tenant,
        store_key=None,
        weights=adapter,
        base_model="acme/base",
        lora=record.lora,
        size_bytes=1,
        public=False,
        user_metadata=None,
        created_at=record.created_at,
        expires_at=None,
    )
    database.write(lambda c: put(c, saved))
    database.write(lambda c: c.execute(update(checkpoints).values(base_model=base_model)))
    return f"tinker://{model}/sampler_weights/saved"


async def test_weights_trained_under_one_name_are_sampled_from_under_another(
    tmp_path: Path, serve: Api, database: Database
) -> None:
    async with serve() as http:
        path = await _saved(http, tmp_path, database, "acme/base")
        session = (await http.post("create_session", json={})).json()["session_id"]
        wanted = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path, "base_model": "plain"}
        answer = await http.post("create_sampling_session", json=wanted)
    assert answer.status_code == 200, answer.text


async def test_weights_of_a_base_model_that_is_not_served_any_more_are_refused(
    tmp_path: Path, serve: Api, database: Database
) -> None:
    async with serve() as http:
        path = await _saved(http, tmp_path, database, "acme/earlier")
        session = (await http.post("create_session", json={})).json()["session_id"]
        wanted = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        answer = await http.post("create_sampling_session", json=wanted)
    assert answer.status_code == 400
    assert answer.json()["field"] == "model_path"
    assert "acme/earlier" in answer.json()["detail"]


@pytest.mark.parametrize("served", ["refuse", "cispo"])
async def test_a_session_is_warned_of_a_loss_that_is_computed_as_another(serve: Api, served: str) -> None:
    async with serve(losses={"stable_reinforce": served}) as http:
        answer = (await http.post("create_session", json={})).json()
    assert ("cispo" in answer.get("warning_message", "")) == (served == "cispo")
