"""Custom losses from the request that creates one to the passes that name it: stored, found, repeated, deleted."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_harness import Api
from engine_harness import Harness, Trainer, data
from sqlalchemy import select, update

from skyrl.base.types.custom_loss import MAX_LOSSES
from skyrl.base.types.loss_graph import encode_loss
from skyrl.base.types.requests import Kind
from skyrl.base.wire.paths import custom_loss_id_of
from skyrl.base.wire.requests import CustomLossBody
from skyrl.storage.db import custom_losses
from skyrl.storage.db.custom_losses import StoredLoss, losses
from skyrl.storage.db.database import Database
from skyrl.storage.db.sessions import sessions
from tests.unit.custom_losses import body_of, handle_of


def weighted(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/weighted:mean": loss}


BODY = body_of(handle_of(weighted, weights=1))


def store(harness: Harness, trainer: Trainer, seq_id: int = 0) -> str:
    loss_id = custom_loss_id_of(trainer.session.id, seq_id)
    body = encode_loss(msgspec.convert(BODY, CustomLossBody))
    loss = StoredLoss(loss_id, trainer.session.id, trainer.session.tenant, seq_id, body)
    harness.database.write(lambda c: custom_losses.add(c, loss))
    return loss_id


def named(loss_id: str, seed: int = 5) -> dict[str, Any]:
    given = {"data": data(seed, 9, 12), "loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}}
    return {"forward_backward_input": given}


async def test_passes_with_a_stored_loss_survive_a_death_to_the_last_bit(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    loss_id = store(harness, trainer)
    metrics = (await trainer.do(Kind.FORWARD_BACKWARD, **named(loss_id)))["metrics"]
    assert metrics["custom/weighted:mean"] * 2 == pytest.approx(metrics["loss:sum"], rel=1e-6)
    await trainer.result(await trainer.optim_step())
    await trainer.do(Kind.FORWARD_BACKWARD, **named(loss_id, 6))
    before = await trainer.state()
    await harness.crash()
    await harness.start()
    assert await trainer.state() == before


async def test_a_loss_belongs_to_its_session(harness: Harness) -> None:
    owner = await Trainer.create(harness)
    loss_id = store(harness, owner)
    for other in (await Trainer.create(harness), await Trainer.create(harness, tenant="other")):
        failed = await other.fails(Kind.FORWARD_BACKWARD, **named(loss_id))
        assert failed.error == f"loss_fn_config.loss_id: no custom loss {loss_id!r} in this session"
        assert failed.error_category == "user"
    await owner.do(Kind.FORWARD_BACKWARD, **named(loss_id))


async def test_a_loss_that_fails_is_the_clients_mistake_and_the_engine_goes_on(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    loss_id = store(harness, trainer)
    wrong = named(loss_id)
    del wrong["forward_backward_input"]["data"][1]["loss_fn_inputs"]["weights"]
    failed = await trainer.fails(Kind.FORWARD_BACKWARD, **wrong)
    assert failed.error is not None
    assert failed.error.startswith("data[1]: loss_fn_inputs.weights: missing; the custom loss 'weighted' takes it")
    assert failed.error_category == "user"
    await trainer.do(Kind.FORWARD_BACKWARD, **named(loss_id))


async def created(api: Api, session: str, seq_id: int = 0, **changes: Any) -> Any:
    return await api.post("create_custom_loss", BODY | {"session_id": session, "custom_loss_seq_id": seq_id} | changes)


async def test_the_answer_names_the_loss_and_a_repeat_names_the_same(api: Api) -> None:
    session = (await api.post("create_session", {})).json()["session_id"]
    for _ in range(2):
        answer = await created(api, session)
        result = await api.post("retrieve_future", {"request_id": answer.json()["request_id"]})
        assert result.json() == {"type": "create_custom_loss", "loss_id": f"{session}:loss:0"}
    other = await created(api, session, name="other")
    assert (other.status_code, other.json()["field"]) == (400, "custom_loss_seq_id")
    for number in range(1, MAX_LOSSES):
        assert (await created(api, session, number)).status_code == 200
    assert (await created(api, session, MAX_LOSSES)).json()["field"] == "session_id"
    config = (await api.post("client/config", {})).json()
    assert config["custom_loss_server_side"] is True


async def test_losses_are_deleted_after_their_session(api: Api, database: Database, tmp_path: Path) -> None:
    ended, living = [(await api.post("create_session", {})).json()["session_id"] for _ in range(2)]
    for session in (ended, living):
        await created(api, session)
    await api.post(f"sessions/{ended}/finish", {})
    await api.services.retention.sweep()

    def stored() -> set[str]:
        return {*database.read(lambda c: c.execute(select(losses.c.session_id)).scalars())}

    assert stored() == {ended, living}
    long_ago = time.time() - 25 * 3600
    database.write(lambda c: c.execute(update(sessions).values(ended_at=long_ago)))
    await api.services.retention.sweep()
    assert stored() == {living}
    assert json.loads(database.read(lambda c: c.execute(select(losses.c.body)).scalar_one()))["name"] == "weighted"
