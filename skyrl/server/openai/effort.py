"""`reasoning_effort` for chat templates that take some of its values alone.

Tencent's Hy3 takes `high`, `low` and `no_think`, and refuses a chat with another value; Codex asks for `medium`. Such a
template gets the nearest value that it takes. Knows templates by their text, and renders none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
