"""Conversations of agents, as turns: what the agent says, and what the model answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks at a {name}.",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string", "description": "Where."}, "most": {"type": "integer"}},
                "required": ["at"],
            },
        },
    }
    for name in ("harbour", "river")
]
SYSTEM = {"role": "system", "content": "You count boats & more."}
DEVELOPER = {"role": "developer", "content": "It is noon."}


@dataclass(frozen=True)
class Script:
    """`turns` are what the agent sends before each answer, with the answer. `loops` says that they call tools."""

    name: str
    turns: Sequence[tuple[list[dict[str, Any]], dict[str, Any]]]
    tools: bool = False
    loops: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(number: int, thinks: bool) -> dict[str, Any]:
    return _thought({"role": "assistant", "content": f"There are {number} boats."}, number, thinks)


def called(number: int, thinks: bool, calls: int = 1, text: str = "") -> dict[str, Any]:
    made = [
        {
            "id": _id(number, place),
            "type": "function",
            "function": {
                "name": ("harbour", "river")[place % 2],
                "arguments": json.dumps({"at": f"pier {number}", "most": place}),
            },
        }
        for place in range(calls)
    ]
    return _thought({"role": "assistant", "content": text, "tool_calls": made}, number, thinks)


def result(number: int, place: int = 0, parts: bool = False) -> dict[str, Any]:
    text = f'{number + place} boats <at> the "pier"'
    content: Any = [{"type": "text", "text": text}, {"type": "text", "text": "and no more"}] if parts else text
    return {"role": "tool", "tool_call_id": _id(number, place), "content": content}


def scripts(thinks: bool) -> list[Script]:
    first = user("How many boats?\n")

    def loop(*head: dict[str, Any], calls: int = 1, text: str = "", turns: int = 5, parts: bool = False) -> Any:
        made: list[Any] = [([*head, first], called(0, thinks, calls, text))]
        for number in range(turns):
            results = [result(number, place, parts) for place in range(calls)]
            made.append((results, called(number + 1, thinks, calls, text)))
        return made

    talk: list[Any] = [([first], said(3, thinks)), *(([user(f"And on day {n}?")], said(n, thinks)) for n in range(4))]
    mixed = [
        *loop(turns=2),
        ([result(2)], said(5, thinks)),
        ([user("And the river?")], called(6, thinks)),
        ([result(6)], said(7, thinks)),
        ([user("Thank you.")], said(8, thinks)),
    ]
    noon: list[Any] = [*loop(turns=1), ([result(1), DEVELOPER], called(2, thinks)), ([result(2)], said(3, thinks))]
    return [
        Script("talk", talk),
        Script("talk, with a system message", [([SYSTEM, first], said(3, thinks)), *talk[1:]]),
        Script("talk, with tools", [([SYSTEM, first], said(3, thinks)), *talk[1:]], tools=True),
        Script("talk, told of noon", [*talk[:2], ([DEVELOPER, user("And now?")], said(9, thinks)), *talk[2:]]),
        Script("loop", loop(), tools=True, loops=True),
        Script("loop, with a system message", loop(SYSTEM), tools=True, loops=True),
        Script("loop of results in parts", loop(parts=True, turns=2), tools=True, loops=True),
        Script("loop with words", loop(SYSTEM, text="I look."), tools=True),
        Script("loop of two calls", loop(SYSTEM, calls=2), tools=True),
        Script("long loop", loop(SYSTEM, turns=30), tools=True, loops=True),
        Script("loop, told of noon", noon, tools=True),
        Script("loops and talk", mixed, tools=True),
    ]


def _id(number: int, place: int) -> str:
    """Of nine characters, as Mistral's templates want them."""
    return f"call{number:03}{place:02}"


def _thought(answer: dict[str, Any], number: int, thinks: bool) -> dict[str, Any]:
    return answer | {"reasoning": f"I count {number}, twice."} if thinks else answer
