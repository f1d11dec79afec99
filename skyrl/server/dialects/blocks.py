"""Cuts a chat completion into blocks: thinking, text, and calls of tools, one after the other.

Other dialects send an answer as a list of such blocks, of which one is open at a time. A chat completion has one text
and one thinking, and a list of calls; in a stream their pieces may come in any order. The blocks are in the order in
which the stream had their beginnings, so a text after a call becomes a block of its own. Joined, the blocks of a kind
are what the chat completion has.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from skyrl.server.dialects.chat_answer import Call, Function, Said, malformed

Kind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class Block:
    """`number` counts the blocks of an answer from 0. `call_id` and `name` are those of a call, whose `text` are its
    arguments."""

    kind: Kind
    number: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Step:
    """A block begins, gets `more` text, or ends."""

    what: Literal["begin", "more", "end"]
    block: Block
    more: str = ""


class Blocks:
    """Follows one answer. White space alone makes no block of thinking or text: models put some between thinking and
    calls, and Anthropic's own server refuses such a block. It is kept back until a text follows it."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._kept: dict[Kind, str] = {}
        self._calls: dict[int, Block] = {}

    def add(self, said: Said) -> list[Step]:
        """Raises RequestError for a call without a name, and for a call that goes on after it has ended."""
        steps = self._write("thinking", said.reasoning or "") + self._write("text", said.content or "")
        for place, call in enumerate(said.tool_calls or ()):
            steps += self._call(call, place if call.index is None else call.index)
        return steps

    def end(self) -> list[Step]:
        """The steps after the last piece."""
        return self._close()

    def _write(self, kind: Kind, text: str) -> list[Step]:
        text = self._kept.pop(kind, "") + text
        if self._open is not None and self._open.kind == kind:
            return self._extend(self._open, text)
        if not text or text.isspace():
            self._kept[kind] = text
            return []
        steps = self._begin(Block(kind, len(self.all)))
        return steps + self._extend(self.all[-1], text)

    def _call(self, call: Call, index: int) -> list[Step]:
        steps: list[Step] = []
        function = call.function or Function()
        block = self._calls.get(index)
        if block is None:
            if not function.name:
                raise malformed("a call of a tool begins without the tool's name")
            block = self._calls[index] = Block("call", len(self.all), _id_of(call), function.name)
            steps = self._begin(block)
        if more := function.arguments or "":
            if block is not self._open:
                raise malformed("a call of a tool goes on after another block has begun")
            steps += self._extend(block, more)
        return steps

    def _begin(self, block: Block) -> list[Step]:
        steps = self._close()
        self.all.append(block)
        self._open = block
        return [*steps, Step("begin", block)]

    def _extend(self, block: Block, text: str) -> list[Step]:
        if not text:
            return []
        block.pieces.append(text)
        return [Step("more", block, text)]

    def _close(self) -> list[Step]:
        block, self._open = self._open, None
        return [] if block is None else [Step("end", block)]


def _id_of(call: Call) -> str:
    """Clients name the id in the result of the call, so one is made where the inference server gives none."""
    return call.id or f"call_{os.urandom(12).hex()}"
