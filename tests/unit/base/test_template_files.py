"""Which chat template a model has, for chats with and without tools."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.model_files import template_of
from skyrl.base.tiny import model_path

PLAIN, TOOLS, OTHER = "plain {{ messages }}", "tools {{ messages }}", "other {{ messages }}"
NAMED = [
    {"name": "default", "template": PLAIN},
    {"name": "tool_use", "template": TOOLS},
    {"name": "rag", "template": "r"},
]


@pytest.mark.parametrize(
    ("files", "plain", "tools"),
    [
        ({"tokenizer_config.json": NAMED}, PLAIN, TOOLS),
        ({"tokenizer_config.json": NAMED[:1]}, PLAIN, PLAIN),
        ({"tokenizer_config.json": OTHER}, OTHER, OTHER),
        ({"chat_template.jinja": PLAIN, "tokenizer_config.json": OTHER}, PLAIN, PLAIN),
        ({"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": TOOLS}, PLAIN, TOOLS),
        ({"chat_template.json": PLAIN}, PLAIN, PLAIN),
        ({}, None, None),
    ],
)
def test_the_template_for_tools_is_that_of_chats_with_tools(
    tmp_path: Path, files: dict[str, Any], plain: str | None, tools: str | None
) -> None:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(model_path() / name, tmp_path)
    settings = json.loads((model_path() / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, template in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        kept = settings if name == "tokenizer_config.json" else {}
        file.write_text(json.dumps(kept | {"chat_template": template}) if name.endswith(".json") else template)
    assert (template_of(str(tmp_path), tools=False), template_of(str(tmp_path))) == (plain, tools)
    if plain is not None and "chat_template.json" not in files:  # that is a processor's
        theirs = import_module("transformers").AutoTokenizer.from_pretrained(str(tmp_path))
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        assert (theirs.get_chat_template(), theirs.get_chat_template(tools=[tool])) == (plain, tools)
