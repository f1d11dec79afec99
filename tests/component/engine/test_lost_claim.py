"""A server was stopped for a long time, and another server trains on its database. From then on the engine of the first
server writes nothing, deletes nothing, and ends."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_harness import SERVER, WAIT_S, Harness, Trainer, files_in, harness_in, until
from sqlalchemy import Table, select, update
from sqlmodel import SQLModel

from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion, FullWeights
from skyrl.engine.publishing import adopt_adapters
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db import claims
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.database import Database, Displaced, Fence, FencedDatabase, claim_owner
from skyrl.storage.db.engine_publisher import EngineStatePublisher
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.models import set_status
from skyrl.storage.db.sessions import sessions
from skyrl.storage.doorbell import SESSIONS, Doorbell
from tests.engine_process import claim_for_tests
from tests.postgres_server import ON_BOTH

LONG_AGO_S = 10 * 86_400.0


@pytest.fixture
async def harness(tmp_path: Path, migrated_url: str) -> AsyncIterator[Harness]:
    async with harness_in(tmp_path / "state", database_url=migrated_url) as harness:
        await harness.start()
        yield harness


def take_over(harness: Harness) -> None:
    """Another server claims the database, as it may when the first server has not renewed its claim for long."""
    claim_for_tests(harness.database, "another")


def rows_of(database: Database) -> dict[str, list[Any]]:
    """All rows of the database, by table."""
    tables: list[Table] = SQLModel.metadata.sorted_tables
    return database.read(lambda c: {t.name: sorted(map(repr, c.execute(select(t)))) for t in tables})


async def wait_until_displaced(harness: Harness) -> None:
    """Wait until the engine ends by itself because the claim is lost."""
    assert harness._running is not None
    with pytest.raises(Displaced, match="does not train on this database any more"):
        await asyncio.wait_for(harness._running, WAIT_S)
    harness._clear_engine()


async def save_checkpoint(trainer: Trainer) -> str:
    return (await trainer.do(Kind.SAVE_WEIGHTS, path="saved"))["path"]


async def pass_(trainer: Trainer, path: str) -> None:
    await trainer.forward_backward(2)


async def step(trainer: Trainer, path: str) -> None:
    await trainer.optim_step()


async def bad_request(trainer: Trainer, path: str) -> None:
    await trainer.send(Kind.OPTIM_STEP, adam_params={"beta1": 2.0})


async def load(trainer: Trainer, path: str) -> None:
    await trainer.send(Kind.LOAD_WEIGHTS, path=path)


async def save(trainer: Trainer, path: str) -> None:
    await trainer.send(Kind.SAVE_WEIGHTS, path="again")


async def export(trainer: Trainer, path: str) -> None:
    await trainer.send(Kind.SAVE_WEIGHTS_EXTERNAL, path="again")


async def named_adapter(trainer: Trainer, path: str) -> None:
    await trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="again")


async def unnamed_adapter(trainer: Trainer, path: str) -> None:
    await trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)


async def new_model(trainer: Trainer, path: str) -> None:
    await Trainer.create(trainer.harness, session=trainer.session, model_seq_id=1)


async def command_of_a_closed_model(trainer: Trainer, path: str) -> None:
    harness = trainer.harness
    other = await Trainer.create(harness, session=trainer.session, model_seq_id=1, create=False)
    harness.database.write(set_status(other.model_id, "closed"))
    await other.send(Kind.CREATE_MODEL, 0)


async def ended_session(trainer: Trainer, path: str) -> None:
    assert await trainer.harness.sessions.end(trainer.session, "finished", None, None)
    trainer.harness.engine.ring([SESSIONS])


WAYS_TO_GIVE_WORK: list[Callable[[Trainer, str], Awaitable[None]]] = [
    pass_,
    step,
    bad_request,
    load,
    save,
    export,
    named_adapter,
    unnamed_adapter,
    new_model,
    command_of_a_closed_model,
    ended_session,
]


@pytest.mark.parametrize("record_command", WAYS_TO_GIVE_WORK, ids=lambda record_command: record_command.__name__)
async def test_no_command_is_settled_after_the_claim_is_lost(
    harness: Harness, record_command: Callable[[Trainer, str], Awaitable[None]]
) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    path = await save_checkpoint(trainer)
    take_over(harness)
    ring, harness.engine.ring = harness.engine.ring, lambda words=(): None  # type: ignore[method-assign]
    await record_command(trainer, path)  # the API records the command, whichever server trains
    before = rows_of(harness.database)
    harness.engine.ring = ring  # type: ignore[method-assign]
    harness.engine.ring([SESSIONS])
    await wait_until_displaced(harness)
    assert rows_of(harness.database) == before


async def test_the_result_of_a_command_that_ran_while_the_claim_was_lost_is_refused(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    started, go, run = threading.Event(), threading.Event(), harness.backend.run

    def slow(passes: Any) -> Any:
        started.set()
        assert go.wait(WAIT_S)
        return run(passes)

    harness.backend.run = slow  # type: ignore[method-assign]
    request_id = await trainer.forward_backward(2)
    await until(started.is_set)
    take_over(harness)
    before = rows_of(harness.database)
    go.set()
    await wait_until_displaced(harness)
    assert rows_of(harness.database) == before
    take_back(harness)
    await harness.start()  # the server that holds the claim runs the command once
    await trainer.result(request_id)
    assert (await trainer.result(await trainer.optim_step()))["metrics"]["optimizer_step"] == 2


def take_back(harness: Harness) -> None:
    """Start this server anew with another engine. The claim was given up meanwhile."""
    harness.engine_database.close()
    harness.engine_database = FencedDatabase(harness.config.database, Fence(SERVER))


async def test_a_claim_that_another_server_took_and_gave_up_is_lost(harness: Harness) -> None:
    """The other server has trained in between, so the state in this engine's memory is old."""
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    take_over(harness)
    harness.database.write(lambda c: claims.release(c, "another", "the server has stopped"))
    await trainer.forward_backward(2)
    await wait_until_displaced(harness)


def make_old_directory(path: Path) -> Path:
    """A directory that was last changed long ago."""
    path.mkdir(parents=True)
    (path / "file").write_bytes(b"x")
    then = time.time() - LONG_AGO_S
    os.utime(path, (then, then))
    return path


async def test_no_file_is_deleted_after_the_claim_is_lost(harness: Harness) -> None:
    """Files that look unused to this server may belong to the server that holds the claim now."""
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await save_checkpoint(trainer)
    root = harness.config
    left = [
        make_old_directory(root.adapters_dir / "model" / "v000001"),
        make_old_directory(root.adapters_dir / ".tmp-0123456789abcdef"),
        make_old_directory(root.snapshots_dir / ".tmp-0123456789abcdef"),
        make_old_directory(root.checkpoints_dir / "model" / "nobodys-1"),
    ]
    closed = await Trainer.create(harness)
    harness.snapshots.take(trainer.model_id, trainer.seq_id + 1)
    left.append(make_old_directory(harness.snapshots.path(closed.model_id, 7)))
    await closed.outcome(await closed.send(Kind.FORWARD))
    expired = update(checkpoints).values(expires_at=time.time() - 1)
    harness.database.write(lambda c: c.execute(expired))
    harness.database.write(set_status(closed.model_id, "closed"))
    harness.parts.sweeper._deletable_at[AdapterVersion.of("model", 1)] = (
        0.0  # the adapter is unloaded, and its grace period is over
    )
    take_over(harness)
    before = rows_of(harness.database)
    kept = [files_in(path) for path in left]
    for delete in (harness.parts.sweeper._delete_leftovers, harness.parts.sweeper._sweep_store):
        with pytest.raises(Displaced):
            delete()
    with pytest.raises(Displaced):
        harness.parts.sweeper.delete_files()
    with pytest.raises(Displaced):
        harness.parts.sweeper.unused_adapters()
    await harness.sweep()
    await wait_until_displaced(harness)
    assert [files_in(path) for path in left] == kept
    assert all(kept)
    assert len(list(harness.checkpoint_store.stored())) == 2
    assert rows_of(harness.database) == before


@pytest.mark.parametrize("number", [4, 7], ids=["same", "later"])
async def test_no_snapshot_replaces_another_after_the_claim_is_lost(harness: Harness, number: int) -> None:
    """The server that holds the claim may have taken its snapshot at the same command."""
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    harness.snapshots.take(trainer.model_id, 4)
    await trainer.step(2)
    take_over(harness)
    before, snapshot = rows_of(harness.database), harness.snapshots.path(trainer.model_id, 4)
    kept = files_in(snapshot)
    with pytest.raises(Displaced):
        harness.snapshots.take(trainer.model_id, number)
    assert files_in(snapshot) == kept != {}
    assert rows_of(harness.database) == before


async def test_a_save_of_full_weights_replaces_no_version_after_the_claim_is_lost(
    tmp_path: Path, migrated_url: str
) -> None:
    """The server that holds the claim has written the files of the same version, and brings them to its vLLMs."""
    flags = {"database_url": migrated_url, "backend_config": {"trainer.full_finetuning": True}}
    async with harness_in(tmp_path / "state", **flags) as harness:
        await harness.start()
        trainer = await Trainer.create(harness, rank=0)
        await trainer.step(1)
        version = version_directory(harness.config.state_dir, FullWeights.of(trainer.model_id, 1))
        make_old_directory(version)
        kept = files_in(version)
        take_over(harness)
        await trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
        await wait_until_displaced(harness)
        assert files_in(version) == kept != {}


async def test_recovery_and_the_state_publisher_write_nothing_after_the_claim_is_lost(
    harness: Harness, tmp_path: Path
) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await save_checkpoint(trainer)
    await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, 5))
    await harness.stop()
    await harness.start()
    take_over(harness)
    before = rows_of(harness.database)
    with pytest.raises(Displaced):
        adopt_adapters(harness.config, harness.engine_database, harness.checkpoint_store)
    for path in harness.snapshots.path(trainer.model_id, 0).parent.iterdir():
        path.rename(tmp_path / path.name)  # the new server has another snapshot of this model
    harness.recovery._held.add(trainer.model_id)
    with pytest.raises(Displaced):
        await harness.recovery.retry()
    with pytest.raises(Displaced):
        harness.parts.settlement.settle([("anything", Outcome(b"{}"))])
    api, lost = Doorbell(tmp_path / "nobody.sock"), []
    state = EngineStatePublisher(harness.database, api, Fence(SERVER, lambda: lost.append(True)))
    await state.publish_url("http://127.0.0.1:1")
    state.training(ready=True, reason="")
    state.beat(None)
    state.clear("the engine has stopped")
    assert len(lost) == 4, "each refused write tells the engine to end"
    assert rows_of(harness.database) == before
    api.close()


@pytest.mark.parametrize("ray", [False, True], ids=["checkpoint", "adapter on a Ray cluster"])
async def test_a_late_save_of_a_displaced_engine_keeps_the_new_servers_files(
    tmp_path: Path, migrated_url: str, monkeypatch: pytest.MonkeyPatch, ray: bool
) -> None:
    """Both servers ran the same command and stored their files in the same checkpoint store."""
    flags = {"database_url": migrated_url, "checkpoint_store": f"file://{tmp_path}/shared"}
    if ray:
        flags["ray_address"] = "local"
    kind = Kind.SAVE_WEIGHTS_FOR_SAMPLER if ray else Kind.SAVE_WEIGHTS
    started, go = threading.Event(), threading.Event()
    async with harness_in(tmp_path / "first", **flags) as first, harness_in(tmp_path / "second", **flags) as second:
        first.engine_database.close()
        first.engine_database = FencedDatabase(migrated_url, Fence("first"))
        writing = first.checkpoint_store.writing

        def begin(key: str) -> Any:
            started.set()
            assert go.wait(WAIT_S)
            return writing(key)

        def save_with_a_mark(harness: Harness) -> None:
            for method in ("save_state", "save_adapter"):
                setattr(harness.backend, method, partial(marked, getattr(harness.backend, method)))

        def marked(save: Callable[..., None], model_id: str, directory: Path, **options: Any) -> None:
            save(model_id, directory, **options)
            (directory / "late").write_bytes(b"x")

        monkeypatch.setattr(first.checkpoint_store, "writing", begin)
        await first.start(save_with_a_mark)
        claim_for_tests(first.database, "first")
        trainer = await Trainer.create(first)
        await trainer.step(1)
        request_id = await trainer.send(kind, path="name")
        await until(started.is_set)
        await second.start()  # this start takes the claim
        await second.outcome(request_id)
        (row,) = second.checkpoint_rows(trainer.model_id)
        before = second.stored(row)
        go.set()
        await wait_until_displaced(first)
        assert second.checkpoint_rows(trainer.model_id) == [row]
        assert second.stored(row) == before != {}
        assert "late" not in before
        assert len(second.checkpoint_store.stored()) == 2, "the files of the first server have no row, and are swept"


async def test_a_save_that_finds_the_claim_lost_is_no_failed_save(
    tmp_path: Path, migrated_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with harness_in(tmp_path / "state", database_url=migrated_url, ray_address="local") as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.step(1)
        take_over(harness)
        request_id = await trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="name")
        await wait_until_displaced(harness)
        assert harness.checkpoint_store.stored() == []
        assert [record.getMessage() for record in caplog.records if request_id in record.getMessage()] == []


@ON_BOTH
def test_no_server_takes_the_claim_between_the_check_and_the_commit_of_a_write(migrated_url: str) -> None:
    """A write that has seen its own claim commits before another server gets the claim. A later write is refused."""
    other, engine = Database(migrated_url), FencedDatabase(migrated_url, Fence(SERVER))
    claim_for_tests(other, SERVER)
    seen: list[str | None] = []
    taking = threading.Thread(target=claim_for_tests, args=(other, "another"))

    def write(connection: Any) -> None:
        taking.start()
        taking.join(0.5)  # the take-over waits for this transaction, however long the transaction lasts
        seen.append(other.read(claim_owner))
        connection.execute(update(sessions).values(status="active"))

    engine.write(write)
    taking.join(WAIT_S)
    assert not taking.is_alive()
    assert seen == [SERVER]
    assert other.read(claim_owner) == "another"
    with pytest.raises(Displaced):
        engine.write(lambda c: c.execute(update(sessions).values(status="active")))
    engine.close()
    other.close()
