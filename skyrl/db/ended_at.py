"""The time at which a request ends, as SQL: later than every other end, so that whoever reads ends can read on."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class EndedAt(FunctionElement[float]):
    """When a request has ended, in seconds since the epoch: what the clock of the writing process says, or 2 µs after
    the latest end that is stored, whichever is later.

    Several processes write ends, and their clocks differ. Write transactions run one at a time, so the ends have one
    order, in which they were committed, and cursors tell two ends apart. A reader that has read all ends up to a moment
    never misses one that is committed later."""

    inherit_cache = True
    type = Float()


@compiles(EndedAt, "sqlite")
def _ended_at_on_sqlite(element: EndedAt, compiler: Any, **options: Any) -> str:
    clock = compiler.process(element.clauses, **options)
    return f"max({clock}, (SELECT coalesce(max(completed_at), 0) + 2e-6 FROM futures))"


@compiles(EndedAt, "postgresql")
def _ended_at_on_postgresql(element: EndedAt, compiler: Any, **options: Any) -> str:
    clock = compiler.process(element.clauses, **options)
    return f"greatest(CAST({clock} AS double precision), (SELECT max(completed_at) FROM futures) + 2e-6)"
