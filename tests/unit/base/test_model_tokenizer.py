"""The tokenizer of a model without tokenizer.json is the one that vLLM takes."""

from __future__ import annotations

import base64
import json
from importlib import import_module
from pathlib import Path

import pytest

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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["kimi_k2", "kimi_k25"])
def test_a_tiktoken_model_is_read_as_vllm_reads_it(tmp_path: Path, kind: str) -> None:
    directory = write(tmp_path / "kimi", kind)
    theirs = import_module("vllm.tokenizers").get_tokenizer(str(directory))
    ours = tokenizer_of(str(directory))
    assert ours is not None
    assert ours.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False).ids == ids
        for skipped in (True, False):
            shown = ours.decode(ids, skip_special_tokens=skipped)
            assert shown == theirs.decode(ids, skip_special_tokens=skipped)
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_json_is_taken_first_and_none_is_none(tmp_path: Path) -> None:
    ours = tokenizer_of(str(model_path()))
    assert ours is not None
    assert ours.decode(ours.encode("hello").ids) == "hello"
    assert tokenizer_of(str(tmp_path)) is None


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("no pair")
    with pytest.raises(ValueError, match=r"tiktoken\.model"):
        tokenizer_of(str(tmp_path))
