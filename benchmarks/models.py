"""Models for benchmarks: random float32 weights with the layers of Qwen3-0.6B or smaller ones, and tied embeddings; the
tiny model with a longer context."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from skyrl.base.tiny import model_path


def make_quarter(directory: Path) -> str:
    """A quarter of the layers (7), and a vocabulary of 32,768: 144 million parameters. Returns the path."""
    return _make(directory, layers=7, vocabulary=32_768)


def make_large(directory: Path) -> str:
    """All 28 layers and the vocabulary of Qwen3-0.6B, with the tokenizer of the tiny model. Returns the path."""
    path = _make(directory, layers=28, vocabulary=151_936)
    for file in model_path().glob("*token*"):
        shutil.copy(file, directory)
    return path


def make_long_tiny(directory: Path) -> str:
    """The tiny model with a context of 16,384 tokens. Returns the path."""
    shutil.copytree(model_path(), directory)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 16_384}))
    return str(directory)


def make_wide(directory: Path) -> str:
    """21 million parameters: 6 layers of half the width, and a vocabulary of 4,096. Returns the path."""
    return _make(directory, layers=6, vocabulary=4096, hidden=512, heads=8, head=64)


def _make(
    directory: Path, *, layers: int, vocabulary: int, hidden: int = 1024, heads: int = 16, head: int = 128
) -> str:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)
