"""The time at which a request ends, as SQL: later than all stored ends, so that readers can continue from an end."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class EndedAt(FunctionElement[float]):
    """When a request has ended, in seconds since the epoch: the time of the writing process, or 2 µs after the latest
    stored end, whichever is later.

    Several processes write ends, and their clocks differ. Write transactions run one at a time, so later commits have
    later ends. A reader that has read all ends up to some time therefore misses none, and two ends never have the same
    cursor."""

    inherit_cache = True
    type = Float()


ENDED_AT_OF_MANY = "max(new_completed_at, (SELECT coalesce(max(completed_at), 0) FROM futures)) + 2e-6 * place"
"""`EndedAt` on SQLite for the rows of one statement of `RowStatement`, which come in rising order of
`new_completed_at`. SQLite reads the latest stored end once, before it changes any row, so the rows' places keep their
ends apart."""


@compiles(EndedAt, "sqlite")
def _ended_at_on_sqlite(element: EndedAt, compiler: Any, **options: Any) -> str:
    clock = compiler.process(element.clauses, **options)
    return f"max({clock}, (SELECT coalesce(max(completed_at), 0) + 2e-6 FROM futures))"


@compiles(EndedAt, "postgresql")
def _ended_at_on_postgresql(element: EndedAt, compiler: Any, **options: Any) -> str:
    clock = compiler.process(element.clauses, **options)
    return f"greatest(CAST({clock} AS double precision), (SELECT max(completed_at) FROM futures) + 2e-6)"
