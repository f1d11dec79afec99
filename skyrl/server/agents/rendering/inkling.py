"""Inkling, which has no chat template: vLLM writes its chats with code of its own, which is read from vLLM's files.
What vLLM puts around that code is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.server.agents.rendering.renderer import CannotRender, Setting
from skyrl.server.agents.rendering.vllm_files import module_of

INKLING_KINDS = frozenset({"inkling_mm_model"})
"""The `model_type`s."""
_EFFORTS = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "xhigh": 0.99, "max": 0.99}
_EFFORT = 0.9


class Inkling:
    """A Renderer."""

    variables = frozenset({"reasoning_effort"})
    ends = ()
    has_system_role = True

    def __init__(self) -> None:
        """Raises CannotRender if vLLM is not on this machine."""
        self._render = module_of("renderers/inkling_encoding.py").render_inkling_messages

    def render(self, messages: Sequence[Mapping[str, Any]], setting: Setting) -> str:
        asked = setting.arguments.get("reasoning_effort", _EFFORT)
        effort = _EFFORTS.get(asked) if isinstance(asked, str) else asked
        try:
            return "".join(self._render(messages, _Texts(), tools=setting.tools, reasoning_effort=effort))
        except Exception as error:  # it fails with any error on messages that it does not know
            raise CannotRender(f"{type(error).__name__}: {error}") from error


class _Texts:
    """Stands for a tokenizer: a text is its own token."""

    def encode_text(self, text: str) -> list[str]:
        return [text]

    def encode_special(self, token: str) -> str:
        return token
