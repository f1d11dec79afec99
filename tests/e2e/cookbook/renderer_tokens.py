"""The tiny model's tokenizer, with the tokens that the cookbook's renderers look for, each a single one.

A renderer takes the tokens of its own family by their text. One tokenizer has them all, so that a renderer that picks
up those of another family would still be noticed in the tokens of its prompt. Knows nothing of models.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from skyrl.base.tiny import model_path

TOKENS = {
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "deepseekv3": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    "gpt_oss": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    "kimi_k2": ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
}
"""By renderer. The tiny tokenizer itself has those of Qwen's and Nemotron's: `<|im_start|>`, `<|im_end|>`, `<think>`,
`</think>`."""

_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_tokenizer(directory: Path) -> int:
    """Write the tokenizer's files. Returns the size of its vocabulary, rounded up to a multiple of 64."""
    for name in _FILES:
        shutil.copyfile(model_path() / name, directory / name)
    file = directory / "tokenizer.json"
    layout = json.loads(file.read_text())
    added = layout["added_tokens"]
    first = max(max(layout["model"]["vocab"].values()), *(token["id"] for token in added)) + 1
    texts = [text for family in TOKENS.values() for text in family]
    for number, text in enumerate(texts, first):
        added.append({**added[0], "id": number, "content": text})
    file.write_text(json.dumps(layout, ensure_ascii=False))
    return -(-(first + len(texts)) // 64) * 64
