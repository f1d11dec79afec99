"""Turns as a server makes them, without one: a sampler that splits texts into tokens at random, and a tree."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl.base.types.agents import AgentTurn, VersionSpan
from skyrl.chat.agents.tree import Tree, request_key

END = 1
"""Ends an answer."""


@dataclass
class Said:
    """What was really asked and sampled: the oracle's line of a turn."""

    setting: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    context: list[int]
    sampled: list[int]
    logprobs: list[float]


@dataclass
class Sampler:
    """The answer to a request is told by the caller; its tokens are made up. No two sampled tokens have one logprob."""

    random: random.Random = field(default_factory=lambda: random.Random(0))
    tree: Tree = field(default_factory=Tree)
    keep_thinking: bool = False
    said: list[Said] = field(default_factory=list)

    def ask(
        self,
        messages: Sequence[dict[str, Any]],
        answer: dict[str, Any] | str = "yes",
        *,
        setting: dict[str, Any] | None = None,
        finish: str = "stop",
        **options: Any,
    ) -> AgentTurn:
        """Answer a request, and put the turn into the tree."""
        place = self.tree.place(setting or {}, messages, self.keep_thinking)
        told = None if place.parent is None else self.said[int(place.parent.id[1:])]
        before = [] if told is None else told.context + told.sampled
        added = self.ids(place.new)
        ids = self.ids([answer])
        if finish == "stop":
            ids = np.append(ids, np.int32(END))
        logprobs = -np.arange(self.tree.tokens + 1, self.tree.tokens + len(ids) + 1, dtype=np.float32)
        key = request_key(place.prefix, options)
        turn = AgentTurn(
            id=f"t{len(self.tree)}",
            session_id="s",
            parent=None if place.parent is None else place.parent.id,
            key=key,
            attempt=len(self.tree.answered(key)),
            messages=place.new,
            setting={} if place.parent is not None else setting or {},
            added=added,
            sampled=ids,
            logprobs=logprobs,
            versions=(VersionSpan(0, "v1"),),
            answer=answer if isinstance(answer, dict) else {"role": "assistant", "content": answer},
            finish_reason=finish,
            stop_reason=None,
            usage={"prompt": len(before) + len(added), "cached": 0, "sampled": len(ids)},
            dialect="chat",
            created_at=float(len(self.tree)),
            ended_at=float(len(self.tree)),
            fork=place.fork,
            forked_at=place.forked_at,
        )
        context = [*before, *added.tolist()]
        self.said.append(Said(setting or {}, list(messages), context, ids.tolist(), logprobs.tolist()))
        self.tree.add(turn, self.keep_thinking)
        return turn

    def ids(self, parts: Sequence[Any]) -> NDArray[np.int32]:
        """Each text is split anew: the same text seldom has the same tokens twice."""
        text, ids = "".join(map(str, parts)), list[int]()
        while text:
            size = self.random.randint(1, 6)
            ids.append(2 + zlib.crc32(text[:size].encode()) % 50_000)
            text = text[size:]
        return np.array(ids, np.int32)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def result(text: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def call(arguments: Any, name: str = "add", call_id: str = "c1") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return said(None, tool_calls=[{"id": call_id, "type": "function", "function": function}])
