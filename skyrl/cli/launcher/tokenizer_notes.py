"""What to say about a base model's tokenizer before a start: tokens that the model has no row for, files that
transformers reads otherwise than they say, and a warning of transformers that is none.

Reads the tokenizer's files. Imports no tokenizer: where the files look wrong, a process compares two readings of them.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl.base.model_files import json_of, model_config, tokens_of, whole_config

logger = logging.getLogger(__name__)

COMPARING_S = 120.0
_PIECES = {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CamembertTokenizer", "XLMRobertaTokenizer"}
"""Classes that read a tokenizer as SentencePiece's, whatever its file says."""
_MISTRALS = {"mistral", "mistral3", "voxtral", "ministral", "pixtral"}
_LARGE = 100_000
"""Tokens from which transformers looks for Mistral's pattern."""


def log_notes(base_model: str) -> None:
    """Log a sentence for each finding. `base_model`: a directory, or a name of the hub."""
    for note in notes_on(base_model):
        logger.warning("%s", note)


def notes_on(base_model: str) -> Iterator[str]:
    tokens = tokens_of(base_model)
    if tokens is None:
        return
    config = whole_config(base_model)
    rows = model_config(base_model).get("vocab_size")
    beyond = {} if not isinstance(rows, int) else {number: text for number, text in tokens.items() if number >= rows}
    if beyond and "vision_config" not in config:
        first = min(beyond)
        some = "1 token" if len(beyond) == 1 else f"{len(beyond):,} tokens"
        yield (
            f"the tokenizer of {base_model} has {some} beyond the model's {rows:,} rows ({first}, "
            f"{beyond[first]!r}): requests that hold one are refused"
        )
    named = str(json_of(base_model, "tokenizer_config.json").get("tokenizer_class", ""))
    suspect = named.removesuffix("Fast") in _PIECES and _is_byte_level(json_of(base_model, "tokenizer.json"))
    if suspect and (read := _read_otherwise(base_model)) is not None:
        yield (
            f"tokenizer_config.json of {base_model} says tokenizer_class: {named}, with which transformers reads its "
            f"tokenizer.json wrongly ({read}): chats, and clients that load it, get wrong tokens and texts; set "
            'tokenizer_class to "PreTrainedTokenizerFast" there'
        )
    if Path(base_model).is_dir() and len(tokens) > _LARGE and _is_taken_for_mistrals(config):
        yield (
            f'transformers may warn of "an incorrect regex pattern" of {base_model}: the pattern is Mistral\'s, and '
            "this model is none of theirs; the warning ends with a transformers_version in its config.json"
        )


def _is_taken_for_mistrals(config: dict[str, Any]) -> bool:
    return bool(config) and not config.get("transformers_version") and config.get("model_type") not in _MISTRALS


def _is_byte_level(tokenizer: dict[str, Any]) -> bool:
    decoder = tokenizer.get("decoder") or {}
    return any(step.get("type") == "ByteLevel" for step in (decoder, *decoder.get("decoders", ())))


def _read_otherwise(base_model: str) -> str | None:
    """What transformers makes of a text, where that is not what tokenizer.json makes of it."""
    command = [sys.executable, "-m", "skyrl.trainer.tools.tokenizer_readings", base_model]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPARING_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() or None
