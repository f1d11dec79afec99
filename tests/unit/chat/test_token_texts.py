"""The texts of sampled tokens, one by one."""

from __future__ import annotations

import random
import time

import pytest
from tokenizers import Tokenizer

from skyrl.base.tiny import model_path
from skyrl.chat.agents.rendering.loaded_models import FileTokens


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> FileTokens:
    return FileTokens(tokenizer)


def test_the_texts_of_tokens_are_the_text_and_a_character_of_several_tokens_is_the_last_ones(
    tokens: FileTokens, tokenizer: Tokenizer
) -> None:
    text = "Höhe 🎉 of\n the  hill<|im_end|>"
    encoded = tokenizer.encode(text)
    texts = tokens.texts(encoded.ids)
    assert "".join(texts) == text
    assert len(texts) == len(encoded.ids)
    at = texts.index("🎉")
    assert texts[at - 3 : at] == ["", "", ""]
    assert texts[-1] == "<|im_end|>"


def test_tokens_that_are_no_text_have_a_text_and_take_no_longer(tokens: FileTokens, tokenizer: Tokenizer) -> None:
    """A model that is new may sample any bytes."""
    [first_byte, *_] = tokenizer.encode("🎉").ids
    assert tokens.texts([first_byte] * 8) == ["", "", "", "\ufffd"] * 2
    began = time.process_time()
    assert len(tokens.texts([first_byte] * 2_000)) == 2_000
    assert time.process_time() - began < 1.0
    some = random.Random(1).choices(range(tokenizer.get_vocab_size()), k=500)
    assert len(tokens.texts(some)) == 500
    assert tokens.texts([]) == []
