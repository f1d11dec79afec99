"""What chat templates do not take as clients send it, or write otherwise than clients expect.

System messages: every template must show them to the model. Agents send several: Codex two messages of the role
`developer`, Claude Code one of the role `system` between others. Many templates take one system message, and at the
beginning only: they refuse any other, or leave it out. So the messages of a chat change on their way to the template:

- The system messages before all others become one.
- A later one becomes a part of the user's turn that it stands in: of the message or tool result before it, or, right
  after an answer, of the message behind it. What was rendered before it stays as it was.
- A template without the role gets the first system message in front of the first user's message.

`developer` is another name for `system`.

`reasoning_effort`: some templates take a part of its values alone. Tencent's Hy3 takes `high`, `low` and `no_think`,
and refuses a chat with another value; Codex asks for `medium`. Such a template gets the nearest value that it takes.

Renderers: a checkpoint that was trained with the cookbook has seen the prompts of a renderer, and a chat is rendered
with the model's own template. `difference` says where the two differ; compared were tinker-cookbook 0.6.1 and the
released templates (docs/howto/openai.md).

Knows templates by their text, and renders none. Knows no dialect.
"""

from __future__ import annotations

import re
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


EFFORT_FIELDS = ("reasoning_effort", "chat_template_kwargs")
"""The fields of a chat that say it."""
_ORDER = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""OpenAI's values, by how long a model thinks."""
_SAME = {"no_think": "none"}
"""Other names that templates have for them."""
_TAKEN = re.compile(r"\breasoning_effort\s+not\s+in\s+[\[(]([^\])]*)[\])]")
_VALUE = re.compile(r"""['"]([^'"]+)['"]""")


def efforts_of(template: str | None) -> Sequence[str]:
    """The values that a template says it takes, in its own words; none if it takes any, or has no such argument."""
    found = _TAKEN.search(template or "")
    values = [] if found is None else _VALUE.findall(found[1])
    return [value for value in values if _SAME.get(value, value) in _ORDER]


def with_taken_effort(fields: Mapping[str, Any], taken: Sequence[str]) -> Mapping[str, Any]:
    """The decoded fields of a chat with `reasoning_effort` as the template takes it: the nearest value, of two the
    higher one. It then stands in `chat_template_kwargs`, because vLLM knows OpenAI's values alone. What a client gives
    there itself stays."""
    effort, given = fields.get("reasoning_effort"), fields.get("chat_template_kwargs") or {}
    if not taken or effort not in _ORDER or effort in taken or "reasoning_effort" in given:
        return fields
    wanted = _ORDER.index(effort)
    ranks = {value: _ORDER.index(_SAME.get(value, value)) for value in taken}
    nearest = min(taken, key=lambda value: (abs(ranks[value] - wanted), -ranks[value]))
    arguments = {"enable_thinking": ranks[nearest] > 0} | given | {"reasoning_effort": nearest}
    return {name: value for name, value in fields.items() if name != "reasoning_effort"} | {
        "chat_template_kwargs": arguments
    }


LLAMA = (
    "the template begins each chat with a system message about dates, and cuts blanks off texts; the renderer llama3 "
    "does neither"
)
GPT_OSS = (
    "the template begins each chat with a system message, which the renderer gpt_oss_no_sysprompt leaves out; it also "
    "writes tools' calls and results otherwise, and drops earlier thoughts"
)
QWEN3 = "the template writes the results of several calls into one user's turn, the renderers of Qwen3 one for each"
_LLAMA_DATES = "Cutting Knowledge Date"
_QWEN3 = ("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe")


def difference(model_type: str, template: str | None) -> str | None:
    """How the template of a model differs from the cookbook's renderers, as a sentence; None if it is not known to.
    `model_type` is that of config.json."""
    if model_type == "gpt_oss":
        return GPT_OSS
    if template is None:
        return None
    if model_type == "llama" and _LLAMA_DATES in template:
        return LLAMA
    return QWEN3 if model_type in _QWEN3 and "<tool_response>" in template else None
