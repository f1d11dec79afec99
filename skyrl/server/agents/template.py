"""A model's chat template, rendered as transformers and vLLM render it, from the files in the model's directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skyrl.base.config.mixtures import whole_config
from skyrl.base.model_files import json_of, template_of
from skyrl.inference.parsers import RENDERED_BY_VLLM
from skyrl.server.agents.canonical import text_of
from skyrl.server.openai.nested import without_echoes

_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class CannotRender(Exception):
    """The template refuses a conversation, or fails on it."""


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
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment


class ChatTemplate:
    """`variables` are the model's special tokens, by the names that templates use."""

    def __init__(self, text: str, variables: Mapping[str, str]) -> None:
        """Raises CannotRender for a template that is none."""
        self.text = text
        self._variables = dict(variables)
        try:
            self._compiled = _environment().from_string(text)
        except jinja2.TemplateError as error:
            raise CannotRender(str(error)) from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        arguments: Mapping[str, Any],
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation, with the beginning of an answer. `messages` are as `prepared` makes them. Raises
        CannotRender."""
        given = self._variables | dict(arguments)
        try:
            return self._compiled.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=True, **given
            )
        except Exception as error:  # templates are programs: they fail with any error
            raise CannotRender(f"{type(error).__name__}: {error}") from error

    @property
    def has_system_role(self) -> bool:
        """Whether a system message reaches the model, and stays at the beginning: some templates refuse it, leave it
        out, or show it beside the newest of the user's messages alone. Some read contents as lists of parts alone, as
        vLLM then gives them."""
        for content in (str, _as_parts):
            user, said = {"role": "user"}, {"role": "assistant", "content": content("Yes.")}
            asked, word = "Two boats?", "Be brief."
            chat = [user | {"content": content(asked)}, said, user | {"content": content("And today?")}]
            try:
                text = self.render([{"role": "system", "content": content(word)}, *chat], {})
            except CannotRender:
                if self._renders(chat):
                    return False
                continue
            if asked in text or word in text:
                return 0 <= text.find(word) < text.find(asked)
        return True

    def _renders(self, messages: Sequence[dict[str, Any]]) -> bool:
        try:
            self.render(messages, {})
        except CannotRender:
            return False
        return True


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def has_system_role(base_model: str) -> bool:
    """Whether the chat template of a model takes system messages; True if it cannot be read on this machine."""
    try:
        template = read_template(base_model)
    except CannotRender:
        return True
    return template is None or template.has_system_role


def read_template(base_model: str) -> ChatTemplate | None:
    """The template of a model; None if it has none on this machine, or if vLLM renders chats of its kind without it.
    Raises CannotRender."""
    if whole_config(base_model).get("model_type") in RENDERED_BY_VLLM:
        return None
    text = template_of(base_model)
    settings = json_of(base_model, "tokenizer_config.json")
    return None if text is None else ChatTemplate(text, special_tokens(settings))


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens in tokenizer_config.json, by their names."""
    found = {name: settings.get(name) for name in _VARIABLES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """An OpenAI chat message as vLLM hands it to a template. Raises CannotRender for one that is not well formed."""
    try:
        return _prepared(message)
    except (AttributeError, KeyError, TypeError) as error:
        raise CannotRender(f"a message is not well formed: {error!r}") from error


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message["role"], "content": text_of(message.get("content"))}
    made |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key) is not None}
    if message["role"] != "assistant":
        return made
    if thinking := message.get("reasoning") or message.get("reasoning_content"):
        made |= {"reasoning": thinking, "reasoning_content": thinking}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_prepared_call(call) for call in calls]
    return made


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
