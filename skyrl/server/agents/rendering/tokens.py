"""A model's tokenizer, from its tokenizer.json, and the tokens that end its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from skyrl.base.model_files import json_of

_CHARACTER_TOKENS = 4
"""The most tokens that one character has: those of its bytes in UTF-8."""
_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class FileTokens:
    """A TextTokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def id_of(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def text_of(self, token: int) -> str | None:
        return self._tokenizer.id_to_token(token)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, special ones too. A character that consists of several tokens is the text of the
        last one, and the others are empty. What is no text is U+FFFD."""
        texts: list[str] = []
        stream, waiting = DecodeStream(skip_special_tokens=False), 0
        for token in ids:
            text = stream.step(self._tokenizer, token)
            waiting = 0 if text else waiting + 1
            if waiting == _CHARACTER_TOKENS:  # the stream would wait for its end, and decode all of it at each step
                stream, waiting, text = DecodeStream(skip_special_tokens=False), 0, "\ufffd"
            texts.append(text or "")
        return texts


def stops_of(base_model: str, tokens: FileTokens) -> dict[str, int]:
    """The tokens that end an answer, as the model's files name them, by their texts."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        given = json_of(base_model, file).get("eos_token_id")
        found.update([given] if isinstance(given, int) else given or [])
    text = special_tokens(json_of(base_model, "tokenizer_config.json")).get("eos_token")
    if text is not None and (token := tokens.id_of(text)) is not None:
        found.add(token)
    return {text: token for token in sorted(found) if (text := tokens.text_of(token)) is not None}


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens in tokenizer_config.json, by their names."""
    found = {name: settings.get(name) for name in _VARIABLES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
