"""Several copy_weights requests with one X-Idempotency-Key at two API processes: one copy, one answer, no files left
over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from api_harness import BASE, Api
from sqlalchemy import insert, select

from skyrl.api.access import tenant_of_key
from skyrl.api.app import create_app
from skyrl.api.server import open_services
from skyrl.base.config.server import ServerConfig
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import models
from tests.postgres_server import ON_BOTH_SLOWLY

pytestmark = ON_BOTH_SLOWLY

SIZE = 1_000
KEY = {"X-Idempotency-Key": "once"}
WAIT_S = 60.0


@pytest.fixture
async def two(database: Database, tmp_path: Path) -> AsyncIterator[list[Api]]:
    """Two API processes of one server: each has its own services, application and locks."""
    async with AsyncExitStack() as running:
        apis = []
        for name in ("first", "second"):
            options: dict[str, Any] = {"base_model": BASE, "state_dir": tmp_path, "database_url": database.url}
            sockets = Path(running.enter_context(TemporaryDirectory(prefix="skyrl-test-")))
            runtime = Runtime(ServerConfig(**options), sockets, None, "key", name)
            services = await running.enter_async_context(open_services(runtime))
            transport = httpx.ASGITransport(create_app(services), raise_app_exceptions=False)
            client = httpx.AsyncClient(transport=transport, base_url="http://api", headers={"X-API-Key": "tml-one"})
            apis.append(Api(services, await running.enter_async_context(client)))
        yield apis


@pytest.fixture
async def session(two: list[Api]) -> str:
    return (await two[0].post("create_session", {})).json()["session_id"]


@pytest.fixture
def source(two: list[Api], session: str, database: Database) -> str:
    """A saved checkpoint of the tenant."""
    with two[0].services.checkpoint_store.writing("group/saved-1") as directory:
        (directory / "adapter_model.safetensors").write_bytes(b"x" * SIZE)
    lora = {"base_model": BASE, "lora_rank": 8, "lora_alpha": 32.0, "seed": 1}
    lora |= {"train_attn": True, "train_mlp": True, "train_unembed": True}
    owner, model_id = tenant_of_key("tml-one"), f"{session}:train:0"
    model = {"id": model_id, "session_id": session, "tenant": owner, "model_seq_id": 0, "status": "ready"}
    model |= {"sampler_version": 0, "next_seq": 0, "created_at": 1.0, "last_request_at": 1.0}
    saved = {"tenant": owner, "model_id": model_id, "kind": "weights", "name": "a", "store_key": "group/saved-1"}
    saved |= {"size_bytes": SIZE, "public": False, "created_at": 1.0}
    database.write(lambda c: c.execute(insert(models), model | lora) and c.execute(insert(checkpoints), saved | lora))
    return f"tinker://{model_id}/weights/a"


@pytest.fixture
def hold_first(two: list[Api], monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Returns a function that makes the first process copy its files and then wait. The function returns a handle,
    which tells when the files are copied and lets the process go on."""
    copied, go = threading.Event(), threading.Event()
    store = two[0].services.checkpoint_store
    copy = store.copy

    def copy_and_wait(*arguments: str) -> None:
        copy(*arguments)
        copied.set()
        assert go.wait(WAIT_S)

    monkeypatch.setattr(store, "copy", copy_and_wait)

    class HeldCopy:
        async def copied(self) -> None:
            assert await asyncio.to_thread(copied.wait, WAIT_S)

        def let_go(self) -> None:
            go.set()

    return HeldCopy


def copies_in(database: Database) -> list[str]:
    keyed = select(checkpoints.c.store_key).where(checkpoints.c.copy_key.is_not(None))
    return database.read(lambda c: list(c.execute(keyed).scalars()))


@pytest.mark.parametrize("destination", ["a project", "a session"])
async def test_a_repeated_request_at_another_process_gets_the_same_copy(
    two: list[Api],
    session: str,
    source: str,
    hold_first: Callable[[], Any],
    database: Database,
    destination: str,
) -> None:
    place = {"destination_project_id": "p"} if destination == "a project" else {"session_id": session}
    wanted = {"source_path": source, **place} | ({"model_seq_id": 3} if "session_id" in place else {})
    held = hold_first()
    slow = asyncio.create_task(two[0].post("copy_weights", wanted, **KEY))
    await held.copied()  # the files of the copy exist, its rows do not
    quick = await two[1].post("copy_weights", wanted, **KEY)
    held.let_go()
    answers = [quick, await slow, await two[0].post("copy_weights", wanted, **KEY)]
    assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
    assert len({answer.json()["tinker_path"] for answer in answers}) == 1
    assert len(copies_in(database)) == 1
    kept = {one.key for one in two[0].services.checkpoint_store.stored()}
    assert kept == {"group/saved-1", *copies_in(database)}, "the files of the losing copy are deleted"


async def test_a_repeated_request_gets_the_copy_that_was_recorded_meanwhile(
    two: list[Api], session: str, source: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process records the copy after the repeat has looked for it, so the model's number is taken by then."""
    wanted = {"source_path": source, "session_id": session, "model_seq_id": 3}
    made_by = two[1].services.copies.made_by
    answers: list[httpx.Response] = []

    async def look_too_early(copy_key: str) -> Any:
        found = await made_by(copy_key)
        if not answers:
            answers.append(await two[0].post("copy_weights", wanted, **KEY))
        return found

    monkeypatch.setattr(two[1].services.copies, "made_by", look_too_early)
    answers.append(await two[1].post("copy_weights", wanted, **KEY))
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    assert answers[0].json() == answers[1].json()
    assert len(copies_in(database)) == 1


async def test_a_copy_refused_after_copying_leaves_no_files(
    two: list[Api], session: str, source: str, hold_first: Callable[[], Any], database: Database
) -> None:
    """Two requests with different keys want the same number: one gets it."""
    wanted = {"source_path": source, "session_id": session, "model_seq_id": 3}
    held = hold_first()
    slow = asyncio.create_task(two[0].post("copy_weights", wanted, **KEY))
    await held.copied()
    quick = await two[1].post("copy_weights", wanted, **{"X-Idempotency-Key": "another"})
    held.let_go()
    refused = await slow
    assert (quick.status_code, refused.status_code) == (200, 400), refused.text
    assert refused.json()["field"] == "model_seq_id"
    kept = {one.key for one in two[0].services.checkpoint_store.stored()}
    assert kept == {"group/saved-1", *copies_in(database)}
