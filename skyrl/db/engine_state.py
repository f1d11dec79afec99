"""The engine_state singleton: where samples go, whether the engine can train, when it was last heard of."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from skyrl.db.tables import EngineStateRow

state = EngineStateRow.__table__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class EngineState:
    """One reading of the row. `generation` counts published endpoints."""

    inference_proxy_url: str | None = None
    generation: int = 0
    training_ready: bool = False
    reason: str = "the engine has not started"
    vocab_size: int | None = None
    max_context: int | None = None
    heartbeat_at: float = 0.0
    state_dir: str | None = None


def read_state(connection: Connection) -> EngineState:
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
    )


def _put(connection: Connection, **values: Any) -> None:
    if connection.execute(select(state.c.id).where(state.c.id == 1)).first() is None:
        connection.execute(insert(state), {"id": 1, "generation": 0, "training_ready": False, "reason": ""})
    connection.execute(update(state).where(state.c.id == 1).values(updated_at=time.time(), **values))


def publish_url(connection: Connection, url: str | None) -> None:
    """Write the inference endpoint; a new one raises the generation."""
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
    values: dict[str, Any] = {"training_ready": ready, "reason": reason, "heartbeat_at": time.time()}
    if vocab_size is not None:
        values |= {"vocab_size": vocab_size, "max_context": max_context}
    _put(connection, **values)


def publish_state_dir(connection: Connection, state_dir: str) -> None:
    """Say where the adapters of the server that trains lie: gateways tell their inference server."""
    _put(connection, state_dir=state_dir)


def beat(connection: Connection) -> None:
    _put(connection, heartbeat_at=time.time())


@dataclass(frozen=True, slots=True)
class Claim:
    """Whose engine it is, and two signs of its life, either of which changes every few seconds."""

    owner: str | None
    held_at: float | None
    heartbeat_at: float


def read_claim(connection: Connection) -> Claim:
    row = connection.execute(select(state).where(state.c.id == 1)).first()
    return Claim(None, None, 0.0) if row is None else Claim(row.owner, row.held_at, row.heartbeat_at)


def claim(connection: Connection, owner: str, seen: Claim) -> bool:
    """Be the server that trains on this database, from an engine that starts on. False if that is another one by now
    which is not the one that was `seen`, or which has given a sign of life since."""
    now = read_claim(connection)
    if now.owner not in (None, owner) and now != seen:
        return False
    clear(connection, "the engine is starting")
    _put(connection, owner=owner, held_at=time.time())
    return True


def hold(connection: Connection, owner: str) -> bool:
    """Say that the server that trains is still there. False if it is another one by now."""
    mine = state.c.owner == owner
    return connection.execute(update(state).where(mine).values(held_at=time.time())).rowcount == 1


def owner(connection: Connection) -> str | None:
    """The server that has claimed this database; None when nobody has."""
    return connection.execute(select(state.c.owner).where(state.c.id == 1)).scalar()


def release(connection: Connection, owner: str, reason: str) -> None:
    """Nobody trains on this database any more, unless it is another server by now."""
    if read_claim(connection).owner == owner:
        clear(connection, reason)
        _put(connection, owner=None, held_at=None)


def clear(connection: Connection, reason: str) -> None:
    """Nothing runs: no endpoint, no training."""
    _put(connection, inference_proxy_url=None, training_ready=False, reason=reason, heartbeat_at=0.0)
