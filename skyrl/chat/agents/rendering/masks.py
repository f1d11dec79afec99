"""The model's answers with words in the place of what it said. The words are found again in a rendering: so it is seen
where an answer ends, and what a renderer leaves out. No client can know the words.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyrl.chat.agents.tree import functions_of, text_of

_SECRET = secrets.token_hex(8)
TAGS = re.compile(
    r"(</?(?:seed:|mm:)?think(?:ing)?>|\[/?THINK\]|<\|(?:START|END)_THINKING\|>|<\|(?:begin|end)_of_thought\|>)"
)
"""Marks of thoughts. Where vLLM has no parser for them, they stay in an answer's text; templates read them there."""
_CLOSING = re.compile(r"^(?:</|\[/|<\|(?:END|end))")
MASK = "…"
"""Stands for a word in what a user reads."""
_WORD = re.compile(f"x{_SECRET}m\\d+p\\d+x")

Kind = Literal["thinking", "text", "call"]


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of an answer: `word` stands for it. `message` is the answer's place in the conversation."""

    word: str
    kind: Kind
    message: int


@dataclass(frozen=True, slots=True)
class Masked:
    """A conversation with masked answers. `parts` are those of the answers, in order; `last` those of the last one."""

    messages: list[dict[str, Any]]
    parts: list[AnswerPart]

    @property
    def last(self) -> list[AnswerPart]:
        newest = self.parts[-1].message
        return [part for part in self.parts if part.message == newest]


def masked(messages: Sequence[dict[str, Any]], sampled: Sequence[bool], *, thinking: bool = True) -> Masked:
    """Checked messages. `sampled` says of each answer whether the model has said it: only those are masked. Without
    `thinking` they have no thoughts. An answer's words are the same each time."""
    made: list[dict[str, Any]] = []
    parts: list[AnswerPart] = []
    said = iter(sampled)
    for at, message in enumerate(messages):
        if message["role"] == "assistant" and next(said):
            answer, own = _masked(message, at, thinking)
            made.append(answer)
            parts += own
        else:
            made.append(message)
    return Masked(made, parts)


def word(message: int, part: int) -> str:
    return f"x{_SECRET}m{message}p{part}x"


def excerpt(text: str, at: int, before: int, after: int) -> str:
    """A piece of a rendering for a reader, around the character `at`: without the words, which are a secret."""
    word = text.rfind(f"x{_SECRET}m", 0, at)
    found = _WORD.match(text, word) if word >= 0 else None
    if found is not None and found.end() > at:
        at = found.start()
    return shown(text[:at])[-before:] + shown(text[at:])[:after]


def shown(text: str) -> str:
    """A rendering without the words."""
    return _WORD.sub(MASK, text)


def _masked(message: Mapping[str, Any], at: int, thinking: bool) -> tuple[dict[str, Any], list[AnswerPart]]:
    parts: list[AnswerPart] = []

    def mask(kind: Kind) -> str:
        parts.append(AnswerPart(word(at, len(parts)), kind, at))
        return parts[-1].word

    made: dict[str, Any] = {"role": "assistant"}
    if thinking and (message.get("reasoning") or message.get("reasoning_content")):
        made["reasoning"] = mask("thinking")
    text = ""
    pieces = TAGS.split(text_of(message.get("content")))
    ends = max((number for number, piece in enumerate(pieces) if _CLOSING.match(piece)), default=-1)
    for number, piece in enumerate(pieces):
        if number < ends:
            if thinking and piece.strip():
                text += piece if number % 2 else mask("thinking")
        elif number == ends:
            text += piece if thinking else ""
        elif piece.strip():
            text += piece if number % 2 else mask("text")
    calls = functions_of(message)
    if not parts and not calls:
        text = mask("text")
    made["content"] = text
    if calls:
        made["tool_calls"] = [
            {"id": call.get("id", ""), "type": "function", "function": _function(function, mask("call"))}
            for call, function in zip(message["tool_calls"], calls, strict=True)
        ]
    return made, parts


def _function(function: Mapping[str, Any], word: str) -> dict[str, Any]:
    """With one argument, of the name of the first of the call's own: templates look up its type."""
    given = function.get("arguments")
    try:
        values = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        values = None
    name = next(iter(values), "a") if isinstance(values, dict) else "a"
    return {"name": function.get("name", ""), "arguments": json.dumps({name: word})}
