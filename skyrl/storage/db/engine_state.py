"""The single row of the table engine_state: the inference endpoint, whether the engine can train, the engine's
heartbeat, and which server has the claim to train on this database."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from skyrl.storage.db.tables import EngineStateRow

state = EngineStateRow.__table__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class EngineState:
    """The row. `generation` counts the published endpoints. `heartbeat_at` is in seconds since the epoch. `vocab_size`
    and `max_context` are in tokens."""

    inference_proxy_url: str | None = None
    generation: int = 0
    training_ready: bool = False
    reason: str = "the engine has not started"
    vocab_size: int | None = None
    max_context: int | None = None
    heartbeat_at: float = 0.0
    state_dir: str | None = None
    """Where the adapters' files are; see `publish_state_dir`."""
    activity: str | None = None
    """What the engine does, see `skyrl.base.types.activity`. From the last heartbeat of an engine, which may be
    gone."""


def read_state(connection: Connection) -> EngineState:
    """The state. If there is no row, the state of an engine that has not started."""
    row = connection.execute(select(state).where(state.c.id == 1)).first()
    if row is None:
        return EngineState()
    return EngineState(
        row.inference_proxy_url,
        row.generation,
        row.training_ready,
        row.reason,
        row.vocab_size,
        row.max_context,
        row.heartbeat_at,
        row.state_dir,
        row.activity,
    )


def _put(connection: Connection, **values: Any) -> None:
    if connection.execute(select(state.c.id).where(state.c.id == 1)).first() is None:
        connection.execute(insert(state), {"id": 1, "generation": 0, "training_ready": False, "reason": ""})
    connection.execute(update(state).where(state.c.id == 1).values(updated_at=time.time(), **values))


def publish_url(connection: Connection, url: str | None) -> None:
    """Store the inference endpoint; None means that there is none now. Each endpoint raises the generation by one."""
    before = read_state(connection)
    generation = before.generation + (1 if url is not None else 0)
    _put(connection, inference_proxy_url=url, generation=generation)


def publish_training(
    connection: Connection,
    *,
    ready: bool,
    reason: str,
    vocab_size: int | None = None,
    max_context: int | None = None,
) -> None:
    """Store whether the engine can train, the reason if it cannot, and the base model's limits if they are known."""
    values: dict[str, Any] = {"training_ready": ready, "reason": reason, "heartbeat_at": time.time()}
    if vocab_size is not None:
        values |= {"vocab_size": vocab_size, "max_context": max_context}
    _put(connection, **values)


def publish_state_dir(connection: Connection, state_dir: str | None) -> None:
    """Store the state directory of the server that trains. Gateways name adapters in it to their inference server. None
    if adapters are in the checkpoint store: gateways then name them by their keys."""
    _put(connection, state_dir=state_dir)


def beat(connection: Connection, activity: str | None = None) -> None:
    """Store the engine's heartbeat, and what the engine does."""
    _put(connection, heartbeat_at=time.time(), activity=activity)


@dataclass(frozen=True, slots=True)
class Claim:
    """The server that trains on this database, when it renewed the claim, and the engine's heartbeat (both in seconds
    since the epoch). While that server runs, one of the two changes every few seconds."""

    owner: str | None
    held_at: float | None
    heartbeat_at: float


def read_claim(connection: Connection) -> Claim:
    """The claim. Without an owner if there is no row."""
    row = connection.execute(select(state).where(state.c.id == 1)).first()
    return Claim(None, None, 0.0) if row is None else Claim(row.owner, row.held_at, row.heartbeat_at)


def claim(connection: Connection, owner: str, seen: Claim) -> bool:
    """Make `owner` the server that trains on this database. Returns False if another server has the claim and the claim
    is not equal to `seen`. If it is equal to `seen`, the caller has found that server dead, and `owner` takes over."""
    now = read_claim(connection)
    if now.owner not in (None, owner) and now != seen:
        return False
    clear(connection, "the engine is starting")
    _put(connection, owner=owner, held_at=time.time())
    return True


def hold(connection: Connection, owner: str) -> bool:
    """Renew the claim of `owner`. Returns False if another server has the claim."""
    renewal = update(state).where(state.c.owner == owner).values(held_at=time.time())
    return connection.execute(renewal).rowcount == 1


def owner(connection: Connection) -> str | None:
    """The server that has the claim to this database; None when no server has it."""
    return connection.execute(select(state.c.owner).where(state.c.id == 1)).scalar()


def release(connection: Connection, owner: str, reason: str) -> None:
    """Give up the claim of `owner`. Does nothing if another server has the claim."""
    if read_claim(connection).owner == owner:
        clear(connection, reason)
        _put(connection, owner=None, held_at=None)


def clear(connection: Connection, reason: str) -> None:
    """Store that no engine runs: no endpoint, no training, no heartbeat, no activity."""
    values = {"inference_proxy_url": None, "training_ready": False, "reason": reason, "heartbeat_at": 0.0}
    _put(connection, **values, activity=None)
