"""The table engine_state, a row for each base model: the inference endpoint, whether the engine can train, and the
engine's heartbeat.

Each row has a key (`state_keys` in `skyrl.base.config.base_models`): empty for the only base model of a server."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from skyrl.storage.db.columns import record_of
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


ONLY = ""
"""The key of a server's only base model."""
ONLY_SAMPLED = "this base model is only sampled from"
"""The reason why a base model without an engine cannot be trained, while its vLLMs are not given up."""


def read_state(connection: Connection, keys: Sequence[str] = (ONLY,)) -> EngineState:
    """The state under the first of `keys` that has a row. If none has, the state of an engine that has not started."""
    row = _first(connection, keys, _READ)
    return EngineState() if row is None else record_of(EngineState, row)


def read_layers(connection: Connection, keys: Sequence[str] = (ONLY,)) -> str | None:
    """The layers that adapters can train, as `adapter_files.encode_targets` writes them; None while no engine has told
    them. Apart from the rest of the row, which is read every few seconds: for large models they are 100 kB."""
    row = _first(connection, keys, (state.c.base_model, state.c.layers))
    return None if row is None else row.layers


_READ = tuple(column for column in state.c if column.name != "layers")


def _first(connection: Connection, keys: Sequence[str], columns: Sequence[Any]) -> Any:
    found = connection.execute(select(*columns).where(state.c.base_model.in_(keys)))
    rows = {row.base_model: row for row in found}
    return next((rows[key] for key in keys if key in rows), None)


def _put(connection: Connection, key: str, **values: Any) -> None:
    same = state.c.base_model == key
    if connection.execute(select(state.c.base_model).where(same)).first() is None:
        connection.execute(insert(state), {"base_model": key, "generation": 0, "training_ready": False, "reason": ""})
    connection.execute(update(state).where(same).values(updated_at=time.time(), **values))


def publish_url(connection: Connection, url: str | None, key: str = ONLY) -> None:
    """Store the inference endpoint; None means that there is none now. Each endpoint raises the generation by one."""
    before = read_state(connection, (key,))
    generation = before.generation + (1 if url is not None else 0)
    _put(connection, key, inference_proxy_url=url, generation=generation)


def publish_training(
    connection: Connection,
    *,
    ready: bool,
    reason: str,
    vocab_size: int | None = None,
    max_context: int | None = None,
    layers: str | None = None,
    key: str = ONLY,
) -> None:
    """Store whether the engine can train, the reason if it cannot, and the base model's limits and layers if they are
    known."""
    values: dict[str, Any] = {"training_ready": ready, "reason": reason, "heartbeat_at": time.time()}
    if vocab_size is not None:
        values |= {"vocab_size": vocab_size, "max_context": max_context}
    if layers is not None:
        values["layers"] = layers
    _put(connection, key, **values)


def publish_state_dir(connection: Connection, state_dir: str | None, key: str = ONLY) -> None:
    """Store the state directory of the server that trains. Gateways name adapters in it to their inference server. None
    if adapters are in the checkpoint store: gateways then name them by their keys."""
    _put(connection, key, state_dir=state_dir)


def beat(connection: Connection, activity: str | None = None, key: str = ONLY) -> None:
    """Store the engine's heartbeat, and what the engine does."""
    _put(connection, key, heartbeat_at=time.time(), activity=activity)


def last_heartbeat(connection: Connection) -> float:
    """The newest heartbeat of any engine, in seconds since the epoch; 0 if no engine runs."""
    return max(connection.execute(select(state.c.heartbeat_at)).scalars(), default=0.0)


_NOTHING = {"inference_proxy_url": None, "training_ready": False, "heartbeat_at": 0.0, "activity": None}


def clear(connection: Connection, reason: str, key: str = ONLY) -> None:
    """Store that no engine runs for this base model: no endpoint, no training, no heartbeat, no activity."""
    _put(connection, key, reason=reason, **_NOTHING)


def clear_all(connection: Connection, reason: str) -> None:
    """The same for all base models."""
    connection.execute(update(state).values(reason=reason, updated_at=time.time(), **_NOTHING))


def keep_only(connection: Connection, keys: Collection[str], reason: str) -> None:
    """Clear all rows, make those that are missing, and delete those of base models that the server has not any more."""
    connection.execute(delete(state).where(state.c.base_model.not_in(keys)))
    for key in keys:
        clear(connection, reason, key)
