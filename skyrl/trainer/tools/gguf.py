"""Reads a GGUF file: its metadata as Python values, its tensors some rows at a time, dequantized, and its vocabulary as
tokenizer.json with what belongs to it: special tokens, chat templates, ends of answers.

A vocabulary whose way of cutting texts it does not know, it refuses: other tokens than the model was trained on make a
worse model, and nobody sees why. Knows the libraries `gguf` and `tokenizers`. Knows nothing of architectures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from skyrl.base.config.server import ConfigError

READING_ERRORS = (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError, UnicodeDecodeError)
"""What the library raises for damaged files, besides OSError."""


class GgufFile:
    """An opened file. `metadata` has all keys; `tensors` the shapes in torch's order, [rows, columns]."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: the file is no GGUF, is cut off or damaged, is a part of several, or has a tensor whose
        type cannot be dequantized. Raises OSError."""
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ConfigError("the package gguf is missing: run make setup again, or pip install gguf") from error
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(f"{path} is no GGUF file: it does not begin with GGUF")
        try:
            reader = GGUFReader(path)
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except READING_ERRORS as error:
            raise ConfigError(f"{path} is damaged or cut off: {_one_line(error)}") from error
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.tensors = {
            name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()
        }
        if (parts := self.metadata.get("split.count", 1)) > 1:
            raise ConfigError(f"{path} is one of {parts} parts: join them with llama-gguf-split --merge")
        if not self._tensors:
            raise ConfigError(f"{path} holds no weights, only a vocabulary")
        self._check_types()

    def required(self, key: str) -> Any:
        """The value of a key. Raises ConfigError when the file lacks it."""
        try:
            return self.metadata[key]
        except KeyError:
            raise ConfigError(f"{self.path} lacks {key}") from None

    def type_of(self, tensor: str) -> str:
        """The name of a tensor's type: F32, Q4_K, ..."""
        return self._tensors[tensor].tensor_type.name

    def rows(self, tensor: str, chosen: slice | npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """These rows of a tensor, dequantized: float32 [n, columns], or [n] of a vector. Raises ConfigError for
        numbers that are not finite."""
        from gguf.quants import dequantize

        stored = self._tensors[tensor]
        values = np.asarray(dequantize(stored.data[chosen], stored.tensor_type), np.float32)
        if not np.isfinite(values).all():
            raise ConfigError(f"{self.path}: {tensor} has numbers that are not finite")
        return values

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same bytes."""
        first, second = self._tensors[one], self._tensors[other]
        return first.tensor_type == second.tensor_type and np.array_equal(first.data, second.data)

    def _check_types(self) -> None:
        seen: set[str] = set()
        for name, tensor in self._tensors.items():
            if (kind := tensor.tensor_type.name) in seen:
                continue
            seen.add(kind)
            try:
                self.rows(name, slice(0, 1))
            except NotImplementedError as error:
                raise ConfigError(f"{self.path}: {name} has the type {kind}, which cannot be dequantized") from error


def only_known(file: GgufFile, prefix: str, known: Collection[str]) -> None:
    """Raise ConfigError for a key under `prefix` that is not known: it may change what the model computes."""
    unknown = sorted(
        key for key in file.metadata if key.startswith(f"{prefix}.") and key[len(prefix) + 1 :] not in known
    )
    if unknown:
        raise ConfigError(f"{file.path} has {', '.join(unknown[:4])}, which the conversion does not know")


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


_NORMAL, _UNKNOWN, _CONTROL, _OWN, _UNUSED, _BYTE = range(1, 7)
"""GGUF's types of tokens. `_OWN`: found in texts before all others, but no special token."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_ENDS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"}
"""Special tokens that end an answer by their name, as in llama.cpp; beside those that the file calls so."""
_PREFIX = "tokenizer.ggml"
_SPACE = "\u2581"


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    kinds: list[int]

    def used(self) -> Iterator[tuple[int, str, int]]:
        """The id, text and type of each token, without rows that only fill the embedding up."""
        for number, (text, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if kind != _UNUSED and text != f"[PAD{number}]":
                yield number, text, kind


def write_tokenizer(file: GgufFile, out: Path, rows: int) -> int:
    """Write the tokenizer, its settings and the chat template to `out`. `rows`: of the embedding. Returns the number of
    tokens. Raises ConfigError for a vocabulary that cannot be converted."""
    vocabulary = _vocabulary(file, rows)
    kind = file.required(f"{_PREFIX}.model")
    makers = {"gpt2": _byte_level, "llama": _pieces}
    if kind not in makers:
        raise ConfigError(
            f"{file.path}: {_PREFIX}.model is {kind}, which cannot be converted (but {', '.join(makers)})"
        )
    ids = {text: number for number, text, _ in vocabulary.used()}
    if len(ids) != sum(1 for _ in vocabulary.used()):
        raise ConfigError(f"{file.path}: {_PREFIX}.tokens has a text twice")
    tokenizer = makers[kind](file, vocabulary, ids)
    for number, text, token_kind in vocabulary.used():
        if token_kind in (_UNKNOWN, _CONTROL, _OWN):
            tokenizer.add_tokens([AddedToken(text, normalized=False, special=token_kind != _OWN)])
            if tokenizer.token_to_id(text) != number:
                raise ConfigError(f"{file.path}: the token {text!r} cannot keep its id {number}")
    special = {role: _special(file, vocabulary, role) for role in ("bos", "eos", "unknown", "padding")}
    _add_around(
        file, tokenizer, special, by_default=kind == "llama" or file.metadata.get(_PREFIX + ".pre") == "llama-bpe"
    )
    tokenizer.save(str(out / "tokenizer.json"))
    _write_settings(file, vocabulary, special, out)
    return len(ids)


def _vocabulary(file: GgufFile, rows: int) -> _Vocabulary:
    tokens = _texts(file, "tokens")
    kinds = file.metadata.get(f"{_PREFIX}.token_type", [_NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise ConfigError(f"{file.path}: {_PREFIX}.tokens and {_PREFIX}.token_type have different lengths")
    if file.metadata.get(f"{_PREFIX}.model") == "llama":  # llama.cpp writes the vocabulary's own tokens with blanks
        tokens = [text.replace(" ", _SPACE) if kind == _OWN else text for text, kind in zip(tokens, kinds, strict=True)]
    vocabulary = _Vocabulary(tokens, kinds)
    if (last := max((number for number, _, _ in vocabulary.used()), default=-1)) >= rows:
        raise ConfigError(f"{file.path}: the token {last} has no row in the embedding, which has {rows}")
    return vocabulary


def _texts(file: GgufFile, key: str) -> list[str]:
    texts = file.required(f"{_PREFIX}.{key}")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{file.path}: {_PREFIX}.{key} is no list of texts")
    return texts


def _byte_level(file: GgufFile, vocabulary: _Vocabulary, ids: dict[str, int]) -> Tokenizer:
    """Byte pairs with merges, as of GPT-2. How texts are cut into words before, the file says by a name."""
    words = file.required(f"{_PREFIX}.pre")
    if words not in _CUTS:
        raise ConfigError(f"{file.path}: {_PREFIX}.pre is {words}, which is not known (but {', '.join(_CUTS)})")
    merges: list[tuple[str, str]] = []
    for merge in _texts(file, "merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            raise ConfigError(f"{file.path}: {_PREFIX}.merges has {merge!r}, whose texts are not all tokens")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=words == "llama-bpe"))
    if words == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_CUTS[words]())  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer


def _split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_CUTS = {
    "gpt-2": lambda: [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "smollm": lambda: [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
    "qwen2": lambda: _split(_WORDS % ""),
    "llama-bpe": lambda: _split(_WORDS % "{1,3}"),
}


def _pieces(file: GgufFile, vocabulary: _Vocabulary, ids: dict[str, int]) -> Tokenizer:
    """SentencePiece's byte pairs. The file has scores in the place of merges: two pieces are merged if the vocabulary
    has both together; first the longest of the vocabulary's own, then the one with the highest score."""
    if file.metadata.get(f"{_PREFIX}.precompiled_charsmap"):
        raise ConfigError(f"{file.path}: {_PREFIX}.precompiled_charsmap cannot be converted")
    scores = file.required(f"{_PREFIX}.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise ConfigError(f"{file.path}: {_PREFIX}.tokens and {_PREFIX}.scores have different lengths")
    mergeable = {text: number for number, text, kind in vocabulary.used() if kind in (_NORMAL, _OWN)}
    merges: list[tuple[tuple[float, float], int, int, tuple[str, str]]] = []
    for text, number in mergeable.items():
        rank = (-len(text), 0.0) if vocabulary.kinds[number] == _OWN else (0.0, -scores[number])
        for place in range(1, len(text)):
            left, right = mergeable.get(text[:place]), mergeable.get(text[place:])
            if left is not None and right is not None:
                merges.append((rank, left, right, (text[:place], text[place:])))
    merges.sort()
    unknown = _special(file, vocabulary, "unknown")
    model = models.BPE(ids, [pair for *_, pair in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefixed = file.metadata.get(f"{_PREFIX}.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])  # type: ignore[assignment]
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)  # type: ignore[assignment]
    return tokenizer


def _special(file: GgufFile, vocabulary: _Vocabulary, role: str) -> str | None:
    number = file.metadata.get(f"{_PREFIX}.{role}_token_id")
    if number is None or (role == "padding" and number >= len(vocabulary.tokens)):
        return None
    if not 0 <= number < len(vocabulary.tokens):
        raise ConfigError(f"{file.path}: {_PREFIX}.{role}_token_id is {number}, and there is no such token")
    return vocabulary.tokens[number]


def _add_around(file: GgufFile, tokenizer: Tokenizer, special: dict[str, str | None], *, by_default: bool) -> None:
    """The tokens that every text gets at its ends."""
    first = special["bos"] if file.metadata.get(f"{_PREFIX}.add_bos_token", by_default) else None
    last = special["eos"] if file.metadata.get(f"{_PREFIX}.add_eos_token", False) else None
    if first is None and last is None:
        return

    def around(text: str, segment: int) -> list[str]:
        parts = [*([first] if first else []), text, *([last] if last else [])]
        return [f"{part}:{segment}" for part in parts]

    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=around("$A", 0),
        pair=[*around("$A", 0), *around("$B", 1)],
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in {first, last} if text],
    )


def _write_settings(file: GgufFile, vocabulary: _Vocabulary, special: dict[str, str | None], out: Path) -> None:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.required(f"{file.required('general.architecture')}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    settings |= {name: text for role, name in names.items() if (text := special[role]) is not None}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    for key, template in file.metadata.items():
        if key == "tokenizer.chat_template":
            (out / "chat_template.jinja").write_text(template)
        elif (named := re.fullmatch(r"tokenizer\.chat_template\.(\w+)", key)) is not None:
            more = out / "additional_chat_templates"
            more.mkdir(exist_ok=True)
            (more / f"{named[1]}.jinja").write_text(template)
    named = (file.metadata.get(f"{_PREFIX}.{role}_token_id") for role in ("eos", "eot", "eom"))
    ends = {number for number in named if number is not None}
    ends |= {number for number, text, kind in vocabulary.used() if kind == _CONTROL and text in _ENDS}
    generation: dict[str, Any] = {"eos_token_id": sorted(ends), "do_sample": True} if ends else {"do_sample": True}
    for role, key in (("bos", "bos"), ("pad", "padding")):
        if (number := file.metadata.get(f"{_PREFIX}.{key}_token_id")) is not None:
            generation[f"{role}_token_id"] = number
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
