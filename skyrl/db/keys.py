"""API keys that the operator makes: create, list, revoke; and those that hold, in the memory of an API process.

A key is `tml-<id>-<secret>`. The id is no secret: it is what a key is looked up by. Of the rest only a digest is kept.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from sqlalchemy import Connection, bindparam, func, insert, select, union_all, update

from skyrl.db import audit
from skyrl.db.database import Database
from skyrl.db.tables import ApiKeyRow, CheckpointRow, SessionRow
from skyrl.db.writer import GroupCommitWriter

api_keys = ApiKeyRow.__table__  # type: ignore[attr-defined]
sessions = SessionRow.__table__  # type: ignore[attr-defined]
checkpoints = CheckpointRow.__table__  # type: ignore[attr-defined]

Scope = Literal["train", "sample", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
ALL_SCOPES = frozenset[str](SCOPES)
MAX_KEYS = 10_000
"""Keys that are not revoked: all of them are in memory."""
MINUTE_S = 60
_PREFIX = "tml-"
_ID = slice(len(_PREFIX), len(_PREFIX) + 12)


class KeyRefused(ValueError):
    """A key that cannot be made or revoked; the message says why."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What there is to know of a key that was not revoked. Times: seconds since the epoch."""

    id: str
    digest: bytes
    tenant: str
    name: str
    scopes: frozenset[str]
    created_at: float
    expires_at: float | None

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time.time()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def known_tenant(connection: Connection, tenant: str) -> bool:
    """Whether a key, a session or a checkpoint is there of this tenant."""
    places = [select(table.c.tenant).where(table.c.tenant == tenant) for table in (api_keys, sessions, checkpoints)]
    return connection.execute(union_all(*places).limit(1)).first() is not None


def create(
    connection: Connection, *, tenant: str | None, name: str, scopes: Iterable[Scope], expires_at: float | None
) -> tuple[str, ApiKey]:
    """Make a key, of a new tenant if none is given. The text of the key is nowhere but in the answer.

    Raises KeyRefused when there are too many.
    """
    held = connection.execute(select(func.count()).where(api_keys.c.revoked_at.is_(None))).scalar_one()
    if held >= MAX_KEYS:
        raise KeyRefused(f"there are {held} keys, and at most {MAX_KEYS} are held: revoke some")
    key_id = secrets.token_hex(6)
    text = f"{_PREFIX}{key_id}-{secrets.token_urlsafe(32)}"
    ordered = [scope for scope in SCOPES if scope in set(scopes)]
    owner = tenant or secrets.token_hex(16)
    key = ApiKey(key_id, _digest(text), owner, name, frozenset(ordered), time.time(), expires_at)
    connection.execute(insert(api_keys), asdict(key) | {"scopes": ordered})
    audit.record(connection, owner, "key_created", key_id=key_id, name=name, scopes=ordered)
    return text, key


def revoke(connection: Connection, key_id: str) -> None:
    """Raises KeyRefused when there is no such key. One that is revoked stays as it is."""
    row = connection.execute(select(api_keys).where(api_keys.c.id == key_id)).first()
    if row is None:
        raise KeyRefused(f"no key {key_id!r}; `skyrl keys list` says which there are")
    if row.revoked_at is None:
        connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=time.time()))
        audit.record(connection, row.tenant, "key_revoked", key_id=key_id, name=row.name)


def listed(connection: Connection, tenant: str | None = None) -> list[Any]:
    """Rows of all keys, revoked ones too, oldest first; of one tenant if it is given."""
    query = select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)
    return list(connection.execute(query if tenant is None else query.where(api_keys.c.tenant == tenant)))


class Keys:
    """The keys that are not revoked, all in memory: whoever asks waits for no database.

    What another process changes is known after the next `refresh`. When the database cannot be read, what was read
    last holds."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self._database = database
        self._writer = writer
        self._held: dict[str, ApiKey] = {}
        self._used: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._held)

    async def refresh(self) -> None:
        """Read them again."""
        query = select(api_keys).where(api_keys.c.revoked_at.is_(None))
        rows = await self._database.read_async(lambda connection: list(connection.execute(query)))
        self._held = {
            row.id: ApiKey(
                row.id, row.digest, row.tenant, row.name, frozenset(row.scopes), row.created_at, row.expires_at
            )
            for row in rows
        }

    def find(self, text: str) -> ApiKey | None:
        """The key that this is, expired or not. Its digest is compared in constant time."""
        key = self._held.get(text[_ID])
        return key if key is not None and hmac.compare_digest(_digest(text), key.digest) else None

    def with_id(self, key_id: str) -> ApiKey | None:
        """The key that a token was made for, expired or not."""
        return self._held.get(key_id)

    def use(self, key: ApiKey) -> None:
        """It was just used."""
        self._used[key.id] = time.time() // MINUTE_S * MINUTE_S

    async def note_uses(self) -> None:
        """Write down in which minute keys were last used, those that were since the last call."""
        if not self._used:
            return
        used, self._used = self._used, {}
        values = [{"key": key_id, "at": at} for key_id, at in used.items()]
        earlier = api_keys.c.last_used_at.is_(None) | (
            api_keys.c.last_used_at < bindparam("at")
        )  # another may know more
        change = update(api_keys).where(api_keys.c.id == bindparam("key"), earlier).values(last_used_at=bindparam("at"))
        await self._writer.transact(lambda connection: connection.execute(change, values))

    async def revoke(self, key_id: str) -> None:
        """Revoke one; here at once."""
        await self._writer.transact(lambda connection: revoke(connection, key_id))
        self._held.pop(key_id, None)
