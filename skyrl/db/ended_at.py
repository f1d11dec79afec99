"""The time at which a request ends, as SQL: unique on PostgreSQL, so that polls of several processes can read on."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class EndedAt(FunctionElement[float]):
    """When a request has ended, in seconds since the epoch. Its argument is the time by the process's own clock.

    SQLite takes the argument as it is: one process writes outcomes there. On PostgreSQL several processes may. There
    the time is later than that of every stored outcome, by at least the 1e-6 s that cursors tell apart. Write
    transactions run one by one, so a reader that has read up to some time has missed no outcome before it.
    """

    inherit_cache = True
    type = Float()


@compiles(EndedAt)
def _own_clock(element: EndedAt, compiler: Any, **options: Any) -> str:
    return compiler.process(element.clauses, **options)


@compiles(EndedAt, "postgresql")
def _after_all_others(element: EndedAt, compiler: Any, **options: Any) -> str:
    clock = compiler.process(element.clauses, **options)
    return f"greatest(CAST({clock} AS double precision), (SELECT max(completed_at) FROM futures) + 2e-6)"
