"""An API process with two base models that are fine-tuned as a whole: each trains one model at a time, and replaces the
weights of its own samplers alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from api_harness import Api, sample_body
from sqlalchemy import select, update
from two_models import STUDENT, TEACHER, serving

from skyrl.api import session_life
from skyrl.api.access import tenant_of_key
from skyrl.base.types.weights import FullWeights
from skyrl.base.wire.paths import model_id_of
from skyrl.storage.db.adapter_versions import samplers
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import futures
from skyrl.storage.db.models import models
from skyrl.storage.db.samplers import Sampler, add_sampler
from skyrl.storage.db.sessions import sessions

TENANT = tenant_of_key("tml-one")
WHOLE = {"backend_config": {"trainer.full_finetuning": True}}


@pytest.fixture
async def api(shared: Database, tmp_path: Path) -> AsyncIterator[Api]:
    async with serving(shared, tmp_path, [{"base_model": name} | WHOLE for name in (STUDENT, TEACHER)]) as api:
        yield api


async def create(api: Api, session_id: str, seq_id: int, base_model: str) -> Any:
    wanted = {"session_id": session_id, "model_seq_id": seq_id, "base_model": base_model, "lora_config": {"rank": 0}}
    return await api.post("create_model", wanted)


async def test_a_whole_model_has_no_ranks_of_layers(api: Api) -> None:
    mine = (await api.post("create_session", {})).json()["session_id"]
    wanted = {"session_id": mine, "model_seq_id": 0, "base_model": STUDENT}
    refused = await api.post("create_model", wanted | {"lora_config": {"rank": 0, "rank_pattern": {"q_proj": 2}}})
    assert refused.status_code == 400
    assert refused.json()["detail"].startswith("lora_config.rank_pattern: this server trains whole models")


async def test_each_base_model_has_a_turn_of_its_own(api: Api) -> None:
    mine = (await api.post("create_session", {})).json()["session_id"]
    assert (await create(api, mine, 0, STUDENT)).status_code == 200
    refused = await create(api, mine, 1, STUDENT)
    assert refused.status_code == 400
    assert "your model" in refused.text
    assert (await create(api, mine, 2, TEACHER)).status_code == 200


async def test_new_weights_of_one_base_model_replace_none_of_another(api: Api, shared: Database) -> None:
    mine = (await api.post("create_session", {})).json()["session_id"]
    for number, name in enumerate((STUDENT, TEACHER)):
        await create(api, mine, number, name)
    shared.write(lambda c: c.execute(update(models).values(sampler_version=2)))
    for number, name in enumerate((STUDENT, TEACHER)):
        model_id = model_id_of(mine, number)
        current_weights = api.services.served.of(name).sampling.current_weights
        assert current_weights is not None
        assert await current_weights.replaced(FullWeights.of(model_id, 2)) is None
        sampler = Sampler(f"{mine}:sample:{number}", mine, TENANT, name, None, FullWeights.of(model_id, 1))
        shared.write(lambda c, sampler=sampler, number=number: add_sampler(c, sampler, number))
        shared.write(lambda c: c.execute(update(samplers).values(status="dropped")))
        refused = await api.post("asample", sample_body(sampler.id, 0))
        assert refused.status_code == 404
        assert f"was replaced by version '{model_id}@2'" in refused.text


@pytest.fixture
async def held(api: Api, shared: Database, monkeypatch: pytest.MonkeyPatch) -> str:
    """The session of a model that has the place. Its requests have ended, and its client sends no heartbeat. Clients
    count as gone after a short time."""
    for name, seconds in {"SILENT_S": 1.0, "WATCHED_S": 1.0, "LOOK_S": 0.05, "WAIT_S": 20.0}.items():
        monkeypatch.setattr(session_life, name, seconds)
    session = (await api.post("create_session", {})).json()["session_id"]
    assert (await create(api, session, 0, STUDENT)).status_code == 200
    shared.write(lambda c: c.execute(update(futures).values(status="done")))
    return session


async def create_beside(api: Api, shared: Database, **headers: str) -> tuple[Any, str]:
    """The answer to a model in a session of its own, and that session. There is no engine, so this ends the models of
    ended sessions."""
    session = (await api.post("create_session", {}, **headers)).json()["session_id"]
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": STUDENT, "lora_config": {"rank": 0}}
    asking = asyncio.create_task(api.post("create_model", wanted, **headers))
    over = select(sessions.c.id).where(sessions.c.status != "active")
    while not asking.done():
        await asyncio.sleep(0.05)
        shared.write(lambda c: c.execute(update(models).where(models.c.session_id.in_(over)).values(status="closed")))
    return await asking, session


def status_of(shared: Database, session: str) -> str:
    return shared.read(lambda c: c.execute(select(sessions.c.status).where(sessions.c.id == session)).scalar_one())


async def test_a_client_that_has_gone_gives_its_place_to_a_new_model_of_its_tenant(
    api: Api, shared: Database, held: str
) -> None:
    """So `tinker checkpoint download` works after a script that has not closed its session."""
    answer, mine = await create_beside(api, shared)
    assert answer.status_code == 200, answer.text
    assert (status_of(shared, held), status_of(shared, mine)) == ("expired", "active")


async def test_another_tenants_place_stays(api: Api, shared: Database, held: str) -> None:
    answer, _ = await create_beside(api, shared, **{"X-API-Key": "tml-two"})
    assert (answer.status_code, status_of(shared, held)) == (400, "active")


@pytest.mark.parametrize("still", ["a heartbeat", "a request"])
async def test_a_client_that_lives_keeps_its_place(api: Api, shared: Database, held: str, still: str) -> None:
    def change() -> None:
        if still == "a request":
            shared.write(lambda c: c.execute(update(futures).values(status="pending")))
        else:
            at = time.time()
            shared.write(lambda c: c.execute(update(sessions).where(sessions.c.id == held).values(heartbeat_at=at)))

    asyncio.get_running_loop().call_later(0.5, change)  # while the client is watched, on a slow machine too
    answer, _ = await create_beside(api, shared)
    assert (answer.status_code, status_of(shared, held)) == (400, "active")
    assert "is being trained now" in answer.text
