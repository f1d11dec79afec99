"""Models for benchmarks: random float32 weights with the layers of Qwen3-0.6B, and tied embeddings; the tiny model with
a longer context."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from skyrl.base.tiny import model_path


def make_small(directory: Path, layers: int) -> str:
    """Qwen3's layers with a hidden size of 64, and a vocabulary of 256. Returns the path."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return _make(directory, layers, 256, head_dim=16, max_position_embeddings=4096, **sizes)


def make_deep(directory: Path, layers: int, hidden: int, vocabulary: int, context: int) -> str:
    """Qwen3's layers with heads of 64, for sequences of `context` tokens. Returns the path."""
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 128), "head_dim": 64}
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "max_position_embeddings": context}
    return _make(directory, layers, vocabulary, **heads, **sizes)


def make_quarter(directory: Path) -> str:
    """A quarter of the layers (7), and a vocabulary of 32,768: 144 million parameters. Returns the path."""
    return _make(directory, 7, 32_768)


def make_large(directory: Path) -> str:
    """All 28 layers and the vocabulary of Qwen3-0.6B, with the tokenizer of the tiny model. Returns the path."""
    path = _make(directory, 28, 151_936)
    for file in model_path().glob("*token*"):
        shutil.copy(file, directory)
    return path


def make_long_tiny(directory: Path) -> str:
    """The tiny model with a context of 16,384 tokens. Returns the path."""
    shutil.copytree(model_path(), directory)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 16_384}))
    return str(directory)


def _make(directory: Path, layers: int, vocabulary: int, **sizes: Any) -> str:
    """A model of Qwen3-0.6B's sizes but those given."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    known: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    }
    config = Qwen3Config(vocab_size=vocabulary, num_hidden_layers=layers, tie_word_embeddings=True, **(known | sizes))
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)


def make_hybrid(directory: Path) -> str:
    """Three layers of the gated delta rule and one of attention, as Qwen3.5 has them: heads of 128, a hidden size of
    256, a vocabulary of 8,192. Returns the path."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "head_dim": 64}
    return _make_hybrid(directory, vocab_size=8192, linear_num_key_heads=2, linear_num_value_heads=4, **sizes)


def make_large_hybrid(directory: Path) -> str:
    """Four layers and the vocabulary of Qwen3.5-0.8B: 0.3 billion parameters. Returns the path."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "head_dim": 256}
    return _make_hybrid(directory, vocab_size=248_320, linear_num_key_heads=16, linear_num_value_heads=16, **sizes)


def _make_hybrid(directory: Path, **sizes: Any) -> str:
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        num_hidden_layers=4,
        num_key_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        **sizes,
    )
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(config).save_pretrained(directory)
    return str(directory)


def make_seeing(directory: Path, *, layers: int = 4, depth: int = 6) -> str:
    """Layers of Qwen3-VL with a hidden size of 512, and a vision tower of so many blocks with 256, two of which are
    followed by deepstack features: 28 million parameters. A picture of 448 x 448 pixels has 196 tokens. Returns the
    path."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 16_384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 8, 8]},
    }
    vision = {
        "depth": depth,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_heads": 4,
        "out_hidden_size": 512,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 3],
    }
    ids: Any = {
        "vision_start_token_id": 8000,
        "vision_end_token_id": 8001,
        "image_token_id": 8002,
        "video_token_id": 8003,
    }
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **ids))
    model.save_pretrained(directory)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 4096, "longest_edge": 2**22},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return str(directory)


class Shape:
    """The numbers of a model's config.json that formulas need."""

    def __init__(self, model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        self.layers, self.hidden = config["num_hidden_layers"], config["hidden_size"]
        self.between, self.vocabulary = config["intermediate_size"], config["vocab_size"]
        self.queries = config["num_attention_heads"] * config["head_dim"]
        self.keys = config["num_key_value_heads"] * config["head_dim"]

    def linears(self) -> list[tuple[int, int]]:
        """In and out features of the linear layers that an adapter trains; the last is the output layer."""
        hidden, between = self.hidden, self.between
        attention = [(hidden, self.queries), (hidden, self.keys), (hidden, self.keys), (self.queries, hidden)]
        layer = [*attention, (hidden, between), (hidden, between), (between, hidden)]
        return [*layer * self.layers, (hidden, self.vocabulary)]

    def base_parameters(self) -> int:
        return sum(ins * outs for ins, outs in self.linears())

    def adapter_parameters(self, rank: int) -> int:
        return rank * sum(ins + outs for ins, outs in self.linears())
