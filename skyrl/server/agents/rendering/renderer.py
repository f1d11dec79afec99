"""What writes a conversation as the inference server does: the model's chat template, or vLLM's own code for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from skyrl.server.openai.effort import with_taken_effort
from skyrl.server.openai.nested import tools_without_echoes


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
