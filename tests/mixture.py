"""A tiny mixture of experts for real vLLM, with random weights, and the experts that transformers chooses in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from skyrl.tiny import model_path
from tests.families import save_random

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def make_mixture(directory: Path) -> str:
    """Save a Qwen3-MoE model, float32, with the tiny model's tokenizer. Returns its path."""
    vocab = json.loads((model_path() / "config.json").read_text())["vocab_size"]
    settings = {
        "model_type": "qwen3_moe",
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    path = save_random(settings, directory / "mixture")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model_path() / name, Path(path) / name)
    return path


def chosen_experts(path: str, tokens: list[int]) -> npt.NDArray[np.int64]:
    """The experts that transformers' routers choose for these tokens: int64 [tokens, layers, k], ascending."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), output_router_logits=True).router_logits
    rows = [layer.view(len(tokens), EXPERTS).topk(TOP_K).indices.sort().values for layer in logits]
    return torch.stack(rows, dim=1).numpy()
