"""What writes a conversation as the inference server does: the interface, and the model's own chat template.

`ChatTemplate` renders a template from the files in the model's directory, as transformers and vLLM render it. A
template that loops over a message's content gets lists of parts, others get text: vLLM decides by the same rule (its
option `chat_template_content_format: auto`). `vllm_renderers` has the models whose chats vLLM writes with code of its
own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skyrl.chat.agents.tree import text_of
from skyrl.chat.openai.fields import tools_without_echoes, without_echoes
from skyrl.chat.openai.messages import with_taken_effort


class CannotRender(Exception):
    """The renderer refuses a conversation, or fails on it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a renderer reads beside the messages. `arguments` are those of the template, `tools` as `tools_of` makes
    them, `at` the time (seconds since the epoch) that is today for a template that writes the date."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[dict[str, Any]] | None = None
    at: float = 0.0

    @property
    def now(self) -> datetime:
        return datetime.fromtimestamp(self.at)

    @classmethod
    def of(cls, fields: Mapping[str, Any], at: float, efforts: Sequence[str] = ()) -> Setting:
        """Of the fields of a chat completion, which were checked. `efforts` are the values of `reasoning_effort` that
        the template takes alone, if there are some."""
        return cls(template_arguments(with_taken_effort(fields, efforts)), tools_of(fields.get("tools")), at)


class Renderer(Protocol):
    """`variables` are the arguments that it reads. `ends` are texts with which it ends an answer beside the tokens that
    end a sampled one."""

    @property
    def variables(self) -> frozenset[str]: ...

    @property
    def ends(self) -> tuple[str, ...]: ...

    has_system_role: bool

    def render(self, messages: Sequence[Mapping[str, Any]], setting: Setting) -> str:
        """The text of OpenAI chat messages, with the beginning of an answer. Raises CannotRender."""
        ...


def template_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a request gives to the template beside messages and tools, as vLLM does."""
    given = dict(fields.get("chat_template_kwargs") or {})
    if documents := fields.get("documents"):
        given["documents"] = documents
    if (effort := fields.get("reasoning_effort")) is not None:
        given = {"enable_thinking": effort != "none"} | given | {"reasoning_effort": effort}
    return given


def tools_of(given: Any) -> list[dict[str, Any]] | None:
    """The tools of a request as vLLM hands them to a template: with these keys alone, in this order."""
    if not given:
        return None
    tools: list[dict[str, Any]] = []
    for tool in tools_without_echoes(given):
        function = tool["function"]
        made = {name: function.get(name) for name in ("name", "description", "parameters")}
        made |= {name: function[name] for name in ("strict",) if function.get(name) is not None}
        tools.append({"type": "function", "function": made})
    return tools


def reads_parts(template: nodes.Template) -> bool:
    """Of a template's syntax tree. A template with assignments that the rule does not know reads text."""
    try:
        return any(_content_loops(template))
    except _Unknown:
        return False


class _Unknown(Exception):
    pass


def _content_loops(root: nodes.Template) -> Iterator[bool]:
    messages = list(_messages_in_loops(root))
    macros = list(root.find_all(nodes.Macro))
    given = {id(macro): set(_given_contents(root, macro, messages)) for macro in macros}
    within = {id(loop): macro for macro in macros for loop in macro.find_all(nodes.For)}
    for loop in root.find_all(nodes.For):
        macro = within.get(id(loop))
        if any(_reads(loop.iter, name, "content") for name in messages):
            yield True
        elif isinstance(loop.iter, nodes.Name):
            yield loop.iter.name in given[id(macro)] if macro is not None else loop.iter.name == "content"


def _messages_in_loops(root: nodes.Template) -> Iterator[str]:
    """The names of single messages in loops over all of them."""
    lists = list(_aliases(root, "messages"))
    for loop in root.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            yield _name(loop.target)


def _aliases(root: nodes.Template, name: str) -> Iterator[str]:
    waiting, seen = [name], {name}
    while waiting:
        current = waiting.pop(0)
        yield current
        for assigned in root.find_all(nodes.Assign):
            if _reads(assigned.node, current) and (other := _name(assigned.target)) not in seen:
                seen.add(other)
                waiting.append(other)


def _given_contents(root: nodes.Template, macro: nodes.Macro, messages: list[str]) -> Iterator[str]:
    """The parameters of a macro that get a message's content somewhere."""
    names = [argument.name for argument in macro.args]
    for call in root.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(names, call.args, strict=False), *((each.key, each.value) for each in call.kwargs)]
        for name, value in given:
            if name in names and any(_reads(value, message, "content") for message in messages):
                yield name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable, or its item `key`, perhaps filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return _reads(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and node.attr == key and _reads(node.node, name)


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unknown
    return target.name


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}` marks what a model has said. It adds nothing to the text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> str:
        return caller()


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [_Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


class ChatTemplate:
    """A Renderer of one template, or of two: `with_tools` is for chats that have tools. `tokens` are the texts of the
    model's special tokens, by the names that templates use."""

    ends = ()

    def __init__(self, text: str, tokens: Mapping[str, str], with_tools: str | None = None) -> None:
        """Raises CannotRender for a template that is none."""
        self._tokens = dict(tokens)
        self._plain = _Compiled(text)
        self._with_tools = self._plain if with_tools in (None, text) else _Compiled(with_tools or "")
        self.has_system_role = self._takes_system()

    @property
    def variables(self) -> frozenset[str]:
        return self._plain.variables | self._with_tools.variables

    def text_for(self, *, tools: bool) -> str:
        """The template of chats with or without tools."""
        return (self._with_tools if tools else self._plain).text

    def render(self, messages: Sequence[Mapping[str, Any]], setting: Setting) -> str:
        compiled = self._with_tools if setting.tools else self._plain
        given = self._tokens | {"documents": None} | dict(setting.arguments)
        made = [prepared(message, parts=compiled.reads_parts) for message in messages]
        try:
            return compiled.template.render(
                messages=made,
                tools=setting.tools,
                add_generation_prompt=True,
                strftime_now=setting.now.strftime,
                **given,
            )
        except Exception as error:  # templates are programs: they fail with any error
            raise CannotRender(f"{type(error).__name__}: {error}") from error

    def _takes_system(self) -> bool:
        """Whether a system message reaches the model, and stays at the beginning: some templates refuse it, leave it
        out, or show it beside the newest of the user's messages alone."""
        user = {"role": "user"}
        asked, word = "Two boats?", "Be brief."
        chat = [user | {"content": asked}, {"role": "assistant", "content": "Yes."}, user | {"content": "And today?"}]
        try:
            text = self.render([{"role": "system", "content": word}, *chat], Setting())
        except CannotRender:
            return not self._renders(chat)
        return not (asked in text or word in text) or 0 <= text.find(word) < text.find(asked)

    def _renders(self, messages: Sequence[dict[str, Any]]) -> bool:
        try:
            self.render(messages, Setting())
        except CannotRender:
            return False
        return True


class _Compiled:
    """`variables` are the names that the template reads and does not set; `reads_parts`: it wants lists of parts."""

    def __init__(self, text: str) -> None:
        """Raises CannotRender."""
        environment = _environment()
        try:
            tree = environment.parse(text)
            self.template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise CannotRender(str(error)) from error
        self.text = text
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self.reads_parts = reads_parts(tree)


def prepared(message: Mapping[str, Any], *, parts: bool = False) -> dict[str, Any]:
    """An OpenAI chat message as vLLM hands it to a template, with `parts` to one that reads lists of them. Raises
    CannotRender for one that is not well formed."""
    try:
        return _prepared(message, parts)
    except (AttributeError, KeyError, TypeError) as error:
        raise CannotRender(f"a message is not well formed: {error!r}") from error


def _prepared(message: Mapping[str, Any], parts: bool) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    made: dict[str, Any] = {"role": role}
    made["content"] = _parts(content) if parts and role != "tool" else text_of(content)
    made |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key) is not None}
    if role != "assistant":
        return made
    if thinking := message.get("reasoning") or message.get("reasoning_content"):
        made |= {"reasoning": thinking, "reasoning_content": thinking}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_prepared_call(call) for call in calls]
    return made


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return [{"type": "text", "text": text} for part in content if (text := text_of([part]))]
    return [{"type": "text", "text": content}] if isinstance(content, str) else []


def _prepared_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(without_echoes(call.get("function") or {}))
    given = function.get("arguments") or {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = {}
    function["arguments"] = given if isinstance(given, dict) else {}
    return {**without_echoes(call), "type": "function", "function": function}
