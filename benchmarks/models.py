"""Models with random weights and the layers of Qwen3-0.6B, for benchmarks. Float32; embeddings are tied."""

from __future__ import annotations

import shutil
from pathlib import Path

from skyrl.tiny import model_path


def make_quarter(directory: Path) -> str:
    """A quarter of the layers (7), and a vocabulary of 32,768: 144 million parameters. Returns the path."""
    return _make(directory, layers=7, vocabulary=32_768)


def make_large(directory: Path) -> str:
    """All 28 layers and the vocabulary of Qwen3-0.6B, with the tokenizer of the tiny model. Returns the path."""
    path = _make(directory, layers=28, vocabulary=151_936)
    for file in model_path().glob("*token*"):
        shutil.copy(file, directory)
    return path


def _make(directory: Path, *, layers: int, vocabulary: int) -> str:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)
