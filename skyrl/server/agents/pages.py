"""Pages of a trajectory: its rows in a form, or its turns, as many as fit one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from skyrl.base.types.agents import AgentTurn
from skyrl.server.agents.export import FORMS, About, line
from skyrl.server.agents.rows import ends_of, rows_of
from skyrl.server.agents.tree import Tree

MAX_PAGE_BYTES = 64 * 2**20
"""Of a page of rows or turns, about: fewer are given if they are longer."""
BYTES_PER_TOKEN = 40
"""Of a token in a row as JSON, at most: its id, target, mask, advantage and logprob."""
BYTES_OF_A_RECORD = 6
"""Of routed experts in a row as JSON, for each byte that vLLM sends, at most."""


def page_of_rows(turns: Sequence[AgentTurn], about: About, form: str, offset: int, limit: int) -> dict[str, Any]:
    """The rows number `offset` and after of a session with these turns. `form` is one of `FORMS`."""
    tree = Tree()
    for turn in turns:
        tree.add(turn, about.session.keep_thinking)
    ends = ends_of(tree)
    left, fitting = MAX_PAGE_BYTES, 0
    for end in ends[offset : offset + limit]:
        records = sum(len(turn.routed_experts or b"") for turn in tree.path(end))
        left -= BYTES_PER_TOKEN * tree.length(end) + BYTES_OF_A_RECORD * records
        if left < 0 and fitting:
            break
        fitting += 1
    make = FORMS[form]
    return _page([make(row, about) for row in rows_of(tree, ends, offset, fitting)], len(ends), offset)


def page_of_turns(turns: Sequence[AgentTurn], offset: int, limit: int) -> dict[str, Any]:
    """The turns number `offset` and after, as lines of JSON."""
    lines: list[dict[str, Any]] = []
    size = 0
    for turn in turns[offset : offset + limit]:
        shown = line(turn)
        size += len(msgspec.json.encode(shown))
        if size > MAX_PAGE_BYTES and lines:
            break
        lines.append(shown)
    return _page(lines, len(turns), offset)


def _page(rows: list[dict[str, Any]], total: int, offset: int) -> dict[str, Any]:
    end = offset + len(rows)
    return {"rows": rows, "total": total, "next_offset": end if end < total else None}
