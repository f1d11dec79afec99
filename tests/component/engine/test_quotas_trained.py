"""Quotas with a real engine that trains and saves: a paused model goes on where it stopped, other models do not wait,
and a save beyond the tenant's storage quota harms nothing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoint_world import KEY, OTHER, World, rest_path, world_in
from engine_harness import Trainer, data, until
from sqlalchemy import select

from skyrl.api.access import tenant_of_key
from skyrl.base.types.requests import Kind
from skyrl.storage.db import quotas as rows
from skyrl.storage.db.futures import futures

MINE = tenant_of_key(KEY)


@dataclass
class Client:
    """A client that trains over HTTP, as the SDK does."""

    world: World
    key: str
    model_id: str
    seq_id: int = 0

    @classmethod
    async def create(cls, world: World, key: str) -> Client:
        session = await world.session(key)
        adapter = {"rank": 4, "seed": 3}
        wanted = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": adapter}
        return cls(world, key, (await world.post("create_model", wanted, key))["model_id"])

    async def send(self, path: str, **body: Any) -> str:
        self.seq_id += 1
        answer = await self.world.post(path, {"model_id": self.model_id, "seq_id": self.seq_id, **body}, self.key)
        return answer["request_id"]

    async def train(self, *lengths: int) -> str:
        """Send a pass and a step; returns the request id of the step."""
        given = {"data": data(self.seq_id, *lengths), "loss_fn": "cross_entropy"}
        await self.send("forward_backward", forward_backward_input=given)
        return await self.send("optim_step", adam_params={"learning_rate": 0.01})

    async def state(self) -> dict[str, bytes]:
        session = self.world.services.sessions
        found = await session.find(self.model_id.partition(":")[0], tenant_of_key(self.key))
        assert found is not None
        return await Trainer(self.world.harness, found, self.model_id).state()


async def change(world: World, **values: int | None) -> None:
    world.harness.database.write(lambda c: rows.change(c, MINE, values))
    await world.services.quotas.refresh()


def recorded(world: World, kind: Kind) -> list[Any]:
    columns = (futures.c.tenant, futures.c.status, futures.c.completed_at, futures.c.not_before)
    query = select(*columns).where(futures.c.kind == kind).order_by(futures.c.n)
    return world.harness.database.read(lambda c: list(c.execute(query)))


async def test_a_training_loop_over_its_quota_gives_the_same_results(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(world.services.quotas, "_clock", lambda: now)  # no tokens are added, however slow a request is
    await change(world, tokens_per_minute=600)
    paused, free = await Client.create(world, KEY), await Client.create(world, OTHER)
    for client in (paused, free):
        last = [await client.train(100, 200, 280), await client.train(30), await client.train(9)][-1]
        assert (await world.outcome(last, client.key)).error is None
    assert await paused.state() == await free.state()
    passes = recorded(world, Kind.FORWARD_BACKWARD)
    assert [row.not_before is not None for row in passes] == [False, True, True, False, False, False]
    assert all(row.completed_at >= row.not_before for row in passes if row.not_before is not None)


async def test_other_tenants_train_while_one_is_paused_even_after_a_restart(world: World) -> None:
    await change(world, tokens_per_minute=20)
    paused, free = await Client.create(world, KEY), await Client.create(world, OTHER)
    assert (await world.outcome(await paused.train(20))).error is None
    await paused.train(400)
    await paused.train(5)  # runs when the debt is paid, in some twenty minutes

    def step_waits() -> bool:
        return [row for row in recorded(world, Kind.OPTIM_STEP) if row.tenant == MINE][2].status == "pending"

    for _ in range(2):
        assert (await world.outcome(await free.train(20), OTHER)).error is None
        assert step_waits()
        await world.harness.stop()
        await world.harness.start()
    turns = 0
    start_due = world.harness.scheduler.start_due

    def count_turns(now: float) -> None:
        nonlocal turns
        turns += 1
        start_due(now)

    world.harness.scheduler.start_due = count_turns  # type: ignore[method-assign]
    assert (await world.outcome(await free.train(20), OTHER)).error is None
    await until(lambda: not world.harness.scheduler.has_work)
    before = turns
    for _ in range(5000):
        await asyncio.sleep(0)
    assert turns - before < 50, "the engine sleeps until the next model may run"
    await world.post(f"sessions/{paused.model_id.partition(':')[0]}/finish", {})
    # the engine writes that the step is cancelled, then forgets it
    await until(lambda: not step_waits() and world.harness.scheduler.next_start is None)


async def test_saves_beyond_the_stored_bytes_fail_and_harm_nothing(tmp_path: Path) -> None:
    async with world_in(tmp_path / "state", quota_stored_bytes=1) as world:
        trainer = await world.trainer()
        first = (await trainer.do(Kind.SAVE_WEIGHTS, path="first"))["path"]
        size = world.harness.checkpoint_rows(trainer.model_id)[0].size_bytes
        saves: list[tuple[Kind, dict[str, Any]]] = [
            (Kind.SAVE_WEIGHTS, {"path": "second"}),
            (Kind.SAVE_WEIGHTS_FOR_SAMPLER, {"path": "second"}),
            (Kind.SAVE_WEIGHTS_FOR_SAMPLER, {"sampling_session_seq_id": 0}),
            (Kind.SAVE_WEIGHTS_EXTERNAL, {"path": "second"}),
        ]
        for kind, body in saves:
            failed = await trainer.fails(kind, **body)
            assert failed.error_category == "user"
            assert (failed.error or "").startswith(
                f"over quota: this API key's tenant has {size} bytes of checkpoints and of weights saved for sampling, "
                "and may have 1: "
            )
        await trainer.step(1)
        await trainer.do(Kind.SAVE_WEIGHTS, path="first", overwrite=True)
        copy = {"source_path": first, "destination_project_id": "archive"}
        refused = await world.ask("POST", "copy_weights", copy)
        assert refused.status_code == 403
        assert "bytes of checkpoints" in refused.json()["detail"]
        other = await world.trainer(OTHER)
        await other.do(Kind.SAVE_WEIGHTS, path="theirs")
        assert (await world.ask("DELETE", rest_path(first))).status_code == 200
        await trainer.do(Kind.SAVE_WEIGHTS, path="second")
        world.harness.database.write(lambda c: rows.change(c, MINE, {"stored_bytes": -1}))
        await trainer.do(Kind.SAVE_WEIGHTS, path="third")


async def test_a_copy_must_fit_into_the_storage_quota(world: World) -> None:
    trainer = await world.trainer()
    source = (await trainer.do(Kind.SAVE_WEIGHTS, path="kept"))["path"]
    size = world.harness.checkpoint_rows(trainer.model_id)[0].size_bytes
    copy = {"source_path": source, "destination_project_id": "archive"}
    await change(world, stored_bytes=2 * size - 1)
    assert (await world.ask("POST", "copy_weights", copy)).status_code == 403
    assert len(world.harness.checkpoint_store.stored()) == 1, "no files were copied"
    await change(world, stored_bytes=2 * size)
    await world.post("copy_weights", copy)


@pytest.mark.parametrize("made_by", ["create_model", "load_weights"])
async def test_models_are_counted_however_they_are_created(world: World, made_by: str) -> None:
    trainer = await world.trainer()
    source = (await trainer.do(Kind.SAVE_WEIGHTS, path="kept"))["path"]
    await change(world, models=1)
    session = await world.session()
    wanted: dict[str, Any] = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    if made_by == "load_weights":
        wanted |= {"path": source, "optimizer": True}
    answer = await world.ask("POST", made_by, wanted)
    assert answer.status_code == 403
    assert "may have 1 in training, and has 1" in answer.json()["detail"]
    await world.harness.end(trainer.session)
    promise = await world.post(made_by, wanted)
    assert (await world.outcome(promise["request_id"])).error is None
