"""What a model's renderer does with the earlier turns of a conversation: tried on short ones when the model is loaded.

Many templates drop the thoughts of earlier answers, and some have a switch that keeps them. A session of a model gets
the switches with which its turns can be continued.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from skyrl.server.agents.rendering.continuation import Continuations, Fork, Step
from skyrl.server.agents.rendering.renderer import CannotRender, Setting, tools_of

SWITCHES: dict[str, bool] = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
    "enable_thinking": True,
}
"""Arguments of templates that keep the thoughts of earlier answers, each with the value that does."""
_TURNS = 3
_NO_THOUGHTS = re.compile(r"(</(?:\w+:)?think>|\[/THINK\]|<\|END_THINKING\|>)\s*$")
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks at a place.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
]


@dataclass(frozen=True, slots=True)
class Habits:
    """`switches` are arguments of the template that sessions set. `user_turns` and `tool_loops` say why an earlier turn
    cannot be continued when the user speaks again, and when results of tools follow; None if it can."""

    switches: dict[str, bool] = field(default_factory=dict)
    user_turns: str | None = None
    tool_loops: str | None = None

    @property
    def description(self) -> dict[str, Any]:
        """As clients see it."""
        return {
            "chat_template_kwargs": self.switches,
            "user_turns": self.user_turns or "exact",
            "tool_loops": self.tool_loops or "exact",
        }


def habits_of(model: Continuations, *, thinks: bool) -> Habits:
    """`thinks` says whether the inference server reads thoughts out of the model's answers."""
    known = {name: value for name, value in SWITCHES.items() if name in model.renderer.variables}
    tried: list[dict[str, bool]] = [{}, *({name: value} for name, value in known.items())]
    if len(known) > 1:
        tried.append(known)
    return max((_habits(model, switches, thinks) for switches in tried), key=_rank)


def _rank(habits: Habits) -> tuple[bool, bool]:
    return habits.user_turns is None, habits.tool_loops is None


def _habits(model: Continuations, switches: dict[str, bool], thinks: bool) -> Habits:
    def why(steps: Iterator[Step]) -> str | None:
        return next((fork.note for step in steps if (fork := _fork(model, step)) is not None), None)

    try:
        begun = model.renderer.render([{"role": "user", "content": "Go."}], Setting(switches))
    except CannotRender as error:
        return Habits(switches, str(error), str(error))
    thoughtful = thinks and _NO_THOUGHTS.search(begun) is None
    return Habits(
        switches,
        why(_steps(model, Setting(switches), calls=False, thinks=thoughtful)),
        why(_steps(model, Setting(switches, tools_of(_TOOLS)), calls=True, thinks=thoughtful)),
    )


def _fork(model: Continuations, step: Step) -> Fork | None:
    """Why a turn cannot be continued, whichever token has ended it."""
    forks: list[Fork] = []
    for token in model.stops.values():
        done = model.continued(replace(step, sampled=np.array([token], np.int32)))
        if not isinstance(done, Fork):
            return None
        forks.append(done)
    return forks[0]


def _steps(model: Continuations, setting: Setting, *, calls: bool, thinks: bool) -> Iterator[Step]:
    system = [{"role": "system", "content": "You help."}] if model.renderer.has_system_role else []
    messages: list[dict[str, Any]] = [*system, {"role": "user", "content": "How many boats?"}]
    for turn in range(_TURNS):
        answer = _answer(turn, calls, thinks)
        asked = {"role": "user", "content": f"And on day {turn + 2}?"}
        new = [{"role": "tool", "tool_call_id": _id(turn), "content": f"{turn + 3} boats"} if calls else asked]
        yield Step(
            id="",
            next_id="",
            before=messages,
            said=[True] * turn,
            answer=answer,
            new=new,
            prompt=np.array([], np.int32),
            sampled=np.array([], np.int32),
            setting=setting,
            keep=False,
        )
        messages = [*messages, answer, *new]


def _answer(turn: int, calls: bool, thinks: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": "" if calls else f"{turn + 3} boats."}
    if calls:
        function = {"name": "look", "arguments": json.dumps({"at": f"pier {turn}"})}
        answer["tool_calls"] = [{"id": _id(turn), "type": "function", "function": function}]
    return answer | {"reasoning": f"I count {turn + 3}."} if thinks else answer


def _id(turn: int) -> str:
    """Of the nine characters that Mistral's templates want."""
    return f"call{turn:05}"
