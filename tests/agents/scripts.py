"""What the scripted model says: it lets an agent write notes with its tools, one note a turn, and read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.agents.scripted_vllm import Call, Said

TURNS = 30
LAST = "All notes are written."
GREETING = "Hello."
EVEN = 100.0
"""A temperature at which all tokens that may come are about equally likely."""
TOOLS = {"claude": "Bash", "codex": "exec_command"}
"""The tool that runs commands, by the agent."""


def script(agent: str, work: Path) -> list[Said]:
    """The answers of `TURNS` turns. `work` is the directory that the agent works in."""
    return [*(_turn(agent, work, number) for number in range(TURNS - 1)), Said(LAST)]


def sampling_of(agent: str) -> dict[str, Any]:
    """The defaults of a session with a real vLLM. The tiny model would end its answer at once, so it samples one of
    these answers: a call of a tool, after which it samples again, or a greeting. vLLM holds no thoughts to that."""
    call = _command(agent, "echo hello")
    written = f'<tool_call>\n{{"name": "{call.name}", "arguments": {json.dumps(call.arguments)}}}\n</tool_call>'
    choice = {"choice": [*(before + written for before in ("", "Look:\n", "Then:\n", "Wait:\n")), GREETING]}
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    return {"structured_outputs": choice, "temperature": EVEN, **thinking}


def result_of(number: int) -> str:
    """What the agent's tool answers in turn `number`, and what is not in the turn's own text: the next request must
    have it."""
    return f"notes so far: {number + 1}"


def _turn(agent: str, work: Path, number: int) -> Said:
    """Some turns think, some say something, some call two tools at once."""
    calls = [_note(agent, number)]
    if agent == "claude" and number % 5 == 4:
        calls.append(Call("Read", {"file_path": str(work / "notes.txt")}))
    elif number % 7 == 6:
        calls.append(_command(agent, "pwd"))
    text = f"Note {number} comes." if number % 2 else ""
    thought = f"Now note {number}, I think." if number % 3 == 0 else ""
    return Said(text, thought, tuple(calls))


def _note(agent: str, number: int) -> Call:
    return _command(agent, f'echo "note {number}" >> notes.txt; echo "notes so far: $(wc -l < notes.txt)"')


def _command(agent: str, command: str) -> Call:
    if agent == "claude":
        return Call("Bash", {"command": command, "description": "Write a note"})
    return Call("exec_command", {"cmd": command})
