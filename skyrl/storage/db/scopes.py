"""`Scope` as a condition of a statement."""

from __future__ import annotations

from sqlalchemy import ColumnElement, true

from skyrl.base.types.scope import Scope


def in_scope(base_model: ColumnElement[str], scope: Scope) -> ColumnElement[bool]:
    """Whether the row is in the scope, by its column with the name of a base model."""
    if scope.within is not None:
        return base_model.in_(sorted(scope.within))
    return base_model.not_in(sorted(scope.without)) if scope.without else true()
