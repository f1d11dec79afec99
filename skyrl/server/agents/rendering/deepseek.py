"""DeepSeek V3.2, V4 and V4.1, whose chats vLLM writes with the release's own code: it is read from vLLM's files, which
import nothing of vLLM. What vLLM puts around that code is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.server.agents.rendering.chat_template import prepared
from skyrl.server.agents.rendering.renderer import CannotRender, Setting
from skyrl.server.agents.rendering.vllm_files import module_of

_FILES = {
    "deepseek_v32": "deepseek_v32_encoding",
    "deepseek_v4": "deepseek_v4_encoding",
    "deepseek_v41": "deepseek_v41_encoding",
}
DEEPSEEK_KINDS = frozenset(_FILES)
"""The `model_type`s."""
_V4_EFFORTS = {"max": "max", "low": "low", "minimal": "low", "medium": "low"}


class DeepSeek:
    """A Renderer. `kind` is the `model_type`."""

    ends = ()
    has_system_role = True

    def __init__(self, kind: str) -> None:
        """Raises CannotRender if vLLM is not on this machine."""
        self._kind = kind
        self._encode = module_of(f"tokenizers/{_FILES[kind]}.py").encode_messages

    @property
    def variables(self) -> frozenset[str]:
        read = {"thinking", "enable_thinking"}
        return frozenset(read if self._kind == "deepseek_v32" else read | {"drop_thinking", "reasoning_effort"})

    def render(self, messages: Sequence[Mapping[str, Any]], setting: Setting) -> str:
        made = [prepared(message) for message in messages]
        given, tools = setting.arguments, setting.tools
        options = _v32(made, given, tools) if self._kind == "deepseek_v32" else self._v4(made, given, tools)
        try:
            return self._encode(made, **options)
        except Exception as error:  # the release's code asserts, and fails with any error
            raise CannotRender(f"{type(error).__name__}: {error}") from error

    def _v4(self, messages: list[dict[str, Any]], given: Mapping[str, Any], tools: Any) -> dict[str, Any]:
        if tools:
            system = next((message for message in messages if message["role"] == "system"), None)
            if system is None:
                system = {"role": "system", "content": ""} if self._kind == "deepseek_v41" else {"role": "system"}
                messages.insert(0, system)
            system["tools"] = tools
        named = [given[name] for name in ("thinking", "enable_thinking") if name in given]
        thinking, effort = not named or any(named), given.get("reasoning_effort")
        if effort == "none":
            thinking, effort = False, None
        if self._kind == "deepseek_v41":
            effort = effort or "high"
        else:
            effort = (_V4_EFFORTS.get(effort, "high") if isinstance(effort, str) else "high") if thinking else None
        return {
            "thinking_mode": "thinking" if thinking else "chat",
            "drop_thinking": given.get("drop_thinking", True),
            "reasoning_effort": effort,
        }


def _v32(messages: list[dict[str, Any]], given: Mapping[str, Any], tools: Any) -> dict[str, Any]:
    if tools:
        messages.insert(0, {"role": "system", "tools": tools})
    thinking = given.get("thinking") or given.get("enable_thinking")
    return {
        "thinking_mode": "thinking" if thinking else "chat",
        "drop_thinking": messages[-1]["role"] == "user",
    }
