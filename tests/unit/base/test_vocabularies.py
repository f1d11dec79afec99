"""Which token ids two tokenizers share: exact figures of small files, and of the tiny model's own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from skyrl.base.model_files import Shared, shared_ids, tokens_of
from skyrl.base.tiny import model_path


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
