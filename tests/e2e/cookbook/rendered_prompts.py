"""Prompts as the cookbook's renderers make them.

Run in the cookbook's environment, as `python -m tests.e2e.cookbook.rendered_prompts TOKENIZER < CASES`: reads pairs of
a renderer's name and the messages of a chat as JSON, and prints the text of each prompt.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

from tinker_cookbook.renderers import get_renderer  # pyright: ignore[reportMissingImports]
from tinker_cookbook.renderers.base import ToolCall  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer


def as_cookbook(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        ToolCall(id=call["id"], function=ToolCall.FunctionBody(**call["function"]))
        for call in message.get("tool_calls", [])
    ]
    return message | ({"tool_calls": calls} if calls else {})


def main() -> None:
    warnings.simplefilter("ignore")
    tokenizer: Any = AutoTokenizer.from_pretrained(sys.argv[1])
    texts = []
    for name, messages in json.load(sys.stdin):
        prompt = get_renderer(name, tokenizer).build_generation_prompt([as_cookbook(each) for each in messages])
        texts.append(tokenizer.decode(prompt.to_ints(), skip_special_tokens=False))
    print(json.dumps(texts))


if __name__ == "__main__":
    main()
