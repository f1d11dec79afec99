"""One base model under several names: the names that are served, the answers about them, and names that are refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from skyrl.api.app import create_app
from skyrl.api.server import open_services
from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.base.types.weights import AdapterVersion
from skyrl.base.wire.paths import TinkerPath
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db.checkpoints import Checkpoint, checkpoints, put
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import publish_training
from skyrl.storage.db.models import find_model
from tests.databases import make_tables, url_of

NAMES = ("acme/base", "acme/base-alias", "plain")
KEY = {"X-API-Key": "tml-one"}
Api = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(url_of(tmp_path))
    make_tables(database)
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


async def create_model(http: httpx.AsyncClient, base_model: str) -> tuple[str, str]:
    """Create a session and a model of that base model; returns their ids."""
    session = (await http.post("create_session", json={})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": base_model}
    answer = await http.post("create_model", json=body)
    assert answer.status_code == 200, answer.text
    return session, answer.json()["model_id"]


async def test_every_served_name_is_listed_with_its_context_and_capabilities(serve: Api) -> None:
    async with serve() as http:
        served = (await http.get("get_server_capabilities")).json()["supported_models"]
    facts = {"max_context_length": 4096, "trainable": True, "sampleable": True}
    assert served == [{"model_name": name} | facts for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
async def test_a_model_keeps_the_base_model_name_that_its_client_used(serve: Api, name: str) -> None:
    async with serve() as http:
        _, model = await create_model(http, name)
        info = (await http.post("get_info", json={"model_id": model})).json()
        run = (await http.get(f"training_runs/{model}")).json()
    # With a name without an organisation the client would look for the tokenizer on the model hub.
    tokenizer = name if "/" in name else str(model_path())
    assert info["model_data"] == {"model_name": name, "tokenizer_id": tokenizer}
    assert info["model_name"] == run["base_model"] == name


async def test_clients_get_the_configured_tokenizer(serve: Api) -> None:
    async with serve(tokenizer_id="acme/tokenizer") as http:
        session, model = await create_model(http, "plain")
        info = (await http.post("get_info", json={"model_id": model})).json()
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "plain"}
        sampler = (await http.post("create_sampling_session", json=body)).json()["sampling_session_id"]
        sampler_info = (await http.get(f"samplers/{sampler}")).json()
    assert info["model_data"]["tokenizer_id"] == "acme/tokenizer"
    assert info["model_data"]["model_name"] == "plain"
    assert sampler_info["base_model"] == "acme/tokenizer"


@pytest.mark.parametrize("path", ["create_model", "create_sampling_session"])
async def test_the_refusal_of_another_base_model_names_the_served_ones(serve: Api, path: str) -> None:
    async with serve() as http:
        session = (await http.post("create_session", json={})).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "sampling_session_seq_id": 0, "base_model": "acme/other"}
        answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["field"] == "base_model"
    for name in NAMES:
        assert name in answer.json()["detail"]


async def _save_trained_as(http: httpx.AsyncClient, state_dir: Path, database: Database, base_model: str) -> str:
    """Store a named sampler save of a model that was trained under the name `base_model`; returns its path."""
    _, model = await create_model(http, "acme/base")
    record = database.read(lambda c: find_model(c, model))
    assert record is not None
    adapter = AdapterVersion.of(model, 1)
    version_directory(state_dir, adapter).mkdir(parents=True)
    saved = Checkpoint(
        path=TinkerPath(model, "sampler_weights", "saved"),
        tenant=record.tenant,
        store_key=f"nowhere/{model}",
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


async def test_weights_trained_under_one_name_can_be_sampled_under_another(
    tmp_path: Path, serve: Api, database: Database
) -> None:
    async with serve() as http:
        path = await _save_trained_as(http, tmp_path, database, "acme/base")
        session = (await http.post("create_session", json={})).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path, "base_model": "plain"}
        answer = await http.post("create_sampling_session", json=body)
    assert answer.status_code == 200, answer.text


async def test_weights_of_a_base_model_that_is_no_longer_served_are_refused(
    tmp_path: Path, serve: Api, database: Database
) -> None:
    async with serve() as http:
        path = await _save_trained_as(http, tmp_path, database, "acme/earlier")
        session = (await http.post("create_session", json={})).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        answer = await http.post("create_sampling_session", json=body)
    assert answer.status_code == 400
    assert answer.json()["field"] == "model_path"
    assert "acme/earlier" in answer.json()["detail"]


@pytest.mark.parametrize("served", ["refuse", "cispo"])
async def test_a_new_session_is_warned_if_stable_reinforce_is_computed_as_cispo(serve: Api, served: str) -> None:
    async with serve(losses={"stable_reinforce": served}) as http:
        answer = (await http.post("create_session", json={})).json()
    assert ("cispo" in answer.get("warning_message", "")) == (served == "cispo")


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    """A directory with the configuration of a mixture of experts: the API reads nothing else of a base model."""
    directory = tmp_path / "mixture"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_local_experts": 8}))
    return str(directory)


OF_MIXTURES = "trainer.policy.model.lora.train_mlp_of_mixtures"


async def test_an_unchanged_script_gets_an_adapter_on_a_mixture(serve: Api, mixture: str) -> None:
    async with serve(base_model=mixture) as http:
        session = (await http.post("create_session", json={})).json()
        assert "warning_message" not in session
        body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "plain"}
        assert (await http.post("create_model", json=body | {"lora_config": {"rank": 32}})).status_code == 200


async def test_train_mlp_of_a_mixture_is_refused_at_once_with_what_to_send(serve: Api, mixture: str) -> None:
    async with serve(base_model=mixture, backend_config={OF_MIXTURES: "refuse"}) as http:
        session = (await http.post("create_session", json={})).json()
        assert "warning_message" not in session
        body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "plain"}
        for lora in (None, {"rank": 8}, {"rank": 8, "train_mlp": True}):
            answer = await http.post("create_model", json=body | {"lora_config": lora})
            assert (answer.status_code, answer.json()["field"]) == (400, "lora_config.train_mlp")
            assert "send train_mlp=False" in answer.json()["detail"]
            assert "train_mlp_of_mixtures" in answer.json()["detail"]
        body["lora_config"] = {"rank": 8, "train_mlp": False}
        assert (await http.post("create_model", json=body)).status_code == 200


async def test_the_operator_may_leave_out_the_experts_and_sessions_are_warned(serve: Api, mixture: str) -> None:
    async with serve(base_model=mixture, backend_config={OF_MIXTURES: "leave_out"}) as http:
        session = (await http.post("create_session", json={})).json()
        assert "leaves the experts as they are (metric experts_are_frozen:max)" in session["warning_message"]
        body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "plain"}
        assert (await http.post("create_model", json=body)).status_code == 200
    async with serve(backend_config={OF_MIXTURES: "leave_out"}) as http:
        assert "warning_message" not in (await http.post("create_session", json={})).json()
