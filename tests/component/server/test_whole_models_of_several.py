"""An API process with two base models that are fine-tuned as a whole: each trains one model at a time, and replaces the
weights of its own samplers alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from api_harness import Api, sample_body
from sqlalchemy import update
from two_models import STUDENT, TEACHER, serving

from skyrl.base.types.weights import FullWeights
from skyrl.base.wire.paths import model_id_of
from skyrl.server.api.tokens import tenant_of_key
from skyrl.storage.db.adapter_versions import samplers
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import models
from skyrl.storage.db.samplers import Sampler, add_sampler

TENANT = tenant_of_key("tml-one")
WHOLE = {"backend_config": {"trainer.full_finetuning": True}}


@pytest.fixture
async def api(shared: Database, tmp_path: Path) -> AsyncIterator[Api]:
    async with serving(shared, tmp_path, [{"base_model": name} | WHOLE for name in (STUDENT, TEACHER)]) as api:
        yield api


async def create(api: Api, session_id: str, seq_id: int, base_model: str) -> Any:
    wanted = {"session_id": session_id, "model_seq_id": seq_id, "base_model": base_model, "lora_config": {"rank": 0}}
    return await api.post("create_model", wanted)


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
        loaded = api.services.served.of(name).lane.loaded
        assert loaded is not None
        assert await loaded.replaced(FullWeights.of(model_id, 2)) is None
        sampler = Sampler(f"{mine}:sample:{number}", mine, TENANT, name, None, FullWeights.of(model_id, 1))
        shared.write(lambda c, sampler=sampler, number=number: add_sampler(c, sampler, number))
        shared.write(lambda c: c.execute(update(samplers).values(status="dropped")))
        refused = await api.post("asample", sample_body(sampler.id, 0))
        assert refused.status_code == 404
        assert f"was replaced by version '{model_id}@2'" in refused.text
