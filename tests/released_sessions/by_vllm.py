"""Conversations as vLLM and transformers render them, to compare with: their own code, none of skyrl's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any


class Refused(Exception):
    """The template refuses a conversation, or fails on it."""


@cache
def compiled(template: str) -> tuple[Any, Any]:
    from transformers.utils.chat_template_utils import _compile_jinja_template
    from vllm.renderers.hf import _detect_content_format

    return _compile_jinja_template(template), _detect_content_format(template, default="string")


def render(
    template: str,
    tokens: dict[str, str],
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    arguments: dict[str, Any],
    *,
    begins: bool = True,
) -> str:
    """Raises Refused."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.renderers.chat_utils import _parse_chat_message_content, _postprocess_messages
    from vllm.renderers.hf import resolve_chat_template_kwargs  # torch, which takes seconds that skipped tests need not

    made, form = compiled(template)
    parser = SimpleNamespace(mm_placeholder_storage=dict, model_config=SimpleNamespace(enable_prompt_embeds=False))
    tracker: Any = SimpleNamespace(create_parser=lambda **_: parser)
    parsed: list[Any] = []
    for message in copy.deepcopy(list(messages)):
        if "reasoning_content" in message:
            message["reasoning"] = message.pop("reasoning_content")
        parsed += _parse_chat_message_content(message, tracker, form, False)  # type: ignore[arg-type]
    _postprocess_messages(parsed)
    given = None if tools is None else [ChatCompletionToolsParam(**tool).model_dump() for tool in tools]
    kept = resolve_chat_template_kwargs(SimpleNamespace(apply_chat_template=lambda: None), template, dict(arguments))  # type: ignore[arg-type]
    try:
        return made.render(messages=parsed, tools=given, documents=None, add_generation_prompt=begins, **tokens, **kept)
    except Exception as error:  # templates are programs: they fail with any error
        raise Refused(str(error)) from error
