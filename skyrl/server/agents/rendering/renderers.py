"""Which renderer writes the chats of a base model: as vLLM chooses."""

from __future__ import annotations

from skyrl.base.model_files import file_of, json_of, template_of, whole_config
from skyrl.inference.parsers import RENDERED_BY_VLLM
from skyrl.server.agents.rendering import deepseek, harmony, inkling
from skyrl.server.agents.rendering.chat_template import ChatTemplate
from skyrl.server.agents.rendering.renderer import CannotRender, Renderer
from skyrl.server.agents.rendering.tokens import special_tokens

_MISTRAL = "tekken.json"
"""The file of mistral-common's tokenizers, with which vLLM renders chats by that library."""


def renderer_of(base_model: str) -> Renderer | None:
    """The renderer of a model: a directory, or a name of the model hub. None if it has no template on this machine, or
    if vLLM renders its chats with code that this process does not have. Raises CannotRender."""
    kind = whole_config(base_model).get("model_type", "")
    if kind in harmony.HARMONY_KINDS:
        return harmony.Harmony()
    if kind in deepseek.DEEPSEEK_KINDS:
        return deepseek.DeepSeek(kind)
    if kind in inkling.INKLING_KINDS:
        return inkling.Inkling()
    if kind in RENDERED_BY_VLLM or ((own := file_of(base_model, _MISTRAL)) is not None and own.is_file()):
        return None
    text, with_tools = template_of(base_model, tools=False), template_of(base_model, tools=True)
    settings = json_of(base_model, "tokenizer_config.json")
    text = with_tools if text is None else text
    return None if text is None else ChatTemplate(text, special_tokens(settings), with_tools)


def has_system_role(base_model: str) -> bool:
    """Whether the chats of a model take system messages; True if its template cannot be read on this machine."""
    try:
        renderer = renderer_of(base_model)
    except CannotRender:
        return True
    return renderer is None or renderer.has_system_role
