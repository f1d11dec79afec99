"""The files of a model on this machine, and its settings as small JSON files say them: config.json and those of its
processor; and its chat template.

Reads one file per call, for a template up to four. Imports neither torch nor transformers, so that the API can ask.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOOL_TEMPLATE = "tool_use"
"""The name of the template for conversations with tools, where a model has several."""


def json_of(base_model: str, name: str) -> dict[str, Any]:
    """The file `name` of a directory, or of a model of the hub that is on this machine. Empty if it cannot be read or
    holds no JSON object."""
    file = file_of(base_model, name)
    try:
        values = {} if file is None else json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def file_of(base_model: str, name: str) -> Path | None:
    """The path of the file `name` of a directory, which may be missing there, or of a model of the hub; None if that
    model's file is not on this machine."""
    if Path(base_model).is_dir():
        return Path(base_model) / name
    from huggingface_hub import try_to_load_from_cache  # takes 0.14 s, which most commands need not wait

    try:
        path = try_to_load_from_cache(base_model, name)
    except ValueError:  # no name of the hub
        return None
    return Path(path) if isinstance(path, str) else None


def template_of(base_model: str, *, tools: bool = True) -> str | None:
    """The text of the chat template; None if the model has none on this machine. Some models have several by name:
    vLLM takes that for tools for a chat that has `tools`, and the default one for all others."""
    named = _text_of(base_model, f"additional_chat_templates/{TOOL_TEMPLATE}.jinja") if tools else None
    text = named or _text_of(base_model, "chat_template.jinja")
    for name in ("tokenizer_config.json", "chat_template.json"):
        text = text or _template_in(json_of(base_model, name).get("chat_template"), tools)
    return text


def _text_of(base_model: str, name: str) -> str | None:
    file = file_of(base_model, name)
    try:
        return None if file is None else file.read_text()
    except OSError:
        return None


def _template_in(given: Any, tools: bool) -> str | None:
    """The template in a value of `chat_template`: a text, or a list of named ones."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        return None
    by_name = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
    return (by_name.get(TOOL_TEMPLATE) if tools else None) or by_name.get("default")
