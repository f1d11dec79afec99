"""Races of order and endings that a client cannot hit on purpose: a session ends while a request is written or read, a
model fails while its commands wait for a missing number, a step fails before a crash."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_harness import WAIT_S, Harness, Trainer, asleep, until
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

import skyrl.api.routes.futures
from skyrl.api.app import create_app
from skyrl.api.server import open_services
from skyrl.api.services import Services
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.requests import Kind, NewRequest
from skyrl.base.types.weights import Scope
from skyrl.engine import model_ends
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db import futures as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import models
from tests.databases import make_tables

BASE = "acme/base"


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    """An API process without an engine."""
    config = ServerConfig(base_model=BASE, state_dir=tmp_path)  # pyright: ignore[reportCallIssue]
    database = Database(config.database)
    make_tables(database)
    database.close()
    async with open_services(Runtime(config, tmp_path, None, None)) as services:
        yield services


@pytest.fixture
async def http(services: Services) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(services), raise_app_exceptions=False)
    headers = {"X-API-Key": "tml-one"}
    async with httpx.AsyncClient(transport=transport, base_url="http://api/api/v1", headers=headers) as http:
        yield http


# A number that is never sent


async def test_commands_behind_a_missing_number_fail_if_the_model_cannot_be_created(harness: Harness) -> None:
    trainer = await Trainer.create(harness, create=False)
    waiting = await trainer.optim_step(5)
    await harness.queued(1)
    await trainer.outcome(await trainer.send(Kind.LOAD_WEIGHTS, 0, path="tinker://nobody/weights/nothing"))
    assert "not there any more" in ((await trainer.outcome(waiting)).error or "")
    assert harness.scheduler.waiting == 0
    late = await trainer.optim_step(9)
    assert "not there any more" in ((await trainer.outcome(late)).error or "")
    assert harness.scheduler.waiting == 0


async def test_a_command_read_while_its_session_ends_fails_at_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, other = await Trainer.create(harness), await Trainer.create(harness)
    for each in (trainer, other):
        await each.step(1)
    here, sent = asyncio.get_running_loop(), []
    end_sessions = model_ends.end_sessions

    async def one_more() -> None:
        sent.append(await trainer.optim_step(99))
        # this command makes the queue non-empty, so the log is not read from the start again
        await other.optim_step(99)
        await harness.parts.log.read()
        harness.parts.file_commands.start_ready()

    def end_and_one_more(database: Database, scope: Scope) -> Any:
        ended = end_sessions(database, scope)
        if ended.model_ids:
            asyncio.run_coroutine_threadsafe(one_more(), here).result()
        return ended

    monkeypatch.setattr(model_ends, "end_sessions", end_and_one_more)
    await harness.end(trainer.session)
    await until(lambda: bool(sent))
    assert "not there any more" in ((await trainer.outcome(sent[0])).error or "")
    assert harness.scheduler.waiting == 1


# A session that ends while a request is written


async def test_a_request_fails_if_its_session_ends_while_the_request_is_written(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has already settled the session's requests, so no process would settle this one later."""
    store = services.futures
    execute = store._writer.execute

    async def execute_and_close(statement: Any, values: Any) -> Any:
        if statement is rows.RECORD:
            store.drop_session("s1")
        return await execute(statement, values)

    monkeypatch.setattr(store._writer, "execute", execute_and_close)
    sample = NewRequest(Kind.EXTERNAL, "tenant", "s1", b"{}", sampling_session_id="s1:sample:0", sample_seq_id=1)
    request_id, new = await store.record(sample)
    assert not new, "it must not be started"
    outcome = await store.wait(request_id, "tenant", 5)
    assert outcome is not None
    assert outcome.error == "the session has ended"


# Repeated requests


async def test_a_repeated_unnamed_save_may_carry_another_session_number(http: httpx.AsyncClient) -> None:
    async def post(route: str, **body: Any) -> httpx.Response:
        return await http.post(route, json=body)

    session = (await post("create_session")).json()["session_id"]
    await post("create_model", session_id=session, model_seq_id=0, base_model=BASE)
    model = f"{session}:train:0"
    save = {"model_id": model, "seq_id": 1, "kind": "snapshot", "ttl_seconds": 60}
    first = await post("save_weights_for_sampler", **save, sampling_session_seq_id=3)
    again = await post("save_weights_for_sampler", **save, sampling_session_seq_id=4)
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    for change in ({"ttl_seconds": 61}, {"path": "named"}, {"user_metadata": {"a": "b"}}):
        other = await post("save_weights_for_sampler", **(save | change), sampling_session_seq_id=3)
        assert (other.status_code, other.json()["field"]) == (400, "seq_id"), change
    step = await post("optim_step", model_id=model, seq_id=1)
    assert step.status_code == 400, "a command of another kind is refused under the same number"


async def test_a_poll_that_ends_with_500_is_held_for_a_while(
    services: Services, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK polls again at once and without end. A database that is unreachable must not get this load as well."""

    async def away(*_: object) -> None:
        raise OSError("the database is away")

    monkeypatch.setattr(services.futures, "wait", away)
    monkeypatch.setattr(skyrl.api.routes.futures, "ERROR_HOLD_S", 0.2)
    started = time.monotonic()
    answer = await http.post("retrieve_future", json={"request_id": "r"})
    assert answer.status_code == 500
    assert time.monotonic() - started >= 0.2


# Steps that failed before a crash


async def test_a_refusal_that_could_not_be_written_is_written_later(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that were read with the refused one, and are queued, must not hide it."""
    closed, other = await Trainer.create(harness), await Trainer.create(harness)
    await other.step(1)
    harness.database.write(
        lambda c: c.execute(update(models).where(models.c.id == closed.model_id).values(status="closed"))
    )
    harness.scheduler.close_model(closed.model_id)
    engine = harness.engine
    engine._poll_due = float("inf")  # the loop sleeps until it is rung; its listener reads new commands
    engine.ring()
    await asleep(harness.parts.signals)
    refuse, failures = harness.parts.settlement.refuse, 1

    def fail_once(commands: Any, *why: Any) -> None:
        nonlocal failures
        if commands and failures:
            failures -= 1
            raise OperationalError(None, None, Exception("database is locked"))
        refuse(commands, *why)

    monkeypatch.setattr(harness.parts.settlement, "refuse", fail_once)
    refused = await closed.optim_step(1)
    waiting = await other.optim_step(9)  # its number 1 is never sent
    outcome = await harness.store.wait(refused, "tenant", WAIT_S)
    assert outcome is not None
    assert outcome.error is not None
    assert failures == 0
    assert harness.store.is_pending(waiting)
