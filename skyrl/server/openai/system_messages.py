"""System messages where every chat template shows them to the model.

Agents send several: Codex two messages of the role `developer`, Claude Code one of the role `system` between others.
Many templates take one system message, and at the beginning only: they refuse any other, or leave it out. So the
messages of a chat change on their way to the template:

- The system messages before all others become one.
- A later one becomes a part of the user's turn that it stands in: of the message or tool result before it, or, right
  after an answer, of the message behind it. What was rendered before it stays as it was.
- A template without the role gets the first system message in front of the first user's message.

`developer` is another name for `system`. Knows no template and no dialect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "developer")
SEPARATOR = "\n\n"
"""Between two texts that become one; vLLM joins system messages in the same way."""


def for_template(messages: Sequence[Mapping[str, Any]], *, begins: bool = True) -> list[dict[str, Any]]:
    """The checked messages of a chat as a template gets them. `begins` is False for messages that follow an answer:
    none of them is the chat's first."""
    first, rest = _leading(messages) if begins else ([], messages)
    placed = _placed(rest)
    if not first:
        return placed
    return [{"role": "system", "content": _joined([message.get("content") for message in first])}, *placed]


def without_the_role(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `for_template` gives, for a template that knows no system messages."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, *rest = messages
    if not rest or rest[0]["role"] == "assistant":
        return [system | {"role": "user"}, *rest]
    return [rest[0] | {"content": _joined([system["content"], rest[0].get("content")])}, *rest[1:]]


def _leading(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """The system messages at the beginning, and the others."""
    count = next((at for at, message in enumerate(messages) if message["role"] not in ROLES), len(messages))
    return messages[:count], messages[count:]


def _placed(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with each system message inside a user's turn."""
    placed: list[dict[str, Any]] = []
    waiting: list[Any] = []
    """Contents of system messages that follow an answer."""
    for message in messages:
        if message["role"] in ROLES:
            if placed and placed[-1]["role"] != "assistant":
                placed[-1] = placed[-1] | {"content": _joined([placed[-1].get("content"), message.get("content")])}
            else:
                waiting.append(message.get("content"))
            continue
        made = dict(message)
        if waiting and made["role"] == "assistant":  # an answer follows an answer
            placed.append({"role": "user", "content": _joined(waiting)})
        elif waiting:
            made["content"] = _joined([*waiting, made.get("content")])
        waiting = []
        placed.append(made)
    return [*placed, {"role": "user", "content": _joined(waiting)}] if waiting else placed


def _joined(contents: Sequence[Any]) -> str | list[dict[str, Any]]:
    """One content made of several. Texts are one text; with pictures among them all are parts."""
    given = [content for content in contents if content]
    if len(given) == 1:
        return given[0]
    parts = [part for content in given for part in _parts(content)]
    if any(part["type"] not in ("text", "refusal") for part in parts):
        return parts
    return SEPARATOR.join(text for content in given if (text := _text(content)))


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(content: str | list[dict[str, Any]]) -> str:
    """vLLM joins the texts of a message with a line feed."""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)
