"""Pages of a trajectory: its rows in a form, or its turns, as many as fit one answer.

All pages are of the turns that the first page had: a turn that ends meanwhile would move rows from one page to another.
So a page's `next_offset` names those turns, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from skyrl.base.types.agents import AgentTurn
from skyrl.base.wire.errors import RequestError
from skyrl.server.agents.export import FORMS, About, line
from skyrl.server.agents.rows import ends_of, rows_of
from skyrl.server.agents.tree import Tree

MAX_PAGE_BYTES = 64 * 2**20
"""Of a page of rows or turns, about: fewer are given if they are longer."""
BYTES_PER_TOKEN = 40
"""Of a token in a row as JSON, at most: its id, target, mask, advantage and logprob."""
BYTES_OF_A_RECORD = 6
"""Of routed experts in a row as JSON, for each byte that vLLM sends, at most."""
_OFFSET = re.compile(r"(\d{1,9})(?:-(\d{1,9})-([0-9a-f]{16}))?")


@dataclass(frozen=True, slots=True)
class PageStart:
    """Where a page begins: with row or turn `offset` of the first `turns` turns of a session, whose digest is `digest`.
    Without `turns` the page is of all turns that there are."""

    offset: int = 0
    turns: int | None = None
    digest: str = ""

    @classmethod
    def read(cls, offset: str) -> PageStart:
        """From the field `offset` of a request: the `next_offset` of a page, or a number. Raises RequestError."""
        if (found := _OFFSET.fullmatch(offset)) is None:
            raise RequestError("must be the next_offset of a page, or a number", field="offset")
        return cls(int(found[1]), None if found[2] is None else int(found[2]), found[3] or "")

    def turns_of(self, turns: Sequence[AgentTurn], *, is_open: bool) -> Sequence[AgentTurn]:
        """The turns that the page is of. Raises RequestError 409 if they are not known."""
        if self.turns is None and self.offset and is_open:
            raise RequestError(
                "the session is open, so that its rows may have moved since the page before: ask with the next_offset "
                "of that page, or end the session first",
                field="offset",
                status=409,
            )
        if self.turns is None:
            return turns
        seen = turns[: self.turns]
        if len(seen) < self.turns or _digest(seen) != self.digest:
            raise RequestError(
                "the session has other turns than when the page before was read: begin again without an offset",
                field="offset",
                status=409,
            )
        return seen


def page_of_rows(turns: Sequence[AgentTurn], about: About, form: str, start: PageStart, limit: int) -> dict[str, Any]:
    """The rows from `start` on of a session with these turns. `form` is one of `FORMS`. Raises RequestError."""
    seen = start.turns_of(turns, is_open=about.session.ended_at is None)
    tree = Tree()
    for turn in seen:
        tree.add(turn, about.session.keep_thinking)
    ends = ends_of(tree)
    left, fitting = MAX_PAGE_BYTES, 0
    for end in ends[start.offset : start.offset + limit]:
        records = sum(len(turn.routed_experts or b"") for turn in tree.path(end))
        left -= BYTES_PER_TOKEN * tree.length(end) + BYTES_OF_A_RECORD * records
        if left < 0 and fitting:
            break
        fitting += 1
    make = FORMS[form]
    return _page([make(row, about) for row in rows_of(tree, ends, start.offset, fitting)], len(ends), start, seen)


def page_of_turns(turns: Sequence[AgentTurn], start: PageStart, limit: int, *, is_open: bool) -> dict[str, Any]:
    """The turns from `start` on, as lines of JSON. Raises RequestError."""
    seen = start.turns_of(turns, is_open=is_open)
    lines: list[dict[str, Any]] = []
    size = 0
    for turn in seen[start.offset : start.offset + limit]:
        shown = line(turn)
        size += len(msgspec.json.encode(shown))
        if size > MAX_PAGE_BYTES and lines:
            break
        lines.append(shown)
    return _page(lines, len(seen), start, seen)


def _page(rows: list[dict[str, Any]], total: int, start: PageStart, turns: Sequence[AgentTurn]) -> dict[str, Any]:
    end = start.offset + len(rows)
    following = f"{end}-{len(turns)}-{_digest(turns)}" if end < total else None
    return {"rows": rows, "total": total, "next_offset": following}


def _digest(turns: Sequence[AgentTurn]) -> str:
    return blake2b(" ".join(turn.id for turn in turns).encode(), digest_size=8).hexdigest()
