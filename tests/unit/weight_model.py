"""A model of three tensors with the loading that vLLM's models have, and a checkpoint of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from skyrl.inference.vllm_plugin.weights.model import ServedModel

VOCABULARY, WIDTH = 5, 4
EMBED, QUERY, KEY, SCALE = "embed_tokens.weight", "attn.q.weight", "attn.k.weight", "scale"
HEAD = "lm_head.weight"
SHAPES = {EMBED: (VOCABULARY, WIDTH), QUERY: (WIDTH, WIDTH), KEY: (2, WIDTH), SCALE: ()}


class Layer(torch.nn.Module):
    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, WIDTH, dtype=dtype))


class Attention(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.qk = Layer(WIDTH + 2, dtype)


class TinyModel(torch.nn.Module):
    """Joins q and k, and pads the vocabulary, as vLLM does. `skipped` is not loaded; `raises_at` fails."""

    packed_modules_mapping = {"qk": ["q", "k"]}

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed_tokens = Layer(VOCABULARY + 3, dtype)
        self.attn = Attention(dtype)
        self.scale = torch.nn.Parameter(torch.tensor(0.0, dtype=dtype))
        self.skipped: str | None = None
        self.raises_at: str | None = None

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        places = {QUERY: slice(0, WIDTH), KEY: slice(WIDTH, WIDTH + 2)}
        for name, tensor in tensors:
            if name == self.raises_at:
                raise RuntimeError("on purpose")
            if name == self.skipped:
                continue
            if name == EMBED:
                self.embed_tokens.weight.data[:VOCABULARY] = tensor
                self.embed_tokens.weight.data[VOCABULARY:] = 0
            elif name == SCALE:
                self.scale.data.copy_(tensor)
            else:
                self.attn.qk.weight.data[places[name]] = tensor


def tensors(value: float = 1.0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Each element is another number."""
    return {
        name: (torch.arange(max(1, torch.Size(shape).numel())).reshape(shape) / 8 + value).to(dtype)
        for name, shape in SHAPES.items()
    }


def served(model: torch.nn.Module, directory: Path, *, tied: bool = True, tensor_parallel: int = 1) -> ServedModel:
    """As vLLM has it after it loaded the checkpoint, which is written into `directory`."""
    directory.mkdir(exist_ok=True)
    save_file(tensors(0.0), directory / "model.safetensors")
    text: Any = SimpleNamespace(tie_word_embeddings=tied)
    config = SimpleNamespace(get_text_config=lambda: text)
    if isinstance(model, TinyModel):
        model.load_weights(tensors(0.0).items())
    return ServedModel(model, str(directory), config, None, tensor_parallel)
