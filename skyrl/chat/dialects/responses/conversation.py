"""The items of a Responses request as messages of a chat, and its tools as tools of a chat.

The items of one answer (reasoning, message, calls) follow one another and are one message of the chat.

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

from skyrl.base.wire.decoding import decode_part
from skyrl.base.wire.errors import RequestError
from skyrl.chat.dialects.parts import assistant_message, image_part, joined_parts, needed, text_part, tool_call
from skyrl.chat.dialects.responses.fields import (
    CLIENT_CALLS,
    KINDS,
    LEFT_OUT,
    REFUSED,
    RESULTS,
    Item,
    Part,
    Reasoning,
    TextConfig,
    Tool,
    ToolChoice,
)

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


OURS = "skyrl:"
"""How the `encrypted_content` of this server's reasoning items begins. The rest is the reasoning's text: clients that
keep nothing else of such an item send it back."""
_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


class Conversation:
    """Collects the messages. `left_out` gets a sentence for what has no effect."""

    def __init__(self, tools: ChatTools, left_out: list[str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}
        """The fields of the request that items have set, `reasoning` and `text`; the last item counts."""
        self._tools = tools
        self._left_out = left_out
        self._clear()

    def _clear(self) -> None:
        self._answering = False
        self._texts: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, items: str | Sequence[Item]) -> None:
        """Raises RequestError naming the item."""
        if isinstance(items, str):
            self.messages.append({"role": "user", "content": items})
            return
        for number, item in enumerate(items):
            self._add(item, f"input[{number}]")
        self._end_answer()

    def _add(self, item: Item, place: str) -> None:
        kind = item.type or "message"
        match KINDS.get(kind):
            case "message" if kind == "agent_message":
                self._tell({"role": "user", "content": self._agent_message(item, place)})
            case "message":
                self._message(item, place)
            case "answer":
                self._answer(kind, item, place)
            case "result":
                self._result(kind, item, place)
            case "tools":
                pass  # `tools_in` has read them
            case "setting":
                for name, kind_of in (("reasoning", Reasoning), ("text", TextConfig)):
                    if not _is_none(raw := getattr(item, name)):
                        self.settings[name] = decode_part(kind_of, raw, f"{place}.{name}")
            case "left out":
                self._left_out.append(f"{place}: an item of the type {kind!r} is left out: {LEFT_OUT[kind]}")
            case "refused":
                raise RequestError(REFUSED[kind], field=f"{place}.type")
            case _:
                raise RequestError(f"an item of the type {kind!r} is not supported", field=f"{place}.type")

    def _answer(self, kind: str, item: Item, place: str) -> None:
        """A part of the model's answer that is no message."""
        if kind == "tool_search_call" and item.call_id is None:
            self._left_out.append(f"{place}: a search for tools is left out: OpenAI's server ran it")
        elif kind == "reasoning":
            self._answering = True
            self._thinking.append(self._reasoning(item, place))
        elif kind == "function_call":
            name = self._tools.chat_name(needed(item.name, f"{place}.name"), item.namespace)
            self._call(item, name, decode_part(str, item.arguments, f"{place}.arguments"), place)
        elif kind == "custom_tool_call":
            name = self._tools.chat_name(needed(item.name, f"{place}.name"), item.namespace)
            self._call(item, name, _json(CustomInput(needed(item.input, f"{place}.input"))), place)
        else:
            ran = CLIENT_CALLS[kind]
            given = decode_part(dict[str, Any] | str, getattr(item, ran.arguments), f"{place}.{ran.arguments}")
            self._call(item, ran.name, given if isinstance(given, str) else _json(given), place)

    def _result(self, kind: str, item: Item, place: str) -> None:
        field = RESULTS[kind]
        where = f"{place}.{field}"
        if kind == "tool_search_output" and item.call_id is None:
            return  # OpenAI's server ran the search. `tools_in` has read its tools
        if kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(decode_part(str | list[Part], item.output, where), where)
        elif kind == "apply_patch_call_output" and _is_none(item.output):
            content = needed(item.status, where)
        else:
            given = decode_part(Any, getattr(item, field), where)
            content = given if isinstance(given, str) else _json(given)
        if item.call_id is None and item.name is not None:  # a tool that the model has not called
            self._tell(
                {"role": "user", "content": joined_parts([text_part(f"Output of {item.name}:"), *_parts(content)])}
            )
            return
        call_id = item.id if kind == "local_shell_call_output" and item.call_id is None else item.call_id
        self._tell({"role": "tool", "tool_call_id": needed(call_id, f"{place}.call_id"), "content": content})

    def _agent_message(self, item: Item, place: str) -> str:
        """What another agent says to this one."""
        content = needed(item.content, f"{place}.content")
        texts = [content] if isinstance(content, str) else []
        for number, part in enumerate([] if isinstance(content, str) else content):
            if part.type == "encrypted_content":
                self._left_out.append(f"{place}.content[{number}]: only another server can read it, so it is left out")
            else:
                texts.append(_text(part, f"{place}.content[{number}]"))
        return "\n".join([f"Message from {item.author or 'an agent'} to {item.recipient or 'you'}:", *texts])

    def _message(self, item: Item, place: str) -> None:
        role, content = needed(item.role, f"{place}.role"), needed(item.content, f"{place}.content")
        if role != "assistant":
            role = "developer" if role == "system" else role  # the role system is that of the request's instructions
            self._tell({"role": role, "content": _content(content, f"{place}.content")})
            return
        self._answering = True
        if isinstance(content, str):
            self._texts.append(content)
        else:
            self._texts += (_text(part, f"{place}.content[{number}]") for number, part in enumerate(content))

    def _call(self, item: Item, name: str, arguments: str, place: str) -> None:
        self._answering = True
        self._calls.append(tool_call(needed(item.call_id, f"{place}.call_id"), name, arguments))

    def _reasoning(self, item: Item, place: str) -> str:
        if item.content and not isinstance(item.content, str):
            return "".join(_text(part, f"{place}.content[{number}]") for number, part in enumerate(item.content))
        if item.encrypted_content is not None:
            if item.encrypted_content.startswith(OURS):
                return item.encrypted_content.removeprefix(OURS)
            self._left_out.append(f"{place}: reasoning that only another server can read is left out")
        parts = enumerate(item.summary or ())
        return "\n".join(_text(part, f"{place}.summary[{number}]") for number, part in parts)

    def _tell(self, message: dict[str, Any]) -> None:
        """A message that is not the assistant's."""
        self._end_answer()
        self.messages.append(message)

    def _end_answer(self) -> None:
        if self._answering:
            self.messages.append(assistant_message(self._texts, self._thinking, self._calls))
            self._clear()


def tools_in(items: str | Sequence[Item]) -> list[tuple[str, list[Tool]]]:
    """The tools that items of a conversation add to the request's own, each list with its item's place. Raises
    RequestError."""
    if isinstance(items, str):
        return []
    return [
        (f"input[{number}].", decode_part(list[Tool], item.tools, f"input[{number}].tools"))
        for number, item in enumerate(items)
        if item.type in ("additional_tools", "tool_search_output")
    ]


def _is_none(raw: msgspec.Raw) -> bool:
    return bytes(raw) in (b"", b"null")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [text_part(content)] if isinstance(content, str) else content


def _content(content: str | Sequence[Part], place: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return joined_parts([_part(part, f"{place}[{number}]") for number, part in enumerate(content)])


def _part(part: Part, place: str) -> dict[str, Any]:
    if part.type != "input_image":
        return text_part(_text(part, place))
    uri = needed(part.image_url, f"{place}.image_url")
    if not uri.startswith("data:"):
        raise RequestError("must be a data URI: this server opens no address", field=f"{place}.image_url")
    return image_part(uri)


def _text(part: Part, place: str) -> str:
    if part.type == "refusal":
        return needed(part.refusal, f"{place}.refusal")
    if part.type not in _TEXTS:
        raise RequestError(f"a part of the type {part.type!r} cannot stand here", field=f"{place}.type")
    return needed(part.text, f"{place}.text")
