"""The tools of a Responses request, as tools of a chat, and the names that they have in either.

A namespace's tools are shown to the model under their own names, or with the namespace before it where two tools have
the same. Calls go back with the namespace beside the name. A custom tool takes a text: it becomes a function whose one
argument is that text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from skyrl.base.wire.errors import RequestError
from skyrl.server.dialects.responses.fields import Tool, ToolChoice

SERVED = ("function", "custom")
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class CustomInput(msgspec.Struct, forbid_unknown_fields=True):
    """The arguments of the function that a custom tool becomes."""

    input: str


def custom_input(arguments: str) -> str:
    """The text for a custom tool. Arguments of another form go to the tool as they are."""
    try:
        return msgspec.json.decode(arguments, type=CustomInput).input
    except (msgspec.MsgspecError, UnicodeError):
        return arguments


@dataclass(frozen=True, slots=True)
class Named:
    """A tool as the client names it."""

    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def full(self) -> tuple[str, str | None]:
        """The same for two definitions of one tool."""
        return self.name, self.namespace


@dataclass(frozen=True, slots=True)
class _Placed:
    place: str
    tool: Tool
    named: Named


class ChatTools:
    """Tools that OpenAI's server would run are left out; `left_out` gets a sentence for each. `added` are tools that
    items of the conversation bring, each list with its item's place: they stand behind the request's own, or in the
    place of one with the same name. Raises RequestError naming the tool."""

    def __init__(
        self, tools: Sequence[Tool], left_out: list[str], added: Sequence[tuple[str, Sequence[Tool]]] = ()
    ) -> None:
        placed = list(_placed(tools, left_out))
        places = {each.named.full: at for at, each in reversed(list(enumerate(placed)))}
        for place, more in added:
            for new in _placed(more, left_out, place):
                at = places.setdefault(new.named.full, len(placed))
                placed[at : at + 1] = [new]
        count = Counter(each.named.name for each in placed)
        self.chat: list[dict[str, Any]] = []
        self._named: dict[str, Named] = {}
        self._chat_names: dict[tuple[str, str | None], str] = {}
        for each in placed:
            named = each.named
            name = named.name
            if named.namespace is not None and count[name] > 1:
                name = f"{named.namespace.rstrip('_')}__{name.lstrip('_')}"
            self._named[name] = named
            self._chat_names[named.full] = name
            self.chat.append({"type": "function", "function": _function(each, name)})

    def named(self, chat_name: str) -> Named:
        """The tool that the model called, by the client's name. A model may call one that does not exist."""
        return self._named.get(chat_name) or Named(chat_name)

    def chat_name(self, name: str, namespace: str | None) -> str:
        """The name in the chat. A tool that is not among the request's has its own name there."""
        return self._chat_names.get((name, namespace), name)

    def choice(self, choice: str | ToolChoice) -> dict[str, Any]:
        """The field of the chat that says which tool must be called. Raises RequestError if there is no such tool."""
        if isinstance(choice, str):
            if choice == "required" and not self.chat:
                raise RequestError("asks for a call, and there is no tool that can be called", field="tool_choice")
            return {"tool_choice": choice} if self.chat else {}
        if choice.type not in SERVED:
            raise RequestError(f"a choice of the type {choice.type!r} is not supported", field="tool_choice.type")
        name = next((chat for chat, named in self._named.items() if named.name == choice.name), None)
        if name is None:
            raise RequestError(f"there is no tool {choice.name!r} that can be called", field="tool_choice.name")
        return {"tool_choice": {"type": "function", "function": {"name": name}}}


def _placed(
    tools: Sequence[Tool], left_out: list[str], within: str = "", namespace: str | None = None
) -> Iterator[_Placed]:
    """The functions and custom tools, those of namespaces too."""
    for number, tool in enumerate(tools):
        place = f"{within}tools[{number}]"
        if tool.type == "namespace" and namespace is None:
            yield from _placed(tool.tools or (), left_out, f"{place}.", _name(tool, place))
        elif tool.type in SERVED:
            yield _Placed(place, tool, Named(_name(tool, place), namespace, tool.type == "custom"))
        else:
            left_out.append(f"{place}: a tool of the type {tool.type!r} is not served and left out")


def _name(tool: Tool, place: str) -> str:
    if not tool.name:
        raise RequestError("is missing", field=f"{place}.name")
    return tool.name


def _function(placed: _Placed, name: str) -> dict[str, Any]:
    tool = placed.tool
    function: dict[str, Any] = {"name": name}
    if tool.description is not None:
        function["description"] = tool.description
    if placed.named.custom:
        if tool.format is not None and tool.format.definition is not None:  # shown to the model, and not enforced
            shown = f"The input follows this {tool.format.syntax} grammar:\n{tool.format.definition}"
            function["description"] = f"{tool.description}\n\n{shown}" if tool.description else shown
        return function | {"parameters": _INPUT}
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return function | ({"strict": True} if tool.strict else {})
