"""Chat completions that a model could have answered, whole and cut into the chunks of a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st

USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 7,
    "total_tokens": 27,
    "prompt_tokens_details": {"cached_tokens": 16},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


@dataclass(frozen=True)
class Piece:
    """What one chunk adds. `call` is the number of the call that `text` belongs to."""

    kind: str
    text: str
    call: int = 0


@dataclass(frozen=True)
class Told:
    """An answer: its message, and the order in which a stream tells it. `calls` are names and arguments."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]
    pieces: tuple[Piece, ...]
    finish_reason: str

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for number, (name, arguments) in enumerate(self.calls)
            ]
        return message

    def whole(self) -> bytes:
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish_reason, "stop_reason": None}
        return _encode({"object": "chat.completion", "choices": [choice], "usage": USAGE})

    def chunks(self) -> list[bytes]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        named: set[int] = set()
        for piece in self.pieces:
            if piece.kind != "call":
                deltas.append({piece.kind: piece.text})
                continue
            call: dict[str, Any] = {"index": piece.call, "function": {"arguments": piece.text}}
            if piece.call not in named:
                named.add(piece.call)
                call |= {"id": f"call_{piece.call}", "type": "function"}
                call["function"]["name"] = self.calls[piece.call][0]
            deltas.append({"tool_calls": [call]})
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": self.finish_reason, "stop_reason": None})
        chunks = [_encode({"object": "chat.completion.chunk", "choices": [choice]}) for choice in choices]
        return [*chunks, _encode({"object": "chat.completion.chunk", "choices": [], "usage": USAGE})]


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps({"id": "chatcmpl-7", "created": 1_700_000_000, "model": "tiny"} | fields).encode()


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(["", "\n\n", " a", "b\n"])
OBJECTS = st.dictionaries(st.text("abc", max_size=3), st.integers() | st.floats(allow_nan=False) | TEXTS, max_size=3)
ARGUMENTS = OBJECTS.map(json.dumps) | st.sampled_from(["", "[1]", '{"a": ', "not JSON", '"x"', "{}", ' {"a":1.0} '])
CALLS = st.lists(st.tuples(st.sampled_from(["add", "read_file"]), ARGUMENTS), max_size=3)


@st.composite
def _cut(draw: st.DrawFn, kind: str, text: str, call: int = 0) -> list[Piece]:
    """A text in pieces; an empty one may be told or not, and a call is always told."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    ends = [0, *places, len(text)]
    return [Piece(kind, text[a:b], call) for a, b in zip(ends, ends[1:], strict=False)]


@st.composite
def told(draw: st.DrawFn, *, shuffled: bool = False) -> Told:
    """An answer in the usual order: thinking, text, calls. If `shuffled`, the text and the thinking have pieces between
    and after the calls, too."""
    reasoning, content, calls = draw(TEXTS), draw(TEXTS), draw(CALLS)
    order = [draw(_cut("reasoning", reasoning)), draw(_cut("content", content))]
    order += [draw(_cut("call", arguments, number)) for number, (_, arguments) in enumerate(calls)]
    pieces = [piece for group in order for piece in group]
    if shuffled:
        pieces = []
        called = order[2:]
        free = [order[0], order[1]]
        while any(free) or called:
            some = [group for group in free if group]
            if called and (not some or draw(st.booleans())):
                pieces += called.pop(0)
            else:
                pieces.append(draw(st.sampled_from(some)).pop(0))
    finish = draw(st.sampled_from(["stop", "length", "tool_calls" if calls else "stop"]))
    return Told(reasoning, content, tuple(calls), tuple(pieces), finish)


def same_message(message: dict[str, Any]) -> dict[str, Any]:
    """What two messages of the assistant have in common that are the same to a session: text and thinking without
    white space around them, and calls by their names and by their arguments as values."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {
        "content": (message.get("content") or "").strip(),
        "reasoning": (message.get("reasoning") or "").strip(),
        "calls": [(call["name"], _value(call["arguments"])) for call in calls],
    }


def _value(arguments: str) -> Any:
    """No arguments are an empty object; what is no object stands for itself."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return arguments
    return list(value.items()) if isinstance(value, dict) else arguments
