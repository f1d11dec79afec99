"""Pictures in the database: stored once for a tenant, kept while a request needs them, and bounded in bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import delete, update

from skyrl.base.pictures.picture import digest_of
from skyrl.base.pictures.places import KnownPicture
from skyrl.base.wire.errors import RequestError
from skyrl.storage.db import futures as future_rows
from skyrl.storage.db import pictures as rows
from skyrl.storage.db.database import Connection, Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.pictures import CheckedFile, PictureFiles
from skyrl.storage.db.tables import ModelRow

MOST = 1000
models: Any = ModelRow.__table__  # type: ignore[attr-defined]


@pytest.fixture
def database(migrated_url: str) -> Iterator[Database]:
    database = Database(migrated_url)
    yield database
    database.close()


def file(content: bytes) -> tuple[str, CheckedFile]:
    return digest_of(content), CheckedFile(KnownPicture("png", 3, 4), content)


def keep(database: Database, request_id: str, *contents: bytes, tenant: str = "a", new: bool = True) -> list[str]:
    found = dict(file(content) for content in contents)
    return database.write(lambda c: rows.keep(c, tenant, request_id, found, found if new else {}, MOST))


def stored(database: Database, *contents: bytes, tenant: str = "a") -> list[bytes]:
    digests = [digest_of(content) for content in contents]
    found = database.read(lambda c: rows.files(c, tenant, digests))
    return [content for content in contents if digest_of(content) in found]


def record(database: Database, request_id: str, **columns: Any) -> None:
    values = dict.fromkeys(future_rows.RECORD.parameters) | {
        "id": request_id,
        "kind": "EXTERNAL",
        "tenant": "a",
        "session_id": "s",
        "digest": b"d",
        "body": b"b",
        "body_format": "json",
        "status": "pending",
        "created_at": time.time(),
    }
    database.write(lambda c: future_rows.RECORD.execute(c, [values | columns]))


def end(database: Database, request_id: str) -> None:
    outcome = future_rows.settlement(request_id, Outcome(b"r"), time.time())
    database.write(lambda c: future_rows.SETTLE.execute(c, [outcome]))


def forget(database: Database, in_s: float) -> None:
    """Everything that may be forgotten after so many seconds."""
    while database.write(lambda c: rows.forget(c, time.time() + in_s)):
        pass


def uses(database: Database) -> int:
    return database.read(lambda c: c.exec_driver_sql("SELECT count(*) FROM picture_uses").scalar_one())


def count(database: Database) -> int:
    return database.read(lambda c: c.exec_driver_sql("SELECT count(*) FROM pictures").scalar_one())


def test_many_requests_with_one_picture_store_one_file(database: Database) -> None:
    for number in range(16):
        keep(database, f"r{number}", b"x" * 100)
    assert (count(database), uses(database)) == (1, 16)
    known = database.read(lambda c: rows.find(c, "a", [digest_of(b"x" * 100), "0" * 64]))
    assert known == {digest_of(b"x" * 100): KnownPicture("png", 3, 4)}


def test_a_tenant_leaves_room_for_the_pictures_of_others(database: Database) -> None:
    for number in range(8):
        keep(database, f"r{number}", bytes([number]) * 112)
        record(database, f"r{number}")
    with pytest.raises(RequestError, match="of yours have 896 bytes, which is your share,") as refused:
        keep(database, "r8", b"x" * 50)
    assert "(max_stored_image_bytes)" in refused.value.message
    keep(database, "r9", b"y" * 100, tenant="b")
    assert stored(database, b"y" * 100, tenant="b") == [b"y" * 100]


def test_a_tenant_does_not_see_the_pictures_of_another(database: Database) -> None:
    keep(database, "r", b"x", tenant="a")
    assert stored(database, b"x", tenant="a") == [b"x"]
    assert stored(database, b"x", tenant="b") == []


def test_a_file_that_is_no_picture_is_known_by_its_fault_and_not_stored(database: Database) -> None:
    bad = {"0" * 64: CheckedFile(KnownPicture("png", error="is cut off"), b"")}
    database.write(lambda c: rows.keep(c, "a", "r", bad, bad, MOST))
    assert database.read(lambda c: rows.find(c, "a", bad)) == {"0" * 64: KnownPicture("png", error="is cut off")}
    assert database.read(lambda c: rows.files(c, "a", bad)) == {}


def test_a_picture_stays_while_its_request_is_pending(database: Database) -> None:
    keep(database, "r", b"x")
    record(database, "r")
    forget(database, in_s=10 * rows.KEEP_S)
    assert stored(database, b"x") == [b"x"]
    end(database, "r")
    forget(database, in_s=0)
    assert uses(database) == 0
    assert stored(database, b"x") == [b"x"]  # it was used a moment ago
    forget(database, in_s=rows.KEEP_S + 1)
    assert count(database) == 0


def test_a_picture_stays_while_recovery_would_repeat_its_command(database: Database) -> None:
    def add_model(connection: Connection) -> None:
        flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
        ids = {"id": "m", "session_id": "s", "tenant": "a", "model_seq_id": 0, "base_model": "b", "status": "ready"}
        numbers = {"lora_rank": 8, "lora_alpha": 1.0, "seed": 0, "created_at": 0.0, "last_request_at": 0.0}
        connection.exec_driver_sql(
            "INSERT INTO sessions (id, tenant, status, created_at, heartbeat_at, sdk_version, tags) "
            "VALUES ('s', 'a', 'active', 0, 0, '', '[]')"
        )
        connection.execute(models.insert().values(**ids, **numbers, **flags, next_seq=5))

    database.write(add_model)
    for seq_id in (4, 5):
        keep(database, f"r{seq_id}", b"%d" % seq_id)
        record(database, f"r{seq_id}", kind="FORWARD_BACKWARD", model_id="m", seq_id=seq_id)
        end(database, f"r{seq_id}")
    forget(database, in_s=rows.KEEP_S + 1)
    assert stored(database, b"4", b"5") == [b"5"]  # command 4 is in the snapshot
    database.write(lambda c: c.execute(update(models).values(next_seq=6)))
    forget(database, in_s=rows.KEEP_S + 1)
    assert count(database) == 0


def test_a_use_waits_for_its_request_to_be_recorded(database: Database) -> None:
    keep(database, "never recorded", b"x")
    forget(database, in_s=rows.RECORD_S / 2)
    assert uses(database) == 1
    forget(database, in_s=rows.RECORD_S + 1)
    assert uses(database) == 0


def test_another_use_of_a_picture_keeps_it(database: Database) -> None:
    keep(database, "r1", b"x")
    record(database, "r1")
    end(database, "r1")
    keep(database, "r2", b"x", new=False)
    record(database, "r2")
    forget(database, in_s=rows.KEEP_S + 1)
    assert stored(database, b"x") == [b"x"]


def test_the_bound_makes_room_and_refuses_only_what_running_requests_leave_no_room_for(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "RECORD_S", -1.0)  # as if a minute had gone by
    for name in ("r1", "r2"):
        keep(database, name, name.encode() * 200)
        record(database, name)
    with pytest.raises(RequestError) as refused:
        keep(database, "r3", b"z" * 300)
    assert (refused.value.status, refused.value.retry_after_s) == (429, rows.RETRY_S)
    assert stored(database, b"r1" * 200, b"r2" * 200) == [b"r1" * 200, b"r2" * 200]
    end(database, "r1")
    keep(database, "r3", b"z" * 300)
    assert stored(database, b"r1" * 200, b"r2" * 200, b"z" * 300) == [b"r2" * 200, b"z" * 300]


def test_making_room_spares_what_the_same_request_uses(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RECORD_S", 0.0)
    keep(database, "old", b"x" * 600)
    found = dict([file(b"x" * 600), file(b"y" * 600)])
    new = dict([file(b"y" * 600)])
    with pytest.raises(RequestError):
        database.write(lambda c: rows.keep(c, "a", "both", found, new, MOST))
    assert stored(database, b"x" * 600) == [b"x" * 600]


def test_a_picture_that_was_deleted_since_it_was_looked_up_is_named(database: Database) -> None:
    keep(database, "r1", b"x")
    assert keep(database, "r2", b"x", b"y", new=False) == [digest_of(b"y")]


def test_files_are_read_once_and_kept_within_their_bound(database: Database) -> None:
    keep(database, "r", b"x" * 60, b"y" * 60)
    files = PictureFiles(database, kept_bytes=100)
    digests = [digest_of(b"x" * 60), digest_of(b"y" * 60)]
    assert files.read("a", digests) == {digests[0]: b"x" * 60, digests[1]: b"y" * 60}
    database.write(lambda c: c.execute(delete(rows.pictures)))
    assert files.read("a", digests) == {digests[1]: b"y" * 60}  # there is room for one
    files.put("a", digests[0], b"x" * 101)
    assert files.read("a", digests[:1]) == {}  # more than is kept


async def test_files_in_memory_are_read_without_a_thread(database: Database) -> None:
    keep(database, "r", b"x")
    files = PictureFiles(database)
    assert await files.read_async("a", [digest_of(b"x")]) == {digest_of(b"x"): b"x"}
    database.close()
    assert await files.read_async("a", [digest_of(b"x")]) == {digest_of(b"x"): b"x"}
    assert await files.read_async("b", []) == {}
