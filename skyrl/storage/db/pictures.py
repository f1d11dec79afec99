"""Pictures of requests: each file is stored once for a tenant, however many requests refer to it.

`PictureFiles` reads the files. Those that were read last stay in memory, with a bound in bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from threading import Lock
from typing import Any

import msgspec
from cachetools import LRUCache
from sqlalchemy import Connection, and_, bindparam, case, delete, exists, func, or_, select, text

from skyrl.base.pictures.picture import PictureFormat, Pictures
from skyrl.base.pictures.places import KnownPicture
from skyrl.base.wire.errors import FailedRequest, RequestError
from skyrl.storage.db.database import Database, in_groups
from skyrl.storage.db.futures import futures
from skyrl.storage.db.models import LIVING
from skyrl.storage.db.tables import ModelRow, PictureRow, PictureUseRow
from skyrl.storage.shares import is_over

pictures = PictureRow.__table__  # type: ignore[attr-defined]
uses = PictureUseRow.__table__  # type: ignore[attr-defined]
_models = ModelRow.__table__  # type: ignore[attr-defined]

KEEP_S = 600.0
"""How long a picture stays after its last use, so that clients can refer to it and need not send it again."""
RECORD_S = 60.0
"""The time in which a request is recorded after its pictures. The clocks of the processes may differ by seconds."""
RETRY_S = 5.0
FORGET_USES = 250
FORGET_PICTURES = 8
"""The most rows that one step of `forget` deletes. A picture may have many megabytes."""

_ADD = text(
    "INSERT INTO pictures (tenant, digest, format, width, height, error, size_bytes, last_used_at, data) "
    "VALUES (:tenant, :digest, :format, :width, :height, :error, :size_bytes, :now, :data) "
    "ON CONFLICT (tenant, digest) DO UPDATE SET last_used_at = excluded.last_used_at"
)
_USE = text(
    "INSERT INTO picture_uses (tenant, digest, request_id, created_at) VALUES (:tenant, :digest, :request_id, :now) "
    "ON CONFLICT DO NOTHING"
)
_TOUCH = text("UPDATE pictures SET last_used_at = :now WHERE tenant = :tenant AND digest = :digest")
_FOUND = select(pictures.c.digest, pictures.c.format, pictures.c.width, pictures.c.height, pictures.c.error).where(
    pictures.c.tenant == bindparam("tenant"), pictures.c.digest.in_(bindparam("digests", expanding=True))
)
_FILES = select(pictures.c.digest, pictures.c.data).where(
    pictures.c.tenant == bindparam("tenant"),
    pictures.c.digest.in_(bindparam("digests", expanding=True)),
    pictures.c.error.is_(None),
)


class CheckedFile(msgspec.Struct, frozen=True):
    """A file that was looked at, and what it is. `data` is empty if it is no picture."""

    known: KnownPicture
    data: bytes


def find(connection: Connection, tenant: str, digests: Collection[str]) -> dict[str, KnownPicture]:
    """Those of a tenant's pictures that are stored, by digest, without their files."""
    found: dict[str, KnownPicture] = {}
    for some in in_groups(digests):
        for row in connection.execute(_FOUND, {"tenant": tenant, "digests": some}):
            form: PictureFormat = "png" if row.format == "png" else "jpeg"
            found[row.digest] = KnownPicture(form, row.width, row.height, row.error)
    return found


def files(connection: Connection, tenant: str, digests: Collection[str]) -> dict[str, bytes]:
    """The files of those of a tenant's pictures that are stored, by digest."""
    found: dict[str, bytes] = {}
    for some in in_groups(digests):
        found |= {row.digest: row.data for row in connection.execute(_FILES, {"tenant": tenant, "digests": some})}
    return found


def keep(
    connection: Connection,
    tenant: str,
    request_id: str,
    digests: Collection[str],
    new: Mapping[str, CheckedFile],
    most_bytes: int,
) -> list[str]:
    """Note that a request refers to these pictures, and store those that are `new`. The request must be recorded within
    RECORD_S. Returns those that are neither new nor stored any more. Raises RequestError (429) if all pictures together
    would have more than `most_bytes`, or if the tenant has its share of them."""
    now = time.time()
    rows = [
        {"tenant": tenant, "digest": digest, "request_id": request_id, "now": now}
        for digest in sorted(digests)  # in a fixed order, so that two processes cannot deadlock
    ]
    lost: list[str] = []
    for row in rows:  # before there is room made, which would delete what nobody uses
        connection.execute(_USE, row)
        if not connection.execute(_TOUCH, row).rowcount and row["digest"] not in new:
            lost.append(row["digest"])
    _make_room(connection, tenant, sum(len(file.data) for file in new.values()), most_bytes, now)
    for row in rows:
        if (file := new.get(row["digest"])) is not None:
            known = msgspec.structs.asdict(file.known)
            connection.execute(_ADD, row | known | {"size_bytes": len(file.data), "data": file.data})
    return lost


def forget(connection: Connection, now: float) -> int:
    """Delete the uses of requests that have ended, and then pictures that nobody has used for KEEP_S: a few of them.
    Returns how many rows were deleted; 0 when none is left."""
    rows = connection.execute(_ended_uses(now).limit(FORGET_USES)).all()
    for row in rows:
        of_row = uses.c.tenant == row.tenant, uses.c.digest == row.digest, uses.c.request_id == row.request_id
        connection.execute(delete(uses).where(*of_row))
    return len(rows) or _delete_unused(connection, now - KEEP_S, FORGET_PICTURES)


def _make_room(connection: Connection, tenant: str, more: int, most_bytes: int, now: float) -> None:
    of_tenant = case((pictures.c.tenant == tenant, pictures.c.size_bytes), else_=0)
    sums = select(func.coalesce(func.sum(pictures.c.size_bytes), 0), func.coalesce(func.sum(of_tenant), 0))
    while more and _may_be_full(connection, more, most_bytes):
        stored, own = connection.execute(sums).one()
        is_full = stored + more > most_bytes
        if not is_full and not (own and is_over(own, most_bytes - stored)):
            return
        if forget(connection, now) or _delete_unused(connection, now - RECORD_S, FORGET_PICTURES):
            continue
        have = "have all" if is_full else f"of yours have {own} bytes, which is your share,"
        raise RequestError(
            f"the images of unfinished requests {have} of the {most_bytes} bytes that this "
            "server keeps for them (max_stored_image_bytes); send the request again later",
            status=429,
            retry_after_s=RETRY_S,
        )


def _may_be_full(connection: Connection, more: int, most_bytes: int) -> bool:
    """Whether the pictures' bytes must be added up. With 100,000 pictures that takes 13 ms; SQLite's file has more
    bytes than they. (PostgreSQL compresses them, so that its table may have fewer.)"""
    if connection.dialect.name != "sqlite":
        return True
    pages, size = (connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("page_count", "page_size"))
    return is_over(pages * size + more, most_bytes - pages * size - more)


def _ended_uses(now: float) -> Any:
    """Uses of requests that are not stored, or that have ended and are in their model's snapshot. Reads no column of a
    request that comes after its body, because SQLite would read the body, too."""
    recorded = exists().where(futures.c.id == uses.c.request_id)
    repeats = exists().where(
        _models.c.id == futures.c.model_id,
        _models.c.status.in_(LIVING),
        _models.c.next_seq <= futures.c.seq_id,
    )
    pending = futures.c.n.in_(select(futures.c.n).where(futures.c.status == "pending"))
    needed = recorded.where(or_(pending, repeats))
    expected = and_(uses.c.created_at >= now - RECORD_S, ~recorded)
    return select(uses.c.tenant, uses.c.digest, uses.c.request_id).where(~needed, ~expected).order_by(uses.c.created_at)


def _delete_unused(connection: Connection, used_before: float, most: int) -> int:
    used = exists().where(uses.c.tenant == pictures.c.tenant, uses.c.digest == pictures.c.digest)
    unused = select(pictures.c.tenant, pictures.c.digest).where(pictures.c.last_used_at < used_before, ~used)
    rows = connection.execute(unused.order_by(pictures.c.last_used_at).limit(most)).all()
    for row in rows:
        connection.execute(delete(pictures).where(pictures.c.tenant == row.tenant, pictures.c.digest == row.digest))
    return len(rows)


KEPT_BYTES = 256 * 2**20
"""The most bytes of files that a process keeps in memory."""


class PictureFiles:
    """The files of one process. Threads may share it."""

    def __init__(self, database: Database, kept_bytes: int = KEPT_BYTES) -> None:
        self._database = database
        self._kept: LRUCache[tuple[str, str], bytes] = LRUCache(kept_bytes, getsizeof=len)
        self._lock = Lock()

    def put(self, tenant: str, digest: str, data: bytes) -> None:
        """Keep a file in memory. One that is larger than all that may be kept is read from the database again."""
        with self._lock:
            if len(data) <= self._kept.maxsize:
                self._kept[tenant, digest] = data

    def read(self, tenant: str, digests: Collection[str]) -> dict[str, bytes]:
        """The files of those of a tenant's pictures that are stored, by digest."""
        found, missing = self._in_memory(tenant, digests)
        if missing:
            stored = self._database.read(lambda c: files(c, tenant, missing))
            for digest, data in stored.items():
                self.put(tenant, digest, data)
            found |= stored
        return found

    async def read_async(self, tenant: str, digests: Collection[str]) -> dict[str, bytes]:
        """`read`, on a thread if a file is not in memory."""
        found, missing = self._in_memory(tenant, digests)
        return found if not missing else await asyncio.to_thread(self.read, tenant, digests)

    async def of(self, pictures: Pictures) -> dict[str, bytes]:
        """The files of a request's pictures, by digest. Raises FailedRequest if one is not stored any more."""
        digests = {picture.digest for picture in pictures.placed}
        found = await self.read_async(pictures.tenant, digests)
        if len(found) < len(digests):
            raise FailedRequest("an image of this request is not stored any more")
        return found

    def _in_memory(self, tenant: str, digests: Collection[str]) -> tuple[dict[str, bytes], list[str]]:
        found: dict[str, bytes] = {}
        with self._lock:
            for digest in digests:
                if (data := self._kept.get((tenant, digest))) is not None:
                    found[digest] = data
        return found, [digest for digest in digests if digest not in found]
