"""A model's tokenizer and templates from its files, and whether two models share their vocabularies."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from skyrl.base.model_files import Shared, shared_ids, template_of, tokens_of
from skyrl.base.model_tokenizer import tokenizer_of
from skyrl.base.tiny import model_path

WORDS = (b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b"\xe4\xb8", b"\xe4\xb8\xad", b"12", b"123")
TEXTS = (
    "hello world, Hello  WORLD's 12345\n\n  x<|im_end|>\n<think>hm</think>",
    "中文 und Größe\t<|im_user|> [EOS]<|reserved_token_270|>",
    "<|im_end|> <|im_end|>",
)


def write(directory: Path, kind: str) -> Path:
    """A model with Kimi's files. Its code must never run."""
    directory.mkdir()
    pieces = [*(bytes([byte]) for byte in range(256)), *WORDS]
    lines = (f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(pieces))
    (directory / "tiktoken.model").write_text("\n".join(lines))
    added = [("[BOS]", True), ("[EOS]", True), ("", None), ("<|im_end|>", True), ("<|im_user|>", True)]
    added += [("<think>", False), ("</think>", False)]
    settings = {
        "added_tokens_decoder": {
            str(len(pieces) + at): {"content": content, "special": special, "normalized": False}
            for at, (content, special) in enumerate(added)
            if special is not None
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": kind}))
    (directory / "tokenization_kimi.py").write_text("raise SystemExit('the model ran its code')\n")
    return directory


THEIRS = """
import json, sys
from vllm.tokenizers import get_tokenizer
tokenizer, texts = get_tokenizer(sys.argv[1]), json.loads(sys.argv[2])
ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
shown = [[tokenizer.decode(row, skip_special_tokens=skipped) for skipped in (True, False)] for row in ids]
print(json.dumps([tokenizer.get_vocab(), ids, shown]))
"""
"""vLLM's vocabulary, ids and texts. In a process of its own: a Kimi's config.json changes a class of transformers."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kimi_k2", "kimi_k25"])
def test_a_tiktoken_model_is_read_as_vllm_reads_it(tmp_path: Path, kind: str) -> None:
    directory = write(tmp_path / "kimi", kind)
    command = [sys.executable, "-c", THEIRS, str(directory), json.dumps(TEXTS)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=400).stdout
    vocabulary, ids, shown = json.loads(answer.splitlines()[-1])
    ours = tokenizer_of(str(directory))
    assert ours is not None
    assert ours.get_vocab() == vocabulary
    for text, row, texts in zip(TEXTS, ids, shown, strict=True):
        assert ours.encode(text, add_special_tokens=False).ids == row
        assert [ours.decode(row, skip_special_tokens=skipped) for skipped in (True, False)] == texts
        assert ours.decode(row, skip_special_tokens=False) == text


def test_tokenizer_json_is_taken_first_and_none_is_none(tmp_path: Path) -> None:
    ours = tokenizer_of(str(model_path()))
    assert ours is not None
    assert ours.decode(ours.encode("hello").ids) == "hello"
    assert tokenizer_of(str(tmp_path)) is None


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("no pair")
    with pytest.raises(ValueError, match=r"tiktoken\.model"):
        tokenizer_of(str(tmp_path))


def tokenizer(directory: Path, model: Any, *added: tuple[int, str]) -> str:
    directory.mkdir()
    content = {"model": model, "added_tokens": [{"id": number, "content": token} for number, token in added]}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return str(directory)


def test_ids_are_shared_if_both_tokenizers_have_the_same_token_there(tmp_path: Path) -> None:
    one = tokenizer(tmp_path / "one", {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}}, (3, "<end>"))
    same = tokenizer(tmp_path / "same", {"type": "BPE", "vocab": {"c": 2, "b": 1, "a": 0}}, (3, "<end>"))
    longer = tokenizer(tmp_path / "longer", {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "d": 4}}, (3, "<end>"))
    other = tokenizer(tmp_path / "other", {"type": "Unigram", "vocab": [["b", -1.5], ["b2", 0], ["c", -2]]})
    assert shared_ids(one, same) == Shared(4, 4)
    assert shared_ids(one, longer) == Shared(4, 5)
    assert shared_ids(one, other) == shared_ids(other, one) == Shared(1, 4)


def test_the_tokens_are_those_of_the_tokenizer_itself() -> None:
    """Of every id of the tiny model, and of no other."""
    real = PreTrainedTokenizerFast(tokenizer_file=f"{model_path()}/tokenizer.json")
    assert tokens_of(str(model_path())) == {number: token for token, number in real.get_vocab().items()}


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model": {"vocab": 3}}', '{"model": {}}'])
def test_nothing_is_said_of_a_tokenizer_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert shared_ids(str(model_path()), str(tmp_path)) is None


@pytest.mark.parametrize("name", ["acme/none", "no name of the hub/at/all"])
def test_nothing_is_said_of_a_model_of_the_hub_that_is_not_here(name: str) -> None:
    assert shared_ids(name, str(model_path())) is None


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
