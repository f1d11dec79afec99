"""A model's chat template, rendered as transformers and vLLM render it, from the files in the model's directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skyrl.server.agents.canonical import text_of
from skyrl.server.agents.rendering.content_format import reads_parts
from skyrl.server.agents.rendering.renderer import CannotRender, Setting
from skyrl.server.openai.nested import without_echoes


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
