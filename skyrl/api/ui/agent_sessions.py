"""What the status page shows of agent sessions: their numbers, and the turns of one with what was said.

Texts are cut: agents write what they want, and of any length. The trajectory has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from skyrl.base.types.agents import AgentSession, AgentTurn
from skyrl.storage.db.agents import Counts

MAX_TURNS = 20
"""Of one answer. The page asks for the next ones."""
MAX_TEXT = 20_000
"""Characters of one text that are shown."""
MAX_ANSWER = 2_000_000
"""Characters of all texts of one answer, beside those of its first turn."""
MAX_TOKENS = 2_000
"""Sampled tokens of a turn that are shown one by one."""
MAX_PARTS = 200
"""Parts of a message, and messages of a turn, that are shown."""


def session_line(session: AgentSession, counts: Counts) -> dict[str, Any]:
    """A session as a row of a table. Tokens count once, as for the session's limit."""
    return {
        "session_id": session.id,
        "name": session.name,
        "model": session.model,
        "base_model": session.base_model,
        "state": "open" if session.ended_at is None else "ended",
        "end_reason": session.end_reason,
        "turns": counts.turns,
        "sampled": counts.sampled,
        "added": counts.added,
        "forks": counts.forks,
        "reward": session.reward,
        "created_at": session.created_at,
        "used_at": session.used_at,
        "ended_at": session.ended_at,
    }


def session_facts(session: AgentSession, counts: Counts) -> dict[str, Any]:
    """A session in its own view."""
    limits = session.limits
    return session_line(session, counts) | {
        "weights": str(session.weights),
        "follows": session.follows,
        "limits": {"turns": limits.turns, "tokens": limits.tokens},
    }


def shown_turns(turns: Iterable[AgentTurn]) -> list[dict[str, Any]]:
    """The first of these turns, as many as fit one answer: at least one."""
    shown: list[dict[str, Any]] = []
    size = 0
    for turn in turns:
        given = [_message(message) for message in turn.messages[-MAX_PARTS:]]
        answer = _message(turn.answer)
        size += sum(len(part["text"]) for message in (*given, answer) for part in message["parts"])
        if shown and size > MAX_ANSWER:
            break
        shown.append(_numbers(turn) | {"messages": given, "answer": answer})
    return shown


def shown_tokens(turn: AgentTurn, texts: Sequence[str] | None) -> dict[str, Any]:
    """The first tokens that a turn has sampled, and how many there are. `texts` are None if they are not known."""
    return {
        "ids": turn.sampled[:MAX_TOKENS].tolist(),
        "logprobs": turn.logprobs[:MAX_TOKENS].tolist(),
        "texts": texts,
        "sampled": len(turn.sampled),
    }


def _numbers(turn: AgentTurn) -> dict[str, Any]:
    return {
        "id": turn.id,
        "parent": turn.parent,
        "fork": turn.fork,
        "forked_at": turn.forked_at,
        "left_out": max(0, len(turn.messages) - MAX_PARTS),
        "tools": _cut(", ".join(_tool_names(turn.setting.get("tools")))),
        "dialect": turn.dialect,
        "added": len(turn.added),
        "prompt": turn.usage.get("prompt"),
        "cached": turn.usage.get("cached"),
        "sampled": len(turn.sampled),
        "logprob": float(turn.logprobs.mean()) if len(turn.logprobs) else None,
        "versions": [span.version for span in turn.versions],
        "finish_reason": turn.finish_reason,
        "seconds": turn.ended_at - turn.created_at,
        "ended_at": turn.ended_at,
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a chat: its role, a name, and its parts with `kind` (thinking, text, call, data), `name` and `text`.
    `length` is that of the whole text, in characters."""
    parts = [
        {"kind": kind, "name": _cut(name), "text": _cut(text), "length": len(text)}
        for kind, name, text in [*_said(message), *_calls(message)][:MAX_PARTS]
    ]
    return {"role": _cut(_text(message.get("role", ""))), "name": _cut(_text(message.get("name", ""))), "parts": parts}


def _said(message: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    if thinking := message.get("reasoning") or message.get("reasoning_content"):
        yield "thinking", "", _text(thinking)
    content = message.get("content")
    for each in content if isinstance(content, list) else [content] if content else []:
        text = each.get("text") if isinstance(each, dict) else each
        yield ("text", "", text) if isinstance(text, str) else ("data", "", _text(each))


def _calls(message: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield "call", _text(function.get("name", "")), _text(function.get("arguments", ""))


def _tool_names(tools: Any) -> Sequence[str]:
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, dict)]
    return [_text(function.get("name", "")) for function in functions if isinstance(function, dict)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _cut(text: str) -> str:
    return text[:MAX_TEXT]
