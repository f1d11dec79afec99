"""Conditions of statements: that a row is in a `Scope`, that a checkpoint is live. A row without a model, or of a model
without a row, is in the scope that also has the names that nobody serves."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select, true

from skyrl.base.types.weights import Scope
from skyrl.storage.db.database import in_groups
from skyrl.storage.db.tables import CheckpointRow, ModelRow

_checkpoints: Any = CheckpointRow.__table__  # type: ignore[attr-defined]
_models: Any = ModelRow.__table__  # type: ignore[attr-defined]


def live() -> ColumnElement[bool]:
    """The condition that a checkpoint has not expired. It is no range of the index of `expires_at`, because nearly all
    checkpoints are live: SQLite would read them all by that index."""
    return func.coalesce(_checkpoints.c.expires_at, math.inf) > time.time()


def in_scope(base_model: ColumnElement[str], scope: Scope) -> ColumnElement[bool]:
    """Whether the row is in the scope, by its column with the name of a base model."""
    if scope.within is not None:
        return base_model.in_(sorted(scope.within))
    return base_model.not_in(sorted(scope.without)) if scope.without else true()


def model_in_scope(model_id: ColumnElement[str | None], scope: Scope) -> ColumnElement[bool]:
    """Whether the row is in the scope, by its column with the id of a model, which may be NULL."""
    if scope.is_everything:
        return true()
    named = select(_models.c.id).where(_models.c.id == model_id, _models.c.base_model.in_(_named(scope))).exists()
    return ~named if scope.has_rest else named


def models_in_scope(connection: Connection, model_ids: Iterable[str], scope: Scope) -> set[str]:
    """The ids among `model_ids` that are in the scope."""
    ids = set(model_ids)
    if scope.is_everything:
        return ids
    named = set[str]()
    for some in in_groups(sorted(ids)):
        query = select(_models.c.id).where(_models.c.id.in_(some), _models.c.base_model.in_(_named(scope)))
        named.update(connection.execute(query).scalars())
    return ids - named if scope.has_rest else named


def _named(scope: Scope) -> list[str]:
    return sorted(scope.without if scope.within is None else scope.within)
