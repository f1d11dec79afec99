"""Uploads of adapters that are not finished: whose they are, what they will be, and when they end.

The files of an upload are in the checkpoint store under keys that follow from its id (`Upload.key`): the sweep keeps
them for as long as the row exists. Finishing turns the row into a checkpoint in one transaction. A row that has expired
counts as gone; the next sweep deletes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from sqlalchemy import Connection, delete, func, insert, select

from skyrl.base.adapter_files import PEFT_JSON, PEFT_TENSORS
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.base.wire.errors import NotFound, OverQuota
from skyrl.base.wire.paths import TinkerPath
from skyrl.storage.db import audit
from skyrl.storage.db.checkpoints import Checkpoint, Copy, add_with_model, made_by
from skyrl.storage.db.columns import plain_lora_of, plain_lora_values, record_of
from skyrl.storage.db.database import Database
from skyrl.storage.db.tables import UploadRow
from skyrl.storage.db.writer import GroupCommitWriter

uploads = UploadRow.__table__  # type: ignore[attr-defined]

UPLOAD_S = 3600.0
"""How long an upload may take. Its links are valid for as long."""
MAX_UNFINISHED = 8
"""Unfinished uploads of a tenant."""
FILES = (PEFT_JSON, PEFT_TENSORS)
_SESSION_TAG = "external_weights_upload"


@dataclass(frozen=True, slots=True)
class Upload:
    """`lora` is what the client has announced; the files say alpha. `most_bytes`: of the adapter's file. Times are in
    seconds since the epoch."""

    id: str
    tenant: str
    base_model: str
    lora: LoraSpec
    project_id: str | None
    most_bytes: int
    created_at: float
    expires_at: float

    def key(self, file: str) -> str:
        """Where the checkpoint store has one of FILES."""
        return _key(self.id, file)


def _key(upload_id: str, file: str) -> str:
    return f"upload-{upload_id}/{file}"


def _gone(upload_id: str) -> NotFound:
    return NotFound(f"no unfinished upload {upload_id!r}; an upload ends after {UPLOAD_S:.0f} s", field="upload_id")


def kept_keys(connection: Connection) -> set[str]:
    """The keys in the checkpoint store of unfinished uploads."""
    ids = connection.execute(select(uploads.c.id)).scalars()
    return {_key(upload_id, file) for upload_id in ids for file in FILES}


def drop_expired(connection: Connection) -> None:
    """Forget uploads that were not finished in time. Their files have no row then."""
    connection.execute(delete(uploads).where(uploads.c.expires_at <= time.time()))


class Uploads:
    """Starts, finds and finishes uploads."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer

    async def start(self, upload: Upload, check: Callable[[Connection], None] | None) -> None:
        """Raises OverQuota when the tenant has MAX_UNFINISHED of them, and what `check` raises."""

        def add(connection: Connection) -> None:
            drop_expired(connection)
            query = select(func.count()).select_from(uploads).where(uploads.c.tenant == upload.tenant)
            if connection.execute(query).scalar_one() >= MAX_UNFINISHED:
                raise OverQuota(
                    "uploads",
                    f"uploads: {MAX_UNFINISHED} are unfinished; finish one, or wait: each ends {UPLOAD_S:.0f} s after "
                    "its start",
                )
            if check is not None:
                check(connection)
            own = {name: getattr(upload, name) for name in ("id", "tenant", "base_model", "project_id", "most_bytes")}
            times = {"created_at": upload.created_at, "expires_at": upload.expires_at}
            connection.execute(insert(uploads), own | times | plain_lora_values(upload.lora))

        await self._writer.transact(add)

    async def find(self, upload_id: str, tenant: str | None) -> Upload:
        """An unfinished upload of the tenant; None: of any. Raises NotFound."""
        query = select(uploads).where(uploads.c.id == upload_id, uploads.c.expires_at > time.time())
        if tenant is not None:
            query = query.where(uploads.c.tenant == tenant)
        row = await self._database.read_async(lambda c: c.execute(query).first())
        if row is None:
            raise _gone(upload_id)
        return record_of(Upload, row, lora=plain_lora_of(row))

    async def finish(
        self, upload: Upload, made: Copy, alpha: float, size_bytes: int, check: Callable[[Connection], None] | None
    ) -> TinkerPath:
        """Record the checkpoint `made` whose files are stored, in place of the upload. Returns its path; that of an
        earlier call of the same upload if there was one. Raises NotFound, and what `check` raises."""
        checkpoint = Checkpoint(
            path=made.path,
            tenant=upload.tenant,
            store_key=made.store_key,
            weights=AdapterVersion.of(made.path.model_id, 1),
            base_model=upload.base_model,
            lora=replace(upload.lora, alpha=alpha),
            size_bytes=size_bytes,
            public=False,
            user_metadata=None,
            created_at=time.time(),
            expires_at=None,
        )

        def add(connection: Connection) -> TinkerPath:
            if made.copy_key is not None and (earlier := made_by(connection, made.copy_key)) is not None:
                return earlier
            if connection.execute(delete(uploads).where(uploads.c.id == upload.id)).rowcount == 0:
                raise _gone(upload.id)
            if check is not None:  # the upload itself counts no more
                check(connection)
            add_with_model(connection, made, checkpoint, _SESSION_TAG)
            details = {"tinker_path": str(made.path), "model_id": made.path.model_id}
            audit.record(connection, upload.tenant, "checkpoint_uploaded", **details)
            return made.path

        return await self._writer.transact(add)
