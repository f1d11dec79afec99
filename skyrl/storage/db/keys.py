"""API keys that the operator makes: create, list and revoke them; and the valid keys in the memory of an API process.

A key is `tml-<id>-<secret>`. The id is not secret, and finds the key. The database keeps only a digest of the key.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, Connection, func, insert, select, union_all, update

from skyrl.storage.db import audit
from skyrl.storage.db.tables import ApiKeyRow, CheckpointRow, SessionRow

api_keys = ApiKeyRow.__table__  # type: ignore[attr-defined]
sessions = SessionRow.__table__  # type: ignore[attr-defined]
checkpoints = CheckpointRow.__table__  # type: ignore[attr-defined]

Scope = Literal["train", "sample", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
ALL_SCOPES = frozenset[str](SCOPES)
MAX_KEYS = 10_000
"""The most keys that are neither revoked nor expired. Each API process holds them all in memory."""
_PREFIX = "tml-"
ID = slice(len(_PREFIX), len(_PREFIX) + 12)


class KeyRefused(ValueError):
    """A key cannot be made or revoked. The message says why."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its text. Times are in seconds since the epoch; `expires_at` None: never."""

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


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A key as the operator lists it, revoked ones too. `last_used_at` is the start of a minute, in seconds since the
    epoch."""

    key: ApiKey
    revoked_at: float | None
    last_used_at: float | None


def key_of(row: Any) -> ApiKey:
    return ApiKey(row.id, row.digest, row.tenant, row.name, frozenset(row.scopes), row.created_at, row.expires_at)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def known_tenant(connection: Connection, tenant: str) -> bool:
    """Whether the database has a key, a session or a checkpoint of this tenant."""
    places = [select(table.c.tenant).where(table.c.tenant == tenant) for table in (api_keys, sessions, checkpoints)]
    return connection.execute(union_all(*places).limit(1)).first() is not None


def unrevoked(expiry: float) -> ColumnElement[bool]:
    """Whether a key is not revoked, and expires after this time if it does."""
    return api_keys.c.revoked_at.is_(None) & (api_keys.c.expires_at.is_(None) | (api_keys.c.expires_at > expiry))


def create(
    connection: Connection, *, tenant: str | None, name: str, scopes: Iterable[Scope], expires_at: float | None
) -> tuple[str, ApiKey]:
    """Make a key; of a new tenant if `tenant` is None. Returns its text, which is stored nowhere, and the key.

    Raises KeyRefused when there are MAX_KEYS already.
    """
    held = connection.execute(select(func.count()).where(unrevoked(time.time()))).scalar_one()
    if held >= MAX_KEYS:
        raise KeyRefused(f"there are {held} keys, and at most {MAX_KEYS} are held: revoke some")
    key_id = secrets.token_hex(6)
    text = f"{_PREFIX}{key_id}-{secrets.token_urlsafe(32)}"
    ordered = [scope for scope in SCOPES if scope in set(scopes)]
    owner = tenant or secrets.token_hex(16)
    key = ApiKey(key_id, digest_of(text), owner, name, frozenset(ordered), time.time(), expires_at)
    connection.execute(insert(api_keys), asdict(key) | {"scopes": ordered})
    audit.record(connection, owner, "key_created", key_id=key_id, name=name, scopes=ordered)
    return text, key


def revoke(connection: Connection, key_id: str) -> None:
    """Revoke a key. A key that is revoked already stays as it is. Raises KeyRefused when there is no such key."""
    row = connection.execute(select(api_keys).where(api_keys.c.id == key_id)).first()
    if row is None:
        raise KeyRefused(f"no key {key_id!r}; `skyrl keys list` says which there are")
    if row.revoked_at is None:
        connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=time.time()))
        audit.record(connection, row.tenant, "key_revoked", key_id=key_id, name=row.name)


def listed(connection: Connection, tenant: str | None = None) -> list[ListedKey]:
    """All keys, revoked ones too, oldest first; only one tenant's if `tenant` is given."""
    query = select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)
    rows = connection.execute(query if tenant is None else query.where(api_keys.c.tenant == tenant))
    return [ListedKey(key_of(row), row.revoked_at, row.last_used_at) for row in rows]
