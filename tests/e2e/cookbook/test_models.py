"""What the pages say of the cookbook: its models and recipes, and where its renderers make other prompts than the
templates of the released models (docs/howto/openai.md)."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl.chat.agents.rendering.renderer import ChatTemplate, Setting
from skyrl.chat.openai.messages import GPT_OSS, LLAMA, QWEN3, difference
from tests.architectures import cookbook
from tests.cookbook import recipes
from tests.environments import ROOT, environment
from tests.released_templates import CannotFetch, released_templates

from .renderer_tokens import write_tokenizer


def test_the_page_is_made_from_the_installed_cookbook() -> None:
    assert cookbook.installed() == cookbook.listed(), "`make tables NEW=models` writes the page anew"


def test_each_model_has_a_renderer_that_is_recommended_first() -> None:
    assert len(cookbook.listed().models) >= 46
    assert all(cookbook.listed().models.values())


def test_the_page_of_recipes_has_those_of_the_installed_cookbook() -> None:
    assert recipes.installed() == recipes.listed(), "`make tables NEW=models` writes the page anew"


USER: dict[str, Any] = {"role": "user", "content": "Who watches the river?"}
PLAIN = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "The owl."}, USER]


def called(count: int) -> list[dict[str, Any]]:
    """A chat in which so many calls have had their results."""
    ids = [f"functions.look:{number}" for number in range(count)]
    calls = [{"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}} for name in ids]
    results = [{"role": "tool", "tool_call_id": name, "name": "look", "content": "an owl"} for name in ids]
    return [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


CASES: list[tuple[str, str, str, dict[str, bool]]] = [
    ("qwen3", "Qwen-Qwen3-0.6B", "qwen3", {"plain": True, "one call": True, "two calls": False}),
    ("qwen3_5", "Qwen3.5-4B", "qwen3_5", {"plain": True, "one call": True, "two calls": True}),
    ("llama3", "meta-llama-Llama-3.1-8B-Instruct", "llama", {"plain": False}),
    ("llama3", "meta-llama-Llama-3.3-70B-Instruct", "llama", {"plain": False}),
    ("gpt_oss_no_sysprompt", "openai-gpt-oss-120b", "gpt_oss", {"plain": False}),
    ("gpt_oss_medium_reasoning", "openai-gpt-oss-120b", "gpt_oss", {"plain": True, "one call": False}),
    ("kimi_k2", "Kimi-K2-Thinking", "kimi_k2", {"plain": True}),
    ("nemotron3", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron_h", {"plain": True, "two calls": True}),
]
"""Renderer, template, model type, and for each kind of chat whether both make the same prompt."""
CHATS = {"plain": PLAIN, "one call": called(1), "two calls": called(2)}
BEGINS = {"llama": "<|begin_of_text|>"}
NOTES = {"qwen3": QWEN3, "llama": LLAMA, "gpt_oss": GPT_OSS}


@pytest.mark.slow
def test_renderers_and_templates_differ_where_the_page_says_so(tmp_path: Path) -> None:
    try:
        directory = released_templates()
    except CannotFetch as error:
        pytest.skip(f"no released templates: {error}")
    write_tokenizer(tmp_path)
    asked = [(renderer, CHATS[kind]) for renderer, _, _, kinds in CASES for kind in kinds]
    python = environment(ROOT / "requirements" / "cookbook.txt")
    done = subprocess.run(
        [python, "-m", "tests.e2e.cookbook.rendered_prompts", str(tmp_path)],
        input=json.dumps(asked),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    texts = iter(json.loads(done.stdout.splitlines()[-1]))
    for renderer, name, model_type, kinds in CASES:
        text = (directory / f"{name}.jinja").read_text()
        template = ChatTemplate(text, {"bos_token": BEGINS.get(model_type, "")})
        assert difference(model_type, text) == NOTES.get(model_type)
        for kind, same in kinds.items():
            assert (template.render(CHATS[kind], Setting(at=time.time())) == next(texts)) is same, (renderer, kind)
