"""The tokenizer of a model on this machine, as vLLM reads it from the model's files. Executes no code of the model.

Most models have tokenizer.json. Kimi's have `tiktoken.model`, from which transformers, and so vLLM, makes a tokenizer:
this module makes the same, because the API imports no transformers.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from skyrl.base.model_files import file_of, json_of

_WORDS = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How transformers 5.19 splits text for any `tiktoken.model`."""
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


def tokenizer_of(base_model: str) -> Tokenizer | None:
    """The tokenizer of a directory, or of a model of the hub that is on this machine; None if neither of its files is
    there. Takes seconds for a `tiktoken.model` of 160,000 tokens. Raises ValueError if the file cannot be read."""
    for name, read in (("tokenizer.json", _from_json), ("tiktoken.model", _from_tiktoken)):
        file = file_of(base_model, name)
        if file is not None and file.is_file():
            try:
                return read(file, json_of(base_model, "tokenizer_config.json"))
            except Exception as error:  # tokenizers raises bare exceptions
                raise ValueError(f"{file}: {error}") from error
    return None


def _from_json(file: Path, settings: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_file(str(file))


def _from_tiktoken(file: Path, settings: Mapping[str, Any]) -> Tokenizer:
    ranks = _ranks(file)
    made = Tokenizer(BPE(_vocabulary(ranks), _merges(ranks), fuse_unk=False, ignore_merges=True))
    bytes_of_text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS), "isolated"), bytes_of_text])
    made.decoder = decoders.ByteLevel()
    added = {int(number): token for number, token in (settings.get("added_tokens_decoder") or {}).items()}
    contents = {number: token["content"] for number, token in added.items()}
    filled = [
        contents.get(number, f"<|reserved_token_{number}|>")
        for number in range(len(ranks), max(contents, default=0) + 1)
    ]
    made.add_special_tokens([AddedToken(content, normalized=False, special=True) for content in filled])
    for _, token in sorted(added.items()):
        flags = {flag: token[flag] for flag in _FLAGS if flag in token}
        made.add_tokens([AddedToken(token["content"], **flags)])
    return made


def _ranks(file: Path) -> dict[bytes, int]:
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    return {base64.b64decode(piece): int(rank) for piece, rank in lines}


def _vocabulary(ranks: Mapping[bytes, int]) -> dict[str, int]:
    return {_text(piece): rank for piece, rank in ranks.items()}


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """All pairs that make a token: by the token's rank, then by those of its parts."""
    pairs = [
        (rank, ranks[piece[:at]], ranks[piece[at:]], piece[:at], piece[at:])
        for piece, rank in ranks.items()
        for at in range(1, len(piece))
        if piece[:at] in ranks and piece[at:] in ranks
    ]
    return [(_text(left), _text(right)) for _, _, _, left, right in sorted(pairs)]


def _letters() -> dict[int, str]:
    """The character for each byte in a byte-level vocabulary, as GPT-2 has it: printable ones are themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in set(printable))
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


_LETTERS = _letters()


def _text(piece: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in piece)
